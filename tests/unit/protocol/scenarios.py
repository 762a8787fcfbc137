"""One short scenario for each transition of either side, and random ones: names of steps, played on one machine."""

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Final

from msgspec.structs import replace
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import Drain, Fenced, PeerLost, PeerReady, Unlinked, WriteResult
from pdpool_connector.protocol.states import DecodeState, PrefillState, Trigger

from tests.unit.protocol.sides import (
    DECODE,
    PREFILL,
    TIMEOUTS,
    Decode,
    Prefill,
    Side,
    abort_frame,
    accepted,
    ack,
    ended,
    query,
    writes,
)

P, D, T = PrefillState, DecodeState, Trigger


def land(side: Prefill, result: WriteResult = WriteResult.LANDED) -> None:
    for write in writes(side.effects):
        side.landed(write, result)


PREFILL_STEPS: Final[Mapping[str, Callable[[Prefill], object]]] = {
    "request": Prefill.request,
    "open": Prefill.opened,
    "offer": Prefill.offered,
    "send": Prefill.send,
    "send_nothing": lambda side: side.send(pages=(), aux_slot=None),
    "offer_nothing": lambda side: side.offered(pages=()),
    "land": land,
    "fail": lambda side: land(side, WriteResult.FAILED),
    "unsettled": lambda side: land(side, WriteResult.UNSETTLED),
    "abort": Side.abort,
    "abort_by_decode": lambda side: side.receive(abort_frame()),
    "quiesce": lambda side: side.wait(TIMEOUTS.quiesce_s + 0.1),
    "fence": lambda side: side.do(Fenced(DECODE, "kubelet")),
    "lose": lambda side: side.do(PeerLost(DECODE, "connection ended")),
}
PREFILL_SCENARIOS: Final[Mapping[tuple[PrefillState | None, Trigger], str]] = {
    (None, T.REQUESTED): "request",
    (None, T.OPENED): "open",
    (P.WAITING, T.OPENED): "request open",
    (P.WAITING, T.ENDED): "request abort",
    (P.PARKED, T.REQUESTED): "open request",
    (P.PARKED, T.ENDED): "open offer lose",
    (P.MATCHED, T.OFFERED): "open offer request",
    (P.MATCHED, T.ENDED): "request open abort_by_decode",
    (P.READY, T.SUBMITTED): "request open offer send",
    (P.READY, T.COMPLETED): "request open offer_nothing send_nothing",
    (P.READY, T.ENDED): "request open offer lose",
    (P.SENDING, T.COMPLETED): "request open offer send land",
    (P.SENDING, T.ENDED): "request open offer send fail",
    (P.SENDING, T.BROKEN): "request open offer send abort",
    (P.QUIESCING, T.SETTLED): "request open offer send abort_by_decode land",
    (P.QUIESCING, T.UNPROVEN): "request open offer send unsettled",
    (P.HELD, T.SETTLED): "request open offer send abort quiesce land",
}

DECODE_STEPS: Final[Mapping[str, Callable[[Decode], object]]] = {
    "open": Decode.open,
    "link": Decode.link,
    "offer": Decode.offer,
    "accept": lambda side: side.receive(accepted(offered=True)),
    "done": lambda side: side.receive(ended(moved=8)),
    "failed": lambda side: side.receive(ended(1, "transfer_failed")),
    "failing": lambda side: side.receive(ended(1, "transfer_failed", settled=False)),
    "abort": Side.abort,
    "quiesce": lambda side: side.wait(TIMEOUTS.quiesce_s + 0.1),
    "fence": lambda side: side.do(Fenced(PREFILL, "kubelet")),
    "lose": lambda side: side.do(PeerLost(PREFILL, "connection ended")),
    "deadline": lambda side: side.wait(30.1),
}
DECODE_SCENARIOS: Final[Mapping[tuple[DecodeState | None, Trigger], str]] = {
    (None, T.REQUESTED): "open",
    (D.CONNECTING, T.LINKED): "open link",
    (D.CONNECTING, T.ENDED): "fence open link",
    (D.CONNECTING, T.BROKEN): "open abort link",
    (D.OPENED, T.OFFERED): "open offer link",
    (D.OPENED, T.ENDED): "link open failed",
    (D.OPENED, T.BROKEN): "link open deadline",
    (D.OFFERED, T.COMPLETED): "link open offer accept done",
    (D.OFFERED, T.ENDED): "link open offer failed",
    (D.OFFERED, T.BROKEN): "link open offer abort",
    (D.ABORTING, T.SETTLED): "link open offer failing failed",
    (D.ABORTING, T.UNPROVEN): "link open offer abort quiesce",
    (D.HELD, T.SETTLED): "link open offer lose link failed",
}


def play(side: Side, scenario: str) -> None:
    steps: Mapping = PREFILL_STEPS if isinstance(side, Prefill) else DECODE_STEPS
    for step in scenario.split():
        steps[step](side)


ROOMS = (1, 2)
PROMPTS = (b"", b"A", b"B")


class RandomPrefill:
    """Random events for one prefill: a few rooms, prompts and attempts, and everything that can go wrong."""

    def __init__(self, side: Prefill, seed: int) -> None:
        self.side, self.random = side, Random(seed)
        self.handles = self.numbers = 0
        self.rooms: dict[int, int] = {}
        self.open_writes: list = []

    def step(self) -> None:
        before = len(self.side.effects)
        steps = [
            self.request,
            self.open,
            self.offer,
            self.send,
            self.land,
            self.abort,
            self.frame,
            self.wait,
            self.peer,
        ]
        self.random.choices(steps, [1, 2, 2, 2, 3, 1, 2, 2, 1])[0]()
        self.open_writes += writes(self.side.effects[before:])

    def request(self) -> None:
        self.handles += 1
        room, prompt = self.random.choice(ROOMS), self.random.choice(PROMPTS)
        self.side.request(self.handles, room=room, rid=f"r{self.random.randrange(3)}", prompt=prompt)

    def open(self) -> None:
        if self.numbers and self.random.random() < 0.2:
            number = self.random.randint(1, self.numbers)
        else:
            number = self.numbers = self.numbers + 1
            self.rooms[number] = self.random.choice(ROOMS)
        fields = {"rid": f"r{self.random.randrange(3)}", "prompt": self.random.choice(PROMPTS)}
        self.side.opened(number, room=self.rooms[number], **fields)

    def offer(self) -> None:
        if number := self.known():
            self.side.offered(number, room=self.rooms[number])

    def known(self) -> int:
        return self.random.choice(list(self.rooms)[-4:]) if self.rooms else 0

    def send(self) -> None:
        if self.handles:
            last = self.random.random() < 0.7
            self.side.send(self.random.randint(max(1, self.handles - 3), self.handles), (4, 5)[: 1 + last], last=last)

    def land(self) -> None:
        if self.open_writes:
            write = self.open_writes.pop(self.random.randrange(len(self.open_writes)))
            results = [WriteResult.LANDED] * 6 + [WriteResult.FAILED, WriteResult.STOPPED, WriteResult.UNSETTLED]
            self.side.landed(write, self.random.choice(results))

    def abort(self) -> None:
        if self.handles:
            self.side.abort(self.random.randint(1, self.handles))

    def frame(self) -> None:
        if number := self.known():
            make = self.random.choice([abort_frame, ack, query])
            self.side.receive(replace(make(number), room=self.rooms[number]))

    def wait(self) -> None:
        self.side.wait(self.random.choice([0.1, 1.0, 6.0, 20.0]))

    def peer(self) -> None:
        kind = self.random.random()
        if kind < 0.1:
            self.side.do(Drain())
        elif kind < 0.5:
            self.side.do(PeerLost(DECODE, "connection ended"))
        else:
            self.side.do(PeerReady(DECODE, f.VERSION_MAX))


class RandomDecode:
    """The same for one decode."""

    def __init__(self, side: Decode, seed: int) -> None:
        self.side, self.random = side, Random(seed)
        self.handles = 0

    def step(self) -> None:
        steps = [self.open, self.offer, self.frame, self.abort, self.wait, self.peer, self.side.link]
        self.random.choices(steps, [2, 3, 4, 1, 2, 1, 1])[0]()

    def open(self) -> None:
        self.handles += 1
        self.side.open(self.handles)

    def some(self) -> int:
        return self.random.randint(max(1, self.handles - 3), max(1, self.handles))

    def offer(self) -> None:
        self.side.offer(self.some())

    def frame(self) -> None:
        number = self.some()
        frames: Iterable[f.AttemptFrame] = [
            accepted(number),
            accepted(number, offered=True),
            ended(number, moved=8),
            ended(number, "peer_aborted"),
            ended(number, "timed_out", settled=False),
        ]
        self.side.receive(self.random.choice(list(frames)))

    def abort(self) -> None:
        self.side.abort(self.some())

    def wait(self) -> None:
        self.side.wait(self.random.choice([0.1, 1.0, 6.0, 31.0]))

    def peer(self) -> None:
        kind = self.random.random()
        if kind < 0.1:
            self.side.do(Drain())
        elif kind < 0.5:
            self.side.do(Unlinked("p:1"))
        else:
            self.side.do(PeerLost(PREFILL, "connection ended"))
