"""Two instances of several ranks, whose machines are connected by channels that lose nothing."""

from collections import defaultdict

from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.events import (
    Effect,
    Event,
    Linked,
    OfferPages,
    OpenAttempt,
    OpenRequest,
    PeerReady,
    Received,
    Send,
    SendPages,
    Write,
    WriteEnded,
    Writer,
    WriteResult,
)
from pdpool_connector.protocol.frames import VERSION_MAX
from pdpool_connector.protocol.prefill import PrefillMachine

from tests.unit.protocol.sides import TIMEOUTS, Side, ids

Pairing = list[list[tuple[int, bool]]]
"""For each decode rank: the prefill ranks that write to it, and whether each writes the aux row."""


class Instances:
    """Prefill ranks `prefill` and decode ranks `decode`; handle 1 is the same request on every rank."""

    def __init__(self, prefill: int, pairing: Pairing) -> None:
        self.prefill = [Side(PrefillMachine(f"{rank:032x}", TIMEOUTS)) for rank in range(prefill)]
        self.decode = [Side(DecodeMachine(f"{0xD0 + rank:032x}", TIMEOUTS)) for rank in range(len(pairing))]
        self.by_name = {side.machine.incarnation: side for side in [*self.prefill, *self.decode]}
        self.flights: list[tuple[Side, Write]] = []
        served = defaultdict(list)
        for rank, writers in enumerate(pairing):
            for writer, _ in writers:
                served[writer].append(rank)
        for rank, writers in enumerate(pairing):
            linked = []
            for writer, aux in writers:
                there = self.prefill[writer].machine.incarnation
                self.do(self.prefill[writer], PeerReady(self.decode[rank].machine.incarnation, VERSION_MAX))
                self.do(self.decode[rank], PeerReady(there, VERSION_MAX))
                linked.append(Writer(there, served[writer].index(rank), len(served[writer]), aux))
            self.do(self.decode[rank], Linked("p:1", tuple(linked)))

    def do(self, side: Side, event: Event) -> list[Effect]:
        """Drive one rank, and deliver the frames that it sends."""
        effects = side.do(event)
        for effect in effects:
            if isinstance(effect, Send):
                self.do(self.by_name[effect.peer], Received(effect.frame))
            elif isinstance(effect, Write):
                self.flights.append((side, effect))
        return effects

    def request(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.prefill)):
            self.do(self.prefill[rank], OpenRequest(1, 7, "r", 30.0))

    def open(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.decode)):
            self.do(self.decode[rank], OpenAttempt(1, "p:1", 7, "r", 30.0))

    def offer(self, *ranks: int, pages=(8, 9), prefix: int = 0) -> None:
        for rank in ranks or range(len(self.decode)):
            self.do(self.decode[rank], OfferPages(1, ids(*pages), prefix, 3))

    def send(self, *, pages=(4, 5), start: int = 0, aux_slot: int | None = 2) -> None:
        for side in self.prefill:
            self.do(side, SendPages(1, ids(*pages), start, True, aux_slot))

    def land(self, result: WriteResult = WriteResult.LANDED) -> None:
        """End every write that is under way."""
        flights, self.flights = self.flights, []
        for side, write in flights:
            self.do(side, WriteEnded(write.attempt, write.write, result, len(write.source), "simulated"))

    @property
    def statuses(self) -> list:
        return [side.status[1] for side in [*self.prefill, *self.decode]]

    def wait(self, seconds: float) -> None:
        """Let time pass on every rank, and deliver the frames that are sent meanwhile."""
        for side in [*self.prefill, *self.decode]:
            for effect in side.wait(seconds):
                if isinstance(effect, Send):
                    self.do(self.by_name[effect.peer], Received(effect.frame))
