"""A world in which both machines run: engines, network, data plane and time. It notices every broken promise at once.

Nothing here is random: the caller chooses among the actions that `progress` lists, and among the faults.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from pdpool_connector.protocol.events import (
    AbortTransfer,
    Connect,
    Drain,
    Event,
    Fenced,
    Linked,
    OfferPages,
    OpenAttempt,
    OpenRequest,
    PeerLost,
    PeerReady,
    Received,
    Report,
    Send,
    SendPages,
    Shutdown,
    StopWriting,
    Tick,
    Unlinked,
    Unreachable,
    Write,
    WriteEnded,
    Writer,
    WriteResult,
)
from pdpool_connector.protocol.frames import VERSION_MAX, AttemptFrame, Offer, decode, encode
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus
from pdpool_connector.protocol.timeouts import Timeouts

from tests.simulation.common import MACHINES, Machines, ViolationError, pack, require, unpack
from tests.simulation.parts import STATE_POOLS, Ask, Flight, Half, Letter, Process, Unit

TIMEOUTS = Timeouts(
    match_s=6.0,
    quiesce_s=3.0,
    retry_first_s=0.2,
    retry_max_s=1.0,
    query_s=1.0,
    result_s=30.0,
    acked_s=8.0,
    max_attempts=64,
    max_tombstones=32,
)
DEADLINE_S = 8.0
LATE_S = 0.01
PHASES = list(Phase)


class Action(NamedTuple):
    """Something that may happen. `what`: the method of `World` that does it, with `about` as arguments."""

    what: str
    about: tuple[object, ...]


class World:
    """`shape` maps each instance ("p0", "d1") to its number of ranks. `scale`: see `Process`."""

    def __init__(self, shape: dict[str, int], machines: Machines = MACHINES, scale: int = 1) -> None:
        self.shape, self.machines, self.scale = shape, machines, scale
        self.now = 0.0
        self.slots = [f"{instance}.{rank}" for instance, ranks in shape.items() for rank in range(ranks)]
        self.lives: Counter[str] = Counter()
        self.everyone: dict[str, Process] = {}
        self.processes: dict[str, Process] = {}
        self.asks: list[Ask] = []
        self.to_post: list[tuple[Ask, str]] = []
        self.letters: list[Letter] = []
        self.late: list[Letter] = []
        self.cuts: set[tuple[str, str]] = set()
        self.flights: list[Flight] = []
        self.greeted: set[tuple[Process, Process]] = set()
        self.linked: set[tuple[Process, Process]] = set()
        self.unsettled: list[tuple[Process, Process]] = []
        self.happened: Counter[str] = Counter()
        self.trace: list[str] = []
        self.lost_asks: set[int] = set()
        for slot in self.slots:
            self.boot(slot)

    # --- What can happen without a fault ---

    def progress(self) -> Iterator[Action]:
        """Everything that may happen next, but for faults and time."""
        return chain(self._engines(), self._pairing(), self._frames(), self._writes())

    def take(self, action: Action) -> None:
        """Take an action."""
        self.trace.append(f"{action.what} {' '.join(map(str, action.about))}")
        getattr(self, action.what)(*action.about)

    def _engines(self) -> Iterator[Action]:
        for post in self.postable():
            yield Action("post", post)
        for process in self.running():
            for half in process.halves.values():
                if process.side == "d":
                    if not half.offered and not half.status.ended and process.has(_wanted(half.ask)):
                        yield Action("offer", (process, half))
                elif not half.closed and not half.status.releasable:
                    left = half.ask.size["pages"] - half.sent
                    yield from (Action("send", (process, half, pages)) for pages in {left, min(left, 1)})

    def _pairing(self) -> Iterator[Action]:
        for process in self.running("d"):
            for prefill in self.wanted(process):
                ranks = self.ranks_of(prefill)
                for rank in ranks:
                    if (process, rank) not in self.greeted and not rank.frozen:
                        yield Action("greet", (process, rank))
                if all((process, rank) in self.greeted for rank in ranks):
                    yield Action("link", (process, prefill))
        for pair in self.unnoticed():
            yield Action("lose_peer", pair)

    def _frames(self) -> Iterator[Action]:
        for letter in self.letters:
            if not letter.target.frozen and (letter.source, letter.target.slot) not in self.cuts:
                yield Action("deliver", (letter,))

    def _writes(self) -> Iterator[Action]:
        for flight in self.flights:
            if flight.left:
                yield Action("land", (flight,))
        for flight in self.settleable():
            if not flight.left:
                yield Action("settle", (flight, WriteResult.LANDED))
            elif flight.stopped:
                yield Action("settle", (flight, WriteResult.STOPPED))

    # --- Processes ---

    def boot(self, slot: str) -> Process:
        """A new process comes up in a place."""
        incarnation = f"{self.slots.index(slot):016x}{self.lives[slot]:016x}"
        self.lives[slot] += 1
        kind = self.machines.prefill if slot[0] == "p" else self.machines.decode
        process = Process(slot, incarnation, kind(incarnation, TIMEOUTS), self.scale)
        self.processes[slot] = self.everyone[incarnation] = process
        return process

    def running(self, side: str = "pd") -> list[Process]:
        """Processes of a side, or of both, that are not frozen."""
        return [process for process in self.processes.values() if process.side in side and not process.frozen]

    def do(self, process: Process, event: Event) -> list[Half]:
        """Give an event to a machine and carry out its effects; returns the halves whose status changed."""
        changed: list[Half] = []
        if not process.alive:
            return changed
        try:
            effects = process.machine.handle(event, self.now)
        except Exception as error:
            raise ViolationError(f"the machine of {process.slot} raised {error!r} on {event}") from error
        for effect in effects:
            match effect:
                case Send(peer, AttemptFrame() as frame):
                    self._mail(process, self.everyone[peer], frame)
                case Report(handle, status):
                    changed.append(process.halves[handle])
                    self._report(process, process.halves[handle], status)
                case Write():
                    self._fly(process, effect)
                case StopWriting():
                    self._stop(process, effect)
                case Connect(prefill):
                    process.wants.add(prefill)
        self._check_machine(process)
        return changed

    def _check_machine(self, process: Process) -> None:
        most = TIMEOUTS.max_tombstones
        require(process.machine.tombstones <= most, f"{process.slot} remembers more than {most} ended attempts")
        for flight in self.flights:
            failed = flight.source is process and flight.half.status.phase is Phase.FAILED
            stopped = not failed or flight.stopped or flight.reported
            require(stopped, "a failed hand-off is written on", flight.half, flight)

    def crash(self, slot: str) -> None:
        """The process is gone, and another one comes up in its place; its writes under way may land all the same."""
        self.processes[slot].alive = False
        self.letters = [letter for letter in self.letters if letter.target.alive]
        self.boot(slot)

    def shut_down(self, slot: str) -> None:
        """The connector closes in good order, and the process ends."""
        process = self.processes[slot]
        self.do(process, Shutdown())
        open_ = [str(half) for half in process.halves.values() if not half.status.ended]
        require(not open_, f"{slot} has shut down over {open_}")
        self.crash(slot)

    def freeze(self, slot: str) -> None:
        """A process stops as by SIGSTOP, or goes on."""
        self.processes[slot].frozen = not self.processes[slot].frozen

    def drain(self, slot: str) -> None:
        """It takes no new work from now on."""
        process = self.processes[slot]
        self.do(process, Drain())
        if process.side == "p":
            require(not process.machine.queues.count("parked"), f"attempts wait at {slot}, which drains")

    def wait(self, seconds: float) -> None:
        """Time passes; every machine gets its tick when it is due."""
        end = self.now + seconds
        while True:
            due = [p.machine.next_deadline for p in self.running()]
            self.now = min([end, *(max(when, self.now) for when in due if when is not None)])
            before = self.now
            for process in self.running():
                when = process.machine.next_deadline
                if when is not None and when <= self.now:
                    self.do(process, Tick())
                    after = process.machine.next_deadline
                    require(after is None or after > before, f"a timer of {process.slot} is due at once again")
            for process in self.running():
                for half in process.halves.values():
                    late = not half.status.ended and self.now > half.opened + DEADLINE_S + LATE_S
                    require(not late, "a hand-off outlived its deadline", half)
            if self.now >= end:
                return

    # --- Engines ---

    def ask(self, ask: Ask) -> None:
        """The router sends a request to both sides; each rank gets it at a time of its own."""
        self.asks.append(ask)
        for instance in (ask.prefill, ask.decode):
            self.to_post += [(ask, f"{instance}.{rank}") for rank in range(self.shape[instance])]

    def postable(self) -> list[tuple[Ask, str]]:
        """Requests that their engines can open now: prefill's needs memory to compute it."""
        places = [(ask, slot, self.processes[slot]) for ask, slot in self.to_post]
        return [(ask, slot) for ask, slot, p in places if not p.frozen and (p.side == "d" or p.has(ask.size))]

    def post(self, ask: Ask, slot: str) -> Half:
        """The engine of a rank opens its half of a request."""
        self.to_post.remove((ask, slot))
        process = self.processes[slot]
        half = Half(ask, next(process.handles), self.now)
        process.halves[half.handle] = half
        rid, prompt = ask.request_id(process.side), ask.digest(process.side)
        if process.side == "p":
            process.take(half, ask.size)
            self.do(process, OpenRequest(half.handle, ask.room, rid, DEADLINE_S, prompt))
        else:
            self.do(process, OpenAttempt(half.handle, ask.prefill, ask.room, rid, DEADLINE_S, prompt))
        require(half.status.ended or not process.machine.draining, "a draining process took work", half)
        return half

    def offer(self, process: Process, half: Half) -> None:
        """The engine of decode has memory for a half."""
        process.take(half, _wanted(half.ask))
        half.offered = True
        self.do(process, _offer(half))

    def offer_late(self, process: Process, half: Half) -> None:
        """An offer crosses the end of its hand-off: it changes nothing, and the memory stays the engine's."""
        half.offered = True
        half.units = {pool: process.free(pool)[:1] for pool in ("pages", "aux", *STATE_POOLS)}
        require(not self.do(process, _offer(half)), f"an offer after its end changed {half}")

    def send(self, process: Process, half: Half, pages: int) -> None:
        """The engine of prefill has computed more pages; the last send carries aux row and state."""
        start, half.sent = half.sent, half.sent + pages
        half.closed = half.sent == half.ask.size["pages"]
        ids = pack(half.units["pages"][start : half.sent])
        aux = half.units["aux"][0] if half.closed else None
        state = tuple(pack(half.units[pool]) for pool in STATE_POOLS) if half.closed else ()
        self.do(process, SendPages(half.handle, ids, start, half.closed, aux, state))

    def abort(self, process: Process, half: Half, cause: Cause = Cause.ABORTED) -> None:
        """An engine gives a half up."""
        half.aborted |= not half.status.ended
        self.do(process, AbortTransfer(half.handle, "simulated", cause))
        require(half.status.ended, f"an abort did not end {half}")

    # --- Pairing ---

    def ranks_of(self, instance: str) -> list[Process]:
        """The processes of an instance that run now."""
        return [self.processes[f"{instance}.{rank}"] for rank in range(self.shape[instance])]

    def wanted(self, process: Process) -> list[str]:
        """Prefill instances that a decode wants to be linked to, and is not."""
        return [
            prefill
            for prefill in self.shape
            if prefill[0] == "p" and (prefill in process.wants or process.machine.holds_for(prefill))
            if not all((process, rank) in self.linked for rank in self.ranks_of(prefill))
        ]

    def greet(self, process: Process, rank: Process) -> None:
        """A prefill rank answers the hello of a decode; an earlier process in the same place is lost."""
        for old, there in list(self.greeted):
            if there is rank and old.slot == process.slot:
                self.lose_peer(rank, old)
        self.greeted.add((process, rank))
        changed = self.do(rank, PeerReady(process.incarnation, VERSION_MAX))
        require(not changed, f"a greeting of {process.slot} changed {changed}")

    def link(self, process: Process, prefill: str) -> None:
        """A decode is paired with every rank; earlier processes in their places are lost."""
        ranks = self.ranks_of(prefill)
        for here, old in list(self.linked):
            if here is process and old.instance == prefill and old not in ranks:
                self.lose_peer(process, old)
        process.wants.discard(prefill)
        self.linked.update((process, rank) for rank in ranks)
        for rank in ranks:
            self.do(process, PeerReady(rank.incarnation, VERSION_MAX))
        count, last = self.shape[process.instance], ranks[-1]
        writers = tuple(Writer(rank.incarnation, process.rank, count, rank is last) for rank in ranks)
        self.do(process, Linked(prefill, writers))

    def refuse(self, process: Process, prefill: str) -> None:
        """A prefill instance cannot be reached in time."""
        process.wants.discard(prefill)
        self.do(process, Unreachable(prefill, Cause.PEER_LOST, "simulated"))

    def connections(self) -> list[tuple[Process, Process]]:
        """Who holds whom for paired."""
        pairs = [*self.linked, *((prefill, decode) for decode, prefill in self.greeted)]
        return sorted((p for p in pairs if p[0].alive), key=lambda pair: (pair[0].incarnation, pair[1].incarnation))

    def unnoticed(self) -> list[tuple[Process, Process]]:
        """Whose peer has ended, without its notice."""
        return [(here, there) for here, there in self.connections() if not there.alive and not here.frozen]

    def lose_peer(self, here: Process, there: Process, *, unlink: bool = False) -> None:
        """One side has evidence that the other is gone; the other side may not have noticed anything."""
        if here.side == "d":
            self.linked.discard((here, there))
            if unlink:
                self.do(here, Unlinked(there.instance))
        else:
            self.greeted.discard((there, here))
            # Prefill has one connection to a peer: frames that were sent on it arrive no more.
            sent = [one for one in self.letters if one.target is here and one.frame.sender == there.incarnation]
            self.letters = [letter for letter in self.letters if letter not in sent]
            self.late = [one for one in self.late if one.target is not here or one.frame.sender != there.incarnation]
        self._befall(here, there, PeerLost(there.incarnation, "simulated"))

    def _befall(self, here: Process, there: Process, event: Event) -> None:
        """Something happened to a peer: hand-offs with other instances go on."""
        for half in self.do(here, event):
            mine = half.ask
            known = any(
                there.instance in (ask.prefill, ask.decode) and (ask.room, ask.prompt) == (mine.room, mine.prompt)
                for ask in self.asks
            )
            require(known, f"{event} changed a hand-off with others", half)

    def fence(self, dead: Process) -> None:
        """Proof that a dead process touches memory no more: its bytes have stopped, and then everybody gets it."""
        dead.fenced = True
        for flight in self.flights:
            if flight.target is dead:
                flight.left.clear()
        self.flights = [one for one in self.flights if one.source is not dead and (one.left or not one.reported)]
        for process in self.processes.values():
            self._befall(process, dead, Fenced(dead.incarnation, "simulated"))

    # --- Network ---

    def _mail(self, source: Process, target: Process, frame: AttemptFrame) -> None:
        if isinstance(frame, Offer):
            half = source.halves[frame.attempt.number]
            require(half.offered and not half.status.ended, "memory is sent out that nobody offered", half)
            half.exposed = True
        parsed = decode(encode(frame))
        assert isinstance(parsed, AttemptFrame)
        self.letters.append(Letter(source.slot, target, parsed))

    def deliver(self, letter: Letter, *, again: bool = False) -> None:
        """A frame arrives, and with `again` will arrive once more."""
        if not again:
            self.letters.remove(letter)
        for half in self.do(letter.target, Received(letter.frame)):
            require(half.ask.room == letter.frame.room, f"{letter} for room {letter.frame.room} changed {half}")

    def forge(self, letter: Letter, frame: AttemptFrame) -> None:
        """A process that has no part in an attempt, or mixes rooms up, sends a frame about it: nothing may change."""
        changed = [str(half) for half in self.do(letter.target, Received(frame))]
        require(not changed, f"{letter}, forged as from {frame.sender} for room {frame.room}, changed {changed}")

    # --- Writes ---

    def _fly(self, source: Process, write: Write) -> None:
        target = self.everyone[write.peer]
        require(not target.fenced, f"{source.slot} writes to {target.slot}, which was fenced")
        here = {"pages": unpack(write.source), "aux": [write.aux[0]] if write.aux else []}
        there = {"pages": unpack(write.target), "aux": [write.aux[1]] if write.aux else []}
        for pool, (mine, theirs) in zip(STATE_POOLS, write.state, strict=bool(write.state)):
            here[pool], there[pool] = unpack(mine), unpack(theirs)
        owners = {source.owner.get((pool, unit)) for pool, units in here.items() for unit in units}
        half = next(iter(owners), None)
        require(half is not None and len(owners) == 1, f"a write of {source.slot} reads memory that was given back")
        assert half is not None
        half.exposed = True
        units: list[Unit] = []
        for pool in here:
            require(len(here[pool]) == len(there[pool]), f"{here} is written to {there}")
            units += [(pool, a, b, half.units[pool].index(a)) for a, b in zip(here[pool], there[pool], strict=True)]
        self.flights.append(Flight(write, source, target, half, units))

    def _stop(self, source: Process, order: StopWriting) -> None:
        for flight in self.flights:
            of_it = flight.write.attempt == order.attempt and flight.write.peer == order.peer
            flight.stopped |= flight.source is source and of_it

    def settleable(self) -> list[Flight]:
        """Writes whose result their writer can get."""
        return [one for one in self.flights if not one.reported and one.source.alive and not one.source.frozen]

    def land(self, flight: Flight) -> None:
        """One more unit of a write is in place."""
        pool, here, there, index = flight.left.pop(0)
        flight.moved += 1
        self.happened["land_late"] += flight.reported or not flight.source.alive
        if flight.source.alive:
            owned = flight.source.owner.get((pool, here)) is flight.half
            require(owned, f"{pool} {here} was read after it was given back: {flight.half}")
        if flight.target.alive:
            owner = flight.target.owner.get((pool, there))
            mine = owner is not None and owner.handle == flight.write.attempt.number
            require(mine, f"stale write of {flight.half} into {pool} {there}, which belongs to {owner}")
            flight.target.content[pool, there, flight.source.rank] = (flight.half.ask.prompt, index)
        if not flight.left and (flight.reported or not flight.source.alive):
            self.flights.remove(flight)

    def settle(self, flight: Flight, result: WriteResult) -> None:
        """The writer learns how a write ended."""
        flight.reported = True
        self.happened[f"write_{result}"] += 1
        if result is WriteResult.UNSETTLED and flight.left:
            self.unsettled.append((flight.source, flight.target))
        else:
            self.flights.remove(flight)
        ended = WriteEnded(flight.write.attempt, flight.write.write, result, flight.moved, "simulated")
        changed = [half for half in self.do(flight.source, ended) if half is not flight.half]
        require(not changed, f"the end of {flight} changed more than its own: {changed}")

    # --- What engines learn ---

    def _report(self, process: Process, half: Half, status: TransferStatus) -> None:
        last = half.status
        half.statuses.append(status)
        if last.ended:
            require((status.phase, status.cause) == (last.phase, last.cause), "an ended hand-off changed", half)
            require(status.releasable >= last.releasable, "memory was releasable and is not any more", half)
        require(PHASES.index(status.phase) >= PHASES.index(last.phase), "a phase went back", half)
        if status.ended and not last.ended:
            half.over = self.now
            self.happened[f"{process.side} {status.cause or 'done'}"] += 1
            require(status.releasable or half.exposed, "memory is kept that no peer was given", half)
        if process.side == "d":
            require(half.offered or status.phase in (Phase.WAITING, Phase.FAILED), "nothing was offered", half)
            if status.phase is Phase.DONE:
                self._check_content(process, half)
        if status.releasable and not last.releasable:
            for flight in self.flights:
                mine = {(pool, unit) for pool, units in half.units.items() for unit in units}
                target = flight.target is process and any((pool, unit) in mine for pool, _, unit, _ in flight.left)
                source = flight.source is process and flight.half is half and bool(flight.left)
                require(not source and not target, "memory was given back while a write may touch it", half, flight)
            process.give_back(half)

    def _check_content(self, process: Process, half: Half) -> None:
        ranks = range(self.shape[half.ask.prefill])
        units = 0
        for pool, mine in half.units.items():
            for writer in ranks if pool != "aux" else ranks[-1:]:
                units += len(mine)
                found = [process.content.get((pool, unit, writer)) for unit in mine]
                start = half.ask.prefix if pool == "pages" else 0
                wanted = [(half.ask.prompt, index) for index in range(start, start + len(mine))]
                require(found == wanted, f"false success: {pool} hold {found} from rank {writer}", half)
        moved = half.status.bytes_moved
        require(moved == units, f"{moved} units are reported to have moved, not {units}", half)


def _wanted(ask: Ask) -> dict[str, int]:
    """Units that a half at decode needs: pages of the prefix are there already."""
    return {**ask.size, "pages": ask.size["pages"] - ask.prefix}


def _offer(half: Half) -> OfferPages:
    state = tuple(pack(half.units[pool]) for pool in STATE_POOLS)
    return OfferPages(half.handle, pack(half.units["pages"]), half.ask.prefix, half.units["aux"][0], state)
