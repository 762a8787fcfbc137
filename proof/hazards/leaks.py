"""H25-H34: what is left behind, and what it poisons or crashes."""

import json
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, closing, suppress
from typing import Any

from proof.hazards.stage import CANARY, QUIESCE_S, Stage, hazard
from tests.integration.cable import Cable, ask
from tests.integration.handoffs import fail_a_write, offer, open_both
from tests.integration.ports import KeptPort

FORGOTTEN_S = 20.0
"""Longer than any end is remembered here."""
BOUNDED = frozenset({"_backend._backend._parked", "_backend._backend._named"})
"""What NIXL and Mooncake remember of lost peers on purpose, of the last 64 and 4096."""


@hazard(25, "an abort and a completion race, and bring an ended room back")
def clear_races(stage: Stage) -> str:
    ends: dict[str, int] = {}
    draw = stage.random
    for turn in range(60):
        page, source = turn % 8, turn % 30
        stage.decode.pages[:, page] = CANARY
        name, _ = stage.open_both(room=77, pages=[page])
        stage.prefill.send(name, [source])
        # The point at which the abort meets the hand-off, of which most take less than a millisecond.
        time.sleep(draw.uniform(0, draw.choice((0.0005, 0.005))))
        draw.choice((stage.prefill, stage.decode)).abort(name)
        here, there = (side.until(name, "releasable") for side in (stage.decode, stage.prefill))
        # Decode may give up what prefill has just completed; never may it take for done what prefill has failed.
        assert (here["phase"], there["phase"]) != ("done", "failed"), f"false success: {here} {there}"
        assert here["phase"] != "done" or stage.same([source], [page]), "done with other bytes"
        ends[here["phase"]] = ends.get(here["phase"], 0) + 1
        for side, end in ((stage.decode, here), (stage.prefill, there)):
            side.abort(name)  # again, after its end
            assert side.status(name)["phase"] == end["phase"]
    assert ends.keys() >= {"done", "failed"}, f"all aborts came too early or too late: {ends}"
    return f"60 aborts at random points of hand-offs in one room: no end changed, no false success; decode saw {ends}"


@hazard(26, "aborted requests leave rows that fail the next request of their room")
def aborts_leak(stage: Stage) -> str:
    draw = stage.random
    for turn in range(60):
        name, _ = stage.open_both(room=78 + turn % 3, pages=range(8))
        if sent := draw.choice((None, 0, *range(8))):
            stage.prefill.send(name, range(sent), last=False)
        elif sent == 0:
            stage.prefill.until(name, "ready")
        time.sleep(draw.uniform(0, 0.003))
        stage.prefill.abort(name)
        for side in (stage.prefill, stage.decode):
            side.until(name, "releasable")
    for room in (78, 79, 80):
        stage.serve(room=room)
    for side in (stage.prefill, stage.decode):
        side.settle(lambda stats: stats["rows"] == stats["kept"] == 0)
    return "60 aborts by prefill at random points in three rooms left 0 rows; the rooms served on"


@hazard(27, "the failure of an old request turns a later success into a failure")
def failure_survives(stage: Stage) -> str:
    room, other = 81, stage.extra("prefill")
    other.pages[:] = 9
    for _ in range(2):
        fragile = stage.fragile_decode()
        failed, again = stage.name(), stage.name()
        said = fail_a_write(stage.prefill, fragile, room=room, name=failed)
        check_alike(failed, said, stage.prefill, fragile)
        stage.serve(room=room)
        open_both(other, fragile, room, name=again, pages=[3])
        other.send(again, [1])
        for side in (other, fragile):
            assert side.until(again, "done")["cause"] is None
        assert (fragile.pages[:, 3] == 9).all()
        check_alike(failed, said, stage.prefill, fragile)
        end_hold(stage, fragile, failed)
    return f"{said!r}: two transfers failed in one room that both sides then served in; each was as it was"


def check_alike(name: str, said: str, prefill: Any, decode: Any) -> None:  # noqa: ANN401 - the tests' driver is not typed
    """Both sides have the message of the transfer backend; neither has released what it may still touch."""
    for side in (prefill, decode):
        status = side.until(name, "ended")
        assert (status["cause"], status["message"]) == ("transfer_failed", said), status
        assert not status["releasable"], "the backend had not said that its writes are over"


def end_hold(stage: Stage, decode: Any, name: str) -> None:  # noqa: ANN401 - as above
    """The end of a decode is the proof for which prefill holds the pages of a failed write."""
    decode.kill()
    stage.prefill.call("fence", incarnation=decode.incarnation)
    assert stage.prefill.until(name, "releasable")["cause"] == "transfer_failed"


@hazard(28, "a hold belongs to a room, and its release hits the next request of the room")
def hold_by_room(stage: Stage) -> str:
    prefill, decode = stage.prefill, stage.decode
    first, room = stage.write_on_its_way(pages=[8, 3])
    decode.abort(first)
    decode.settle(lambda stats: stats["holds"] == 1)
    second, _ = stage.open_both(room=room, pages=[20])
    prefill.until(second, "ready")
    decode.abort(second)
    decode.until(second, "releasable")
    assert not decode.status(first)["releasable"], "the hold of the first ended with the second"
    third, _ = stage.open_both(room=room, pages=[21])
    prefill.until(third, "ready")
    prefill.call("release_writes")
    decode.until(first, "releasable")
    assert decode.status(third)["phase"] == "transferring", "the release of the first ended the third"
    prefill.send(third, [5])
    decode.until(third, "done")
    assert stage.same([5], [21])
    return "hold, abort and success of three attempts in one room did not touch each other"


@hazard(29, "tables grow with every peer that restarts")
def peers_leak(stage: Stage) -> str:
    sizes, tables = [], []
    for _ in range(4):
        fleeting = stage.extra("decode")
        name, room = stage.name(), stage.room()
        open_both(stage.prefill, fleeting, room, name=name, pages=[1])
        stage.prefill.send(name, [1])
        fleeting.until(name, "done")
        # Statistics may be half a second old: before the peer shows there, it would seem to be gone.
        stage.prefill.settle(lambda stats, who=fleeting.incarnation: who in _incarnations(stats))
        fleeting.kill()
        stats = stage.prefill.settle(
            lambda stats, who=fleeting.incarnation: who not in _incarnations(stats) and stats["rows"] == 0
        )
        sizes.append((stats["fds"], stats["threads"], len(stats["peers"])))
        tables.append(_tables(stage))
    # The first brings what libraries open once; from then on nothing may come.
    assert all(later <= first for later, first in zip(sizes[-1], sizes[1], strict=True)), sizes
    deadline = time.monotonic() + FORGOTTEN_S
    while grown := {name: size for name, size in tables[-1].items() if size > tables[0].get(name, 0)}:
        # What the return of a lost peer would need is kept for `result_s`.
        assert time.monotonic() < deadline, f"grown by three decodes that are gone: {grown}"
        time.sleep(0.2)
        tables.append(_tables(stage))
    return f"descriptors, threads, peers after each of four decodes: {sizes}; none of {len(tables[0])} tables had grown"


def _tables(stage: Stage) -> dict[str, int]:
    """Sizes of all that is in the connector, and of what it shows over HTTP, by name."""
    shown = ask(stage.prefill.admin, "/v1/state")
    lists = {f"/v1/state {name}": len(rows) for name, rows in shown.items() if isinstance(rows, list | dict)}
    counts = {f"/v1/state {name}": int(shown[name]) for name in ("holds", "tombstones")}
    tables = stage.prefill.call("tables")
    return {name: size for name, size in {**tables, **lists, **counts}.items() if name not in BOUNDED}


def _incarnations(stats: dict[str, Any]) -> set[str]:
    return {peer["incarnation"] for peer in stats["peers"]}


@hazard(30, "a registry counts registrations, not ranks")
def registry(stage: Stage) -> str:
    shape = {"layers": [2], "heads": 2, "tp": 2}
    bootstrap = stage.extra("prefill", shape=shape, rank=0).bootstrap
    time.sleep(0.5)  # it renews its lease meanwhile
    try:
        with urllib.request.urlopen(f"http://{bootstrap}/pdpool/v1/bootstrap", timeout=5) as answer:
            raise AssertionError(f"complete with one rank of two: {answer.read()!r}")
    except urllib.error.HTTPError as refusal:
        with refusal:
            said = json.loads(refusal.read())
    assert said["missing"] == [1], said
    second = stage.extra("prefill", registry=bootstrap, shape=shape, rank=1)
    deadline = time.monotonic() + 30
    while (info := _ranks(bootstrap)) is None:
        assert time.monotonic() < deadline, "never complete with both ranks"
        time.sleep(0.05)
    assert info[1] == second.incarnation
    second.kill()
    again = stage.extra("prefill", registry=bootstrap, shape=shape, rank=1)
    while (info := _ranks(bootstrap)) is None or info[1] != again.incarnation:
        assert time.monotonic() < deadline + 30, "the restarted rank did not take its former place"
        time.sleep(0.05)
    return f"refused with missing={said['missing']}; complete with both; a restarted rank took its own place"


def _ranks(bootstrap: str) -> list[str] | None:
    try:
        with urllib.request.urlopen(f"http://{bootstrap}/pdpool/v1/bootstrap", timeout=5) as answer:
            return [rank["incarnation"] for rank in json.loads(answer.read())["ranks"]]
    except urllib.error.HTTPError as error:
        error.close()
        return None


@hazard(31, "a restarted process is taken for its predecessor")
def no_incarnation(stage: Stage) -> str:
    with closing(KeptPort()) as control, closing(KeptPort()) as bootstrap:
        ports = {"control_port": control.number, "bootstrap_port": bootstrap.number}
        former = stage.extra("prefill", **ports)
        name, room = stage.name(), stage.room()
        open_both(former, stage.decode, room, name=name, pages=[8])
        former.until(name, "ready")
        former.kill()
        latter = stage.extra("prefill", **ports)
    latter.pages[:] = 9
    status = stage.decode.until(name, "ended")
    assert (status["cause"], status["releasable"]) == ("peer_lost", False), status
    again = stage.name()
    open_both(latter, stage.decode, room, name=again, pages=[9])
    latter.send(again, [1])
    stage.decode.until(again, "done")
    assert (stage.decode.pages[:, 9] == 9).all()
    stage.stays_held(stage.decode, name, for_s=2 * QUIESCE_S)
    stage.decode.call("fence", incarnation=former.incarnation)
    stage.decode.until(name, "releasable")
    return "the successor at the same ports was served in the same room; only a fence freed the predecessor's pages"


@hazard(32, "the failure of an address ends others that begin with the same characters")
def by_prefix(stage: Stage) -> str:
    with ExitStack() as stack:
        low = _kept_from(stack, range(4100, 6500))
        high = _kept_from(stack, range(10 * low.number, 10 * low.number + 10))
        short, long = (stage.extra("prefill", bootstrap_port=port.number) for port in (low, high))
    long.pages[:] = 9
    names = {side: stage.name() for side in (short, long)}
    for index, (side, name) in enumerate(names.items()):
        open_both(side, stage.decode, stage.room(), name=name, pages=[index])
        side.until(name, "ready")
    short.kill()
    assert stage.decode.until(names[short], "ended")["cause"] == "peer_lost"
    long.send(names[long], [1])
    stage.decode.until(names[long], "done")
    stage.decode.call("fence", incarnation=short.incarnation)
    stage.decode.until(names[short], "releasable")
    return f"prefill at port {low.number} died, the one at {high.number} served on"


def _kept_from(stack: ExitStack, numbers: range) -> KeptPort:
    """The first of these ports that is free, kept until the stack closes."""
    for number in numbers:
        with suppress(OSError):
            return stack.enter_context(closing(KeptPort(number)))
    raise AssertionError(f"none of the ports {numbers} is free")


@hazard(33, "one failed transfer bans the whole peer")
def ban(stage: Stage) -> str:
    prefill, fragile = stage.prefill, stage.fragile_decode()
    failed, again, room = stage.name(), stage.name(), stage.room()
    said = fail_a_write(prefill, fragile, room=room, name=failed)
    check_alike(failed, said, prefill, fragile)
    begun = time.monotonic()
    open_both(prefill, fragile, room, name=again, pages=[3])
    prefill.send(again, [1])
    for side in (prefill, fragile):
        status = side.until(again, "ended")
        assert status["phase"] == "done", f"after {said!r} the next to the same peer ended as {status['message']!r}"
    seconds = time.monotonic() - begun
    assert (fragile.pages[:, 3] == prefill.pages[:, 1]).all()
    check_alike(failed, said, prefill, fragile)
    end_hold(stage, fragile, failed)
    return f"{said!r}; the next hand-off with the same peer took {seconds * 1000:.0f} ms"


@hazard(34, "a socket is closed while another thread sends on it")
def socket_closed(stage: Stage) -> str:
    wire = Cable(stage.prefill)
    try:
        fresh = stage.extra("decode")
        for turn in range(6):
            names = []
            for step, page in enumerate(range(5 * turn, 5 * turn + 5)):
                name, room = stage.name(), stage.room()
                names.append(name)
                stage.prefill.open(name, room)
                offer(fresh, wire.bootstrap, room, name=name, pages=[page])
                if step == turn % 5:
                    stage.prefill.until(name, "ready")  # so that there is a connection to cut
                    wire.cut()
                stage.prefill.send(name, [page], aux_slot=0)
            phases = [fresh.until(name, "ended")["phase"] for name in names]
            assert set(phases) == {"done"}, phases
        assert (fresh.pages[:, :30] == stage.prefill.pages[:, :30]).all()
    finally:
        wire.close()
    return "30 hand-offs ended well while their connection was cut 6 times"
