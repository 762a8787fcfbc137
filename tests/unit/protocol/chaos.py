"""READ between instances by a seed: a network that loses, doubles and reorders, and reads that end late or badly."""

import random
from collections import defaultdict

from pdpool_connector.protocol.decode_read import DecodeReadMachine
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Event,
    Fenced,
    Linked,
    OpenAttempt,
    OpenRequest,
    PeerLost,
    PeerReady,
    Read,
    ReadEnded,
    Received,
    Report,
    Send,
    SendPages,
    StopReading,
    Tick,
    Writer,
    WriteResult,
)
from pdpool_connector.protocol.frames import VERSION_MAX, Frame
from pdpool_connector.protocol.prefill_read import PrefillReadMachine
from pdpool_connector.protocol.status import Phase

from tests.unit.protocol.instances import Pairing
from tests.unit.protocol.sides import TIMING, Side, ids

LIFE_S = 20.0


class Chaos:
    """One request between the ranks of two instances. Every promise is checked at every step."""

    def __init__(self, seed: int, prefill: int, pairing: Pairing) -> None:
        self.random = random.Random(seed)
        self.now, self.faulty = 0.0, True
        self.prefill = [Side(PrefillReadMachine(f"{rank:032x}", TIMING)) for rank in range(prefill)]
        self.decode = [Side(DecodeReadMachine(f"{0xD0 + rank:032x}", TIMING)) for rank in range(len(pairing))]
        self.by_name = {side.machine.incarnation: side for side in [*self.prefill, *self.decode]}
        self.network: list[tuple[str, Frame]] = []
        self.flights: list[tuple[Side, Read]] = []
        self.unsettled: list[tuple[Side, Read]] = []
        self.stopped: set[tuple[object, str]] = set()
        self.landed: dict[str, int] = defaultdict(int)
        self.sent = [0] * prefill
        self.posted: set[int] = set()
        served = defaultdict(list)
        for rank, writers in enumerate(pairing):
            for writer, _ in writers:
                served[writer].append(rank)
        self.writers = [
            tuple(Writer(f"{w:032x}", served[w].index(rank), len(served[w]), aux) for w, aux in writers)
            for rank, writers in enumerate(pairing)
        ]
        self.links = [(rank, writer.incarnation) for rank, of in enumerate(self.writers) for writer in of]
        self.up: set[tuple[int, str]] = set()
        for link in self.links:
            self.connect(link)

    def do(self, side: Side, event: Event) -> None:
        side.now = self.now
        for effect in side.do(event):
            match effect:
                case Send(peer, frame):
                    self.network.append((peer, frame))
                case Read():
                    self.flights.append((side, effect))
                case StopReading(attempt, peer):
                    self.stopped.add((attempt, peer))
                case Report(_, status) if status.releasable:
                    for reader, read in [*self.flights, *self.unsettled]:
                        assert reader is not side, "decode's pages were given back while they are read into"
                        assert self.by_name[read.peer] is not side, "prefill's pages were given back too early"
        if self.rank_of(side) is not None and 1 in side.status and side.status[1].phase is Phase.DONE:
            wanted = 2 * len(self.writers[self.rank_of(side)])
            assert self.landed[side.machine.incarnation] == wanted, "done before all was read"

    def rank_of(self, side: Side) -> int | None:
        """The decode rank that `side` is."""
        return next((rank for rank, decode in enumerate(self.decode) if decode is side), None)

    def connect(self, link: tuple[int, str]) -> None:
        rank, prefill = link
        decode = self.decode[rank]
        self.do(self.by_name[prefill], PeerReady(decode.machine.incarnation, VERSION_MAX))
        self.do(decode, PeerReady(prefill, VERSION_MAX))
        self.up.add(link)
        if all((rank, writer.incarnation) in self.up for writer in self.writers[rank]):
            self.do(decode, Linked("p:1", self.writers[rank]))

    def step_connection(self) -> None:
        link = self.random.choice(self.links)
        if link not in self.up:
            self.connect(link)
        elif self.faulty and self.random.random() < 0.3:
            self.up.discard(link)
            ends = [(self.decode[link[0]], link[1]), (self.by_name[link[1]], self.decode[link[0]].machine.incarnation)]
            self.random.shuffle(ends)
            for side, other in ends:
                self.do(side, PeerLost(other, "cut"))

    def step_network(self) -> None:
        if not self.network:
            return
        at = self.random.randrange(len(self.network)) if self.faulty else 0
        peer, frame = self.network[at]
        fate = self.random.random() if self.faulty else 1.0
        if fate > 0.15:
            self.network.pop(at)
        if fate > 0.08:
            self.do(self.by_name[peer], Received(frame))
        elif fate < 0.04:
            self.network.pop(at)

    def step_flight(self) -> None:
        if not self.flights:
            return
        side, read = self.flights.pop(self.random.randrange(len(self.flights)))
        results = [WriteResult.LANDED]
        if (read.attempt, read.peer) in self.stopped:
            results.append(WriteResult.STOPPED)
        if self.faulty and self.random.random() < 0.2:
            results = [WriteResult.FAILED, WriteResult.UNSETTLED]
        result = self.random.choice(results)
        if result is WriteResult.UNSETTLED:
            self.unsettled.append((side, read))
        if result is WriteResult.LANDED:
            self.landed[side.machine.incarnation] += len(read.source) // 4
        self.do(side, ReadEnded(read.attempt, read.read, result, len(read.source), "simulated"))

    def step_engine(self) -> None:
        index = self.random.randrange(len(self.prefill) + len(self.decode))
        side = [*self.prefill, *self.decode][index]
        if index not in self.posted:
            self.posted.add(index)
            if index < len(self.prefill):
                self.do(side, OpenRequest(1, 7, 0, "r", LIFE_S))
            else:
                self.do(side, OpenAttempt(1, "p:1", 7, 0, "r", ids(8, 9), 0, 3, LIFE_S))
        elif index < len(self.prefill) and self.sent[index] < 2:
            at = self.sent[index]
            self.sent[index] += 1
            self.do(side, SendPages(1, ids(4 + at), at, at == 1, 2 if at == 1 else None))
        elif self.faulty and self.random.random() < 0.02:
            self.do(side, AbortTransfer(1, "simulated"))

    def step_time(self) -> None:
        self.now += self.random.uniform(0.01, 0.3)
        for side in self.by_name.values():
            due = side.machine.next_deadline
            if due is not None and due <= self.now:
                self.do(side, Tick())

    def run(self) -> bool:
        """Play; True when the request was handed over on every rank."""
        steps = [self.step_network, self.step_flight, self.step_engine, self.step_time, self.step_connection]
        self.faulty = self.random.random() < 0.9
        weights = [8, self.random.choice([0.3, 2, 6]), 3, 1, 0.3 * self.random.random()]
        while self.now < 25 or len(self.posted) < len(self.by_name):
            self.random.choices(steps, weights)[0]()
        self.faulty = False
        while self.now < 25 + LIFE_S + 2 * TIMING.drain_s or self.network or self.flights:
            self.random.choices(steps, [8, 6, 3, 1, 1])[0]()
        while self.unsettled:
            side, read = self.unsettled[0]
            self.unsettled = [one for one in self.unsettled if one[0] is not side or one[1].peer != read.peer]
            self.do(side, Fenced(read.peer, "simulated"))
            self.do(self.by_name[read.peer], Fenced(side.machine.incarnation, "simulated"))
        end = self.now + 3 * TIMING.verdict_s
        while self.now < end or self.network:
            self.random.choices(steps, [8, 6, 0, 3, 1])[0]()
        for side in self.by_name.values():
            assert side.status[1].ended
            assert side.status[1].releasable, f"pages were never given back: {side.status[1]}"
            assert side.machine.rows == 0, f"{side.machine.rows} rows are left"
        return all(side.status[1].phase is Phase.DONE for side in self.by_name.values())
