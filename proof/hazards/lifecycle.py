"""H35-H36: shutdown, health."""

import signal
import socket
from functools import partial
from typing import Any

from dev.shell import wait_for
from proof.hazards.sigterm import end_engines
from proof.hazards.stage import Stage, hazard
from tests.integration.cable import ask
from tests.integration.handoffs import open_both

CLOSE_S = 5.0
"""What `close` gives to hand-offs under way; a frozen peer must not add to it."""


@hazard(35, "memory is deregistered while a worker still writes")
def teardown_under_write(stage: Stage) -> str:
    leaving = stage.extra("prefill")
    name, room = stage.name(), stage.room()
    open_both(leaving, stage.decode, room, name=name, pages=[8])
    leaving.until(name, "ready")
    leaving.call("hold_writes")
    leaving.send(name, [1])
    leaving.settle(lambda stats: stats["held_writes"] == 1)
    closed = leaving.call("close", answer_s=20)
    assert closed["seconds"] < 8, closed
    assert stage.decode.until(name, "ended")["cause"] == "peer_lost"
    assert not stage.decode.status(name)["releasable"], "released while the write was still to come"
    leaving.call("release_writes")
    code = leaving.end()
    assert code == 0, f"the process ended with {code}"
    stage.decode.call("fence", incarnation=leaving.incarnation)
    stage.decode.until(name, "releasable")
    return f"close returned after {closed['seconds']:.1f} s with the write in flight; decode held its page"


@hazard(36, "a process that shuts down takes new work, or hangs, and looks healthy")
def shutdown(stage: Stage) -> str:
    leaving = stage.extra("prefill")
    leaving.pages[:] = 9
    name, room = stage.name(), stage.room()
    open_both(leaving, stage.decode, room, name=name, pages=[8])
    leaving.until(name, "ready")
    assert not ask(leaving.admin, "/v1/state")["draining"]
    leaving.call("drain")
    late = stage.name()
    leaving.open(late, stage.room())
    assert leaving.until(late, "ended")["cause"] == "refused"
    assert not leaving.settle(lambda stats: stats["draining"])["drained"]
    assert ask(leaving.admin, "/v1/state")["draining"], "a side that takes no work does not show it"
    leaving.send(name, [1])
    stage.decode.until(name, "done")
    leaving.settle(lambda stats: stats["drained"])
    idle = _close(leaving)
    busy, ended = _beside_frozen(stage), end_engines(stage)
    return (
        f"new work was refused, and the state showed it; close took {idle:.1f} s, beside a frozen peer {busy:.1f} s; "
        f"after SIGTERM engines refused work, let their hand-off end and exited with 0, within {ended:.1f} s"
    )


def _beside_frozen(stage: Stage) -> float:
    """Seconds that `close` takes while a decode is frozen."""
    leaving, frozen = stage.extra("prefill"), stage.extra("decode")
    name, room = stage.name(), stage.room()
    open_both(leaving, frozen, room, name=name, pages=[8])
    leaving.until(name, "ready")
    frozen.signal(signal.SIGSTOP)
    leaving.send(name, [1])
    leaving.until(name, "transferring")
    return _close(leaving)


def _close(side: Any) -> float:  # noqa: ANN401 - the tests' driver is not typed
    """Close a connector; none of its addresses may answer afterwards. Seconds that it took."""
    seconds = side.call("close", answer_s=60)["seconds"]
    assert seconds < CLOSE_S + 2.0, f"close took {seconds:.1f} s"
    for address in (side.admin, side.bootstrap, side.control):
        # zmq closes a socket in a thread of its own, soon after the call.
        what = f"{address} of a connector that was closed answers no more"
        wait_for(what, partial(_answering, address), deadline_s=5.0, interval_s=0.05)
    return float(seconds)


def _answering(address: str) -> str | None:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 5).close()
    except ConnectionRefusedError:
        return None
    return "it still does"
