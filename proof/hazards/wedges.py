"""H12-H22: hand-offs or whole processes that hang."""

import math
import secrets
import signal
import socket
import threading
import time
from contextlib import closing
from typing import Any

import msgspec
import zmq
from pdpool_connector.protocol import frames as f

from proof.hazards.stage import Stage, hazard
from tests.integration.cable import Cable
from tests.integration.handoffs import TIMEOUTS, offer, open_both
from tests.integration.ports import KeptPort

FROZEN_S = 2.0
"""How long a peer is frozen while others are served: a turn that waits for it takes as long."""


@hazard(12, "a transfer worker dies and is never replaced")
def worker_dies(stage: Stage) -> str:
    prefill = stage.prefill
    doomed = stage.extra("decode")
    name, room = stage.name(), stage.room()
    open_both(prefill, doomed, room, name=name)
    prefill.until(name, "ready")
    prefill.call("hold_writes")
    prefill.send(name, [1, 2])
    stage.held()
    doomed.kill()
    prefill.call("release_writes")
    prefill.until(name, "ended")
    prefill.call("fence", incarnation=doomed.incarnation)
    prefill.until(name, "releasable")
    stage.serve()
    late = stage.extra("decode")
    name, room = stage.name(), stage.room()
    open_both(prefill, late, room, name=name, pages=[8])
    prefill.send(name, [1])
    late.until(name, "done")
    return "a decode killed under a write cost its own hand-off; old and new peers were served"


def garbage(control: str) -> int:
    """Send all messages that are known to kill a thread elsewhere, and more, to a control port; how many."""
    host, port = control.rsplit(":", 1)
    header = {"version": 1, "sender": "0" * 32, "attempt": f.AttemptId("0" * 32, 1), "room": 7}
    query = f.encode(f.Query(**header))  # type: ignore[arg-type]
    hello = msgspec.msgpack.encode(["Hello", 1, "0" * 32, 1, "x", b"\xff" * 100, []])
    messages = [
        [b""],
        [secrets.token_bytes(100)],
        [query, query],
        [query[:-3]],
        [query] * 9,
        [hello],
        [msgspec.msgpack.encode(["Open", "a", "room"])],
        [b"\x91" * 5000],
        [b"\0" * (f.MAX_FRAME_BYTES + 1)],
    ]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 2000
        dealer.connect(f"tcp://{control}")
        for message in messages * 5:
            dealer.send_multipart(message)
    for noise in (secrets.token_bytes(4096), b"GET / HTTP/1.1\r\n\r\n", b"\x01\x00" + b"\x05\x00junk" * 20):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(noise)
    return 5 * len(messages) + 3


def _dropped(stats: dict[str, Any]) -> int:
    return sum(stats["drops"].values())


@hazard(13, "one malformed message kills the control thread of prefill")
def prefill_control(stage: Stage) -> str:
    name, _ = stage.open_both()
    stage.prefill.until(name, "ready")
    dropped = _dropped(stage.prefill.stats())
    count = garbage(stage.prefill.control)
    stage.prefill.settle(lambda stats: _dropped(stats) >= dropped + 30)
    stage.prefill.send(name, [1, 2])
    stage.decode.until(name, "done")
    assert stage.same([1, 2], [8, 3])
    return f"{count} malformed messages were counted and dropped; the hand-off under way went on"


@hazard(14, "one malformed message kills the status thread of decode")
def decode_status(stage: Stage) -> str:
    dropped = _dropped(stage.decode.stats())
    count = garbage(stage.decode.control)
    stage.decode.settle(lambda stats: _dropped(stats) >= dropped + 30)
    malformed = stage.decode.stats()["drops"]["malformed"]
    wire = Impostor(stage)
    try:
        name, room = stage.name(), stage.room()
        offer(stage.decode, wire.cable.bootstrap, room, name=name, deadline_s=4.0)
        assert stage.decode.until(name, "ended")["cause"] in ("timed_out", "peer_lost")
        stage.decode.until(name, "releasable")
        assert wire.greeted, "the impostor got no message"
        stage.decode.settle(lambda stats: stats["drops"].get("malformed", 0) > malformed)
    finally:
        wire.close()
    stage.serve()
    return f"{count} malformed messages and a prefill that answers with garbage ended only the hand-off with it"


class Impostor:
    """A control port that answers every message with garbage, and a registry that leads to it."""

    def __init__(self, stage: Stage) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.cable = Cable(stage.prefill)
        self.cable.target = ("127.0.0.1", str(port))
        self.greeted = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._babble)
        self._thread.start()

    def _babble(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(50):
                route = self._socket.recv_multipart()[0]
                self.greeted += 1
                for noise in (b"", secrets.token_bytes(64), b"\x91" * 4000):
                    self._socket.send_multipart([route, noise])
                self._socket.send_multipart([route, b"a", b"b"])

    def close(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join(5)
        self.cable.close()
        self._socket.close(0)
        self._context.term()


@hazard(15, "the thread that notices dead peers dies while rooms end")
def detector_dies(stage: Stage) -> str:
    decode, took = stage.decode, []
    for _ in range(2):
        doomed = stage.extra("prefill")
        lost, room = stage.name(), stage.room()
        open_both(doomed, decode, room, name=lost, pages=[8])
        doomed.until(lost, "ready")
        ending = [stage.name() for _ in range(20)]
        for page, name in enumerate(ending, start=9):
            offer(decode, doomed, stage.room(), name=name, pages=[page])
        doomed.kill()
        killed = time.monotonic()
        aborted = 0
        while (cause := decode.status(lost)["cause"]) is None:
            assert time.monotonic() < killed + 30, "the death of prefill was never noticed"
            if aborted < len(ending):
                decode.abort(ending[aborted])
                aborted += 1
            time.sleep(0.05)
        assert cause == "peer_lost"
        assert aborted, "it was noticed before one of its rooms could end"
        took.append(f"{time.monotonic() - killed:.1f} s, {aborted} rooms")
        for name in ending:
            decode.until(name, "ended")
        decode.call("fence", incarnation=doomed.incarnation)
        for name in (lost, *ending):
            decode.until(name, "releasable")
    return f"two prefills killed one after the other: noticed after {took[0]} ended meanwhile, and {took[1]}"


@hazard(16, "a status is sent once, into a socket that may be connected to nothing")
def status_lost(stage: Stage) -> str:
    name, room = stage.name(), stage.room()
    with closing(KeptPort()) as port:
        offer(stage.decode, port.address, room, name=name, pages=[8])
        stage.decode.settle(lambda stats: any(link["failure"] for link in stats["links"]))
        late = stage.extra("prefill", bootstrap_port=port.number)
    late.pages[:] = 9
    late.open(name, room)
    late.lose("Ended")
    late.send(name, [1])
    late.settle(lambda stats: stats["lost"].get("Ended", 0) >= 3)
    late.lose()
    stage.decode.until(name, "done")
    assert (stage.decode.pages[:, 8] == 9).all()
    late.settle(lambda stats: stats["rows"] == 0)
    _found_behind_a_closed_port(stage, late)
    return "a prefill that started late was found, also at a late control port; a result lost three times was repeated"


def _found_behind_a_closed_port(stage: Stage, prefill: Any) -> None:  # noqa: ANN401 - the tests' driver is not typed
    """The registry answers, and the first connections to the control port come to nothing."""
    wire = Cable(prefill)
    try:
        wire.plugged = False
        fresh, name, room = stage.extra("decode"), stage.name(), stage.room()
        prefill.open(name, room)
        offer(fresh, wire.bootstrap, room, name=name, pages=[8])
        deadline = time.monotonic() + 30
        while wire.refused < 2:
            assert time.monotonic() < deadline, "decode did not try the control port again"
            time.sleep(0.01)
        wire.plugged = True
        prefill.send(name, [1])
        fresh.until(name, "done")
        assert (fresh.pages[:, 8] == 9).all()
    finally:
        wire.close()


@hazard(17, "decode never learns that prefill has aborted")
def abort_not_told(stage: Stage) -> str:
    name, _ = stage.open_both()
    stage.prefill.until(name, "ready")
    begun = time.monotonic()
    stage.prefill.abort(name)
    assert stage.decode.until(name, "releasable")["cause"] == "peer_aborted"
    return f"decode knew and had its pages back after {(time.monotonic() - begun) * 1000:.0f} ms"


@hazard(18, "an abort that arrives before its request is lost")
def abort_first(stage: Stage) -> str:
    name, room = stage.name(), stage.room()
    offer(stage.decode, stage.prefill, room, name=name, pages=[8])
    stage.prefill.settle(lambda stats: stats["attempts"]["parked"]["reqs"] == 1)
    stage.decode.abort(name)
    stage.decode.until(name, "releasable")
    stage.prefill.open(name, room)
    assert stage.prefill.until(name, "ended")["cause"] == "peer_aborted"
    return "the request learned of the abort when it came"


@hazard(19, "metadata that arrives late brings an ended room back")
def late_metadata(stage: Stage) -> str:
    name, room = stage.name(), stage.room()
    stage.prefill.open(name, room)
    stage.prefill.abort(name)
    stage.prefill.until(name, "releasable")
    offer(stage.decode, stage.prefill, room, name=name, pages=[8])
    assert stage.decode.until(name, "releasable")["cause"] == "peer_aborted"
    assert stage.prefill.stats()["attempts"]["parked"]["reqs"] == 0
    stage.serve(room=room)
    return "the late half got the result; the room then served another request"


@hazard(20, "a hand-off waits for ever for its aux row, and one in room 0 always does")
def aux_gate(stage: Stage) -> str:
    name, room = stage.open_both(room=0, pages=[8])
    assert room == 0
    stage.prefill.send(name, [1], aux_slot=4)
    for side in (stage.prefill, stage.decode):
        side.until(name, "done")
    assert (stage.decode.aux[8] == stage.prefill.aux[4]).all(), "done before the aux row was there"
    stage.prefill.lose("Ended")
    name, _ = stage.open_both(pages=[9], deadline_s=4.0)
    stage.prefill.send(name, [1])
    begun = time.monotonic()
    status = stage.decode.until(name, "ended")
    stage.prefill.lose()
    stage.decode.until(name, "releasable")
    seconds = time.monotonic() - begun
    assert status["cause"] == "timed_out", status
    return f"room 0 ended with its aux row in place; without news a hand-off ended as timed_out after {seconds:.1f} s"


@hazard(21, "a state has no deadline")
def no_deadline(stage: Stage) -> str:
    prefill, decode, short = stage.prefill, stage.decode, 1.0
    ends = []
    unclaimed = stage.name()
    prefill.open(unclaimed, stage.room(), deadline_s=short)
    prefill.send(unclaimed, [1])
    ends.append(prefill.until(unclaimed, "releasable")["cause"])
    alone = stage.name()
    decode.open(alone, stage.room(), prefill=prefill.bootstrap, deadline_s=short)
    ends.append(decode.until(alone, "releasable")["cause"])
    silent, room = stage.name(), stage.room()
    prefill.open(silent, room, deadline_s=short)
    offer(decode, prefill, room, name=silent, pages=[8], deadline_s=short)
    ends += [side.until(silent, "releasable")["cause"] for side in (prefill, decode)]
    nowhere = stage.extra("decode", timeouts={**TIMEOUTS, "connect_s": 1.0})
    with closing(KeptPort()) as port:
        offer(nowhere, port.address, 1, name="nowhere")
        ends.append(nowhere.until("nowhere", "releasable")["cause"])
    assert set(ends) <= {"timed_out", "peer_lost"}, ends
    return f"unclaimed, unanswered, unsent and unreachable hand-offs ended as {ends}"


@hazard(22, "one dead peer delays the hand-offs of all others")
def head_of_line(stage: Stage) -> str:
    prefill = stage.prefill
    frozen = stage.extra("decode")
    names = {stage.name(): list(range(40)), stage.name(): [50]}
    for name, pages in names.items():
        room = stage.room()
        open_both(prefill, frozen, room, name=name, pages=pages)
        prefill.until(name, "ready")
    stage.serve()
    alone, lag_alone = _twenty(stage)
    frozen.signal(signal.SIGSTOP)
    for name, pages in names.items():
        prefill.send(name, pages)
    beside, lag = _twenty(stage)
    for name in names:
        assert prefill.status(name)["phase"] == "transferring", "no write to the frozen peer was under way"
    assert beside < 3 * alone + 1.0, f"20 hand-offs took {beside:.2f} s beside a frozen peer, {alone:.2f} s without"
    assert lag < 3 * lag_alone + FROZEN_S / 4, (
        f"a turn took {lag:.2f} s beside a frozen peer, {lag_alone:.2f} s without"
    )
    frozen.signal(signal.SIGCONT)
    for name in names:
        frozen.until(name, "done")
    return (
        f"20 hand-offs took {beside:.2f} s beside a frozen peer, {alone:.2f} s without; "
        f"loop lag {lag * 1000:.0f} ms, {lag_alone * 1000:.0f} ms without"
    )


def _twenty(stage: Stage) -> tuple[float, float]:
    """Seconds for so many hand-offs to a living peer, and prefill's longest turn, while it does so for `FROZEN_S`.

    Of all rounds the fastest counts: a frozen peer that delays others does so in each, other work on the machine in
    some.
    """
    ends = time.monotonic() + FROZEN_S
    fastest = math.inf
    while (begun := time.monotonic()) < ends:
        for turn in range(20):
            stage.serve(source=10 + turn, target=10 + turn)
        fastest = min(fastest, time.monotonic() - begun)
    return fastest, stage.prefill.stats()["loop_lag_s"]
