"""A world in which both machines run, one named step at a time; what each step breaks is noticed at once.

Nothing here is random: a step that does not apply where the world stands says so and changes nothing. A schedule is
therefore replayed by playing its steps again, and shortened by leaving some out.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, cast

import msgspec
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Connect,
    Drain,
    Event,
    Fenced,
    Linked,
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
    Unreachable,
    Write,
    WriteEnded,
    Writer,
    WriteResult,
)
from pdpool_connector.protocol.frames import VERSION_MAX, AttemptFrame, AttemptId
from pdpool_connector.protocol.outcome import Cause, Phase, TransferStatus
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.states import TransitionError
from pdpool_connector.protocol.timing import Timing

from tests.simulation.memory import Half, ViolationError, pack, unpack
from tests.simulation.network import Letter, Network
from tests.simulation.planes import Flight, units_of
from tests.simulation.processes import Process

TIMING = Timing(
    meet_s=6.0,
    drain_s=3.0,
    retry_first_s=0.2,
    retry_max_s=1.0,
    query_s=1.0,
    verdict_s=30.0,
    acked_s=8.0,
    max_attempts=64,
    max_tombstones=14,
)
DEADLINE_S = 8.0
LATE_S = 1.0
"""By so much a hand-off may be over its deadline: the world's clock goes in steps."""


class Step(NamedTuple):
    """One thing that happens. `kind` names the method of `World` that does it."""

    kind: str
    args: tuple[object, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.kind, *(f"{arg:.3f}" if isinstance(arg, float) else str(arg) for arg in self.args)])


class Ask(NamedTuple):
    """One request as the router sends it to both sides."""

    tag: int
    prefill: str
    decode: str
    room: int
    sibling: int
    pages: int
    prefix: int
    state: int
    request: str


Machines = tuple[type[PrefillMachine], type[DecodeMachine]]


class World:
    """`shape` maps each instance ("p0", "d1") to its number of ranks. See the module's docstring."""

    def __init__(self, shape: dict[str, int], machines: Machines = (PrefillMachine, DecodeMachine)) -> None:
        self.shape = shape
        self.machines = machines
        self.now = 0.0
        self.processes: dict[str, Process] = {}
        self.lives: Counter[str] = Counter()
        self.everyone: dict[str, Process] = {}
        self.network = Network()
        self.flights: list[Flight] = []
        self.unsettled: list[tuple[Process, Process]] = []
        self.greeted: set[tuple[str, str]] = set()
        """Pairs of decode and prefill in which prefill holds the other for paired."""
        self.answered: set[tuple[str, str]] = set()
        """Those of them in which prefill has answered decode's latest hello."""
        self.linked: set[tuple[str, str]] = set()
        """Pairs in which decode holds the other for paired."""
        self.asks: dict[int, Ask] = {}
        self.to_post: dict[tuple[int, str], Ask] = {}
        self.lost_asks: set[str] = set()
        self.tags: dict[AttemptId, int] = {}
        self.done = 0
        self.told: list[Half] = []
        self.happened: Counter[str] = Counter()
        for instance, ranks in shape.items():
            for rank in range(ranks):
                self.boot(f"{instance}.{rank}")

    def apply(self, step: Step) -> bool:
        """Take a step; False when it does not apply. Raises ViolationError when it breaks a promise."""
        method: Callable[..., bool] = getattr(self, step.kind)
        applied = method(*step.args)
        if applied:
            self.happened[step.kind] += 1
        return applied

    # --- Processes ---

    def boot(self, slot: str) -> Process:
        life = self.lives[slot]
        self.lives[slot] += 1
        place = sorted(f"{i}.{r}" for i, n in self.shape.items() for r in range(n)).index(slot)
        incarnation = f"{place:016x}{life:016x}"
        kind = self.machines[0 if slot[0] == "p" else 1]
        process = Process(slot, incarnation, kind(incarnation, TIMING))
        self.processes[slot] = self.everyone[incarnation] = process
        return process

    def runs(self, slot: str) -> bool:
        return not self.processes[slot].frozen

    def do(self, process: Process, event: Event) -> list[Half]:
        """Have the machine take an event in, and do what it says; returns the halves that heard of it."""
        self.told = []
        if not process.alive:
            return []
        try:
            effects = process.machine.handle(event, self.now)
        except (TransitionError, LookupError) as error:  # others are faults of a test's own and surface as such
            raise ViolationError(f"the machine of {process.slot} raised {error!r} on {event}") from error
        for effect in effects:
            match effect:
                case Send(peer, AttemptFrame() as frame):
                    target = self.everyone[peer]
                    name = f"{process.slot}>{target.slot} {type(frame).__name__} r{self.tags.get(frame.attempt)}"
                    self.network.post(Letter(name, process.slot, peer, frame))
                case Report(handle, status):
                    self.report(process, process.halves[handle], status)
                case Write():
                    self.fly(process, effect)
                case StopWriting(attempt):
                    for flight in self.flights:
                        if flight.writer is process and flight.write.attempt == attempt:
                            flight.stopped = True
                case Connect(prefill):
                    process.wants.add(prefill)
        most = TIMING.max_tombstones
        check(process.machine.tombstones <= most, f"{process.slot} remembers more than {most} ended attempts")
        self.check_stopped(process)
        return self.told

    def check_stopped(self, process: Process) -> None:
        """What has failed writes no further."""
        for flight in self.flights:
            if flight.writer is process and flight.source.ended and not (flight.stopped or flight.reported):
                raise ViolationError(f"writing was not stopped although it is over: {flight.source}")

    def report(self, process: Process, half: Half, status: TransferStatus) -> None:
        last = half.last
        if last is not None and last.ended:
            check(
                status.phase is last.phase and status.cause is last.cause, f"an ended hand-off changed its end: {half}"
            )
            check(status.releasable or not last.releasable, f"pages were releasable and are not any more: {half}")
        self.told.append(half)
        half.statuses.append(status)
        half.ended, half.releasable = status.ended, status.releasable
        if status.ended and not (last is not None and last.ended):
            half.over = self.now
            self.happened[f"{process.role} {status.cause or 'done'}"] += 1
        if status.phase is Phase.DONE and process.role == "decode":
            self.done += 1
            self.check_content(process, half)
        if status.releasable:
            for pool in process.pools:
                pool.give_back(half)

    def check_content(self, process: Process, half: Half) -> None:
        writers = self.serving(process, self.asks[half.tag].prefill)
        for rank in writers:
            for index, page in enumerate(half.pages, half.prefix):
                found = process.pages.content.get((page, rank.rank))
                check(found == (half.request, index), f"false success: page {index} holds {found}: {half}")
            for index, item in enumerate(half.state):
                found = process.state.content.get((item, rank.rank))
                check(found == (half.request, index), f"false success: state item {index} holds {found}: {half}")
        for row in half.aux:
            found = process.aux.content.get((row, writers[-1].rank))
            check(found == (half.request, 0), f"false success: the aux row holds {found}: {half}")
        assert half.last is not None
        moved = len(writers) * (len(half.pages) + len(half.state)) + len(half.aux)
        check(half.last.bytes_moved == moved, f"{half.last.bytes_moved} moved, should be {moved}: {half}")

    def crash(self, slot: str) -> bool:
        """The process is gone, and another one comes up in its place; what it had in flight may land all the same."""
        if not self.runs(slot):
            return False
        self.processes[slot].alive = False
        self.boot(slot)
        return True

    def shut_down(self, slot: str) -> bool:
        """The connector closes in good order: it tells its peers attempt by attempt, and is gone."""
        if not self.runs(slot):
            return False
        process = self.processes[slot]
        self.do(process, Shutdown())
        check(all(half.ended for half in process.halves.values()), f"{slot} has shut down over a living hand-off")
        return self.crash(slot)

    def drain(self, slot: str) -> bool:
        """It takes nothing new from now on."""
        if not self.runs(slot) or self.processes[slot].machine.draining:
            return False
        self.do(self.processes[slot], Drain())
        return True

    def freeze(self, slot: str) -> bool:
        """SIGSTOP: its clock, its sockets and its engine stand still; what left it already goes on."""
        if not self.runs(slot):
            return False
        self.processes[slot].frozen = True
        return True

    def thaw(self, slot: str) -> bool:
        """SIGCONT."""
        if self.runs(slot):
            return False
        self.processes[slot].frozen = False
        return True

    # --- Data planes ---

    def fly(self, writer: Process, write: Write) -> None:
        tag = self.tags.get(write.attempt, -1)
        owner = None
        if write.source:
            owner = writer.pages.owner[unpack(write.source)[0]]
        elif write.aux is not None:
            owner = writer.aux.owner[write.aux[0]]
        elif write.state[0]:
            owner = writer.state.owner[unpack(write.state[0])[0]]
        check(owner is not None, f"a write for r{tag} reads memory that was given back")
        assert owner is not None
        writer.writes[tag] += 1
        target = self.everyone[write.peer]
        name = f"{writer.slot}>{target.slot} r{tag} write {writer.writes[tag]}"
        self.flights.append(Flight(name, writer, target, owner, write, units_of(write, owner)))

    def flight(self, name: str) -> Flight | None:
        return next((flight for flight in self.flights if flight.name == name), None)

    def land(self, name: str) -> bool:
        """One more unit of a write is in place; bytes of the dead, the frozen and the unsettled land, too."""
        flight = self.flight(name)
        if flight is None or not flight.left:
            return False
        flight.land()
        if not flight.left and (flight.reported or not flight.writer.alive):
            self.flights.remove(flight)
        return True

    def settle(self, name: str, result: WriteResult) -> bool:
        """The writer's engine learns how a write ended."""
        flight = self.flight(name)
        if flight is None or flight.reported or flight.writer.frozen or not flight.writer.alive:
            return False
        if flight.left if result is WriteResult.LANDED else not flight.left:
            return False
        if result is WriteResult.STOPPED and not flight.stopped:
            return False
        flight.reported = True
        if result is WriteResult.UNSETTLED:
            self.unsettled.append((flight.writer, flight.target))
        else:
            self.flights.remove(flight)
        write = flight.write
        told = self.do(flight.writer, WriteEnded(write.attempt, write.write, result, flight.moved, "simulated"))
        check(all(half is flight.source for half in told), f"the end of {name} changed more than its own: {told}")
        return True

    # --- The network ---

    def deliver(self, name: str) -> bool:
        """A frame arrives."""
        letter = self.network.find(name)
        if letter is None or self.everyone[letter.target].frozen:
            return False
        self.network.letters.remove(letter)
        self.receive(letter)
        return True

    def receive(self, letter: Letter) -> None:
        key = (letter.frame.room, letter.frame.sibling)
        for half in self.do(self.everyone[letter.target], Received(letter.frame)):
            check((half.room, half.sibling) == key, f"{letter.name} for room {key} changed {half}")

    def double(self, name: str) -> bool:
        """A frame arrives, and will arrive once more."""
        letter = self.network.find(name)
        if letter is None or self.everyone[letter.target].frozen:
            return False
        self.receive(letter)
        return True

    def lose(self, name: str) -> bool:
        """A frame never arrives."""
        letter = self.network.find(name)
        if letter is None:
            return False
        self.network.letters.remove(letter)
        return True

    def linger(self, name: str) -> bool:
        """A double of a frame stays behind somewhere, and arrives when everybody has forgotten what it was about."""
        letter = self.network.find(name)
        if letter is None:
            return False
        self.network.late.append(letter)
        return True

    def arrive_late(self) -> bool:
        """What has lingered is on its way again."""
        late, self.network.late = self.network.late, []
        self.network.letters += late
        return bool(late)

    def forge(self, name: str, sender: str, room: int) -> bool:
        """A process that has no part in it, or mixes rooms up, says what another may say."""
        letter, process = self.network.find(name), self.processes[sender]
        if letter is None or (sender, room) == (letter.source, letter.frame.room):
            return False
        if sender != letter.source and process.instance == letter.source.split(".")[0]:
            return False  # fellow ranks of a writer are writers, too
        frame = msgspec.structs.replace(letter.frame, sender=process.incarnation, room=room)
        told = self.do(self.everyone[letter.target], Received(frame))
        check(not told, f"a forged {name} from {sender} for room {room} changed {told}")
        return True

    def cut(self, source: str, target: str) -> bool:
        """Nothing gets through in this direction."""
        link = (source, self.processes[target].incarnation)
        if link in self.network.cuts:
            return False
        self.network.cuts.add(link)
        return True

    def mend(self, source: str, target: str) -> bool:
        """What was held up gets through now, late."""
        link = (source, self.processes[target].incarnation)
        if link not in self.network.cuts:
            return False
        self.network.cuts.remove(link)
        return True

    # --- Pairing ---

    def wanted(self) -> list[tuple[str, str]]:
        """Decodes that want to reach a prefill instance, or are owed a word by it."""
        return [
            (process.slot, prefill)
            for process in self.processes.values()
            if process.role == "decode" and not process.frozen
            for prefill in self.shape
            if prefill[0] == "p" and (prefill in process.wants or self.owed(process, prefill))
        ]

    def owed(self, process: Process, prefill: str) -> bool:
        machine = cast("DecodeMachine", process.machine)
        return machine.holds_for(prefill) and not self.is_linked(process, prefill)

    def served(self, prefill: str, rank: int, decode: str) -> list[int]:
        """Ranks of instance `decode` that rank `rank` of `prefill` serves: those whose share of the model meets its."""
        mine, theirs = self.shape[prefill], self.shape[decode]
        return [
            other
            for other in range(theirs)
            if rank * theirs < (other + 1) * mine and other * mine < (rank + 1) * theirs
        ]

    def serving(self, process: Process, prefill: str) -> list[Process]:
        """The ranks of `prefill` that write into this decode rank; the last of them writes the aux row."""
        ranks = [
            rank for rank in range(self.shape[prefill]) if process.rank in self.served(prefill, rank, process.instance)
        ]
        return [self.processes[f"{prefill}.{rank}"] for rank in ranks]

    def roles(self, process: Process, prefill: str) -> tuple[Writer, ...]:
        """The same, as decode is told of it."""
        ranks = self.serving(process, prefill)
        parts = [self.served(prefill, rank.rank, process.instance) for rank in ranks]
        return tuple(
            Writer(rank.incarnation, part.index(process.rank), len(part), writes_aux=rank is ranks[-1])
            for rank, part in zip(ranks, parts, strict=True)
        )

    def is_linked(self, process: Process, prefill: str) -> bool:
        ranks = self.serving(process, prefill)
        return all((process.incarnation, rank.incarnation) in self.linked for rank in ranks)

    def greet(self, slot: str, prefill: str) -> bool:
        """Decode says hello to a rank that has not answered yet; another process at its address replaces it."""
        process = self.processes[slot]
        if (slot, prefill) not in self.wanted():
            return False
        for rank in self.serving(process, prefill):
            link = (process.incarnation, rank.incarnation)
            if link not in self.answered and not rank.frozen:
                for old in [d for d, p in self.greeted if p == rank.incarnation and self.everyone[d].slot == slot]:
                    self.lost(rank.slot, old)
                self.greeted.add(link)
                self.answered.add(link)
                self.do(rank, PeerReady(process.incarnation, VERSION_MAX))
                return True
        return False

    def link(self, slot: str, prefill: str) -> bool:
        """Decode has heard from every rank that it is paired; what was there before at that address is lost."""
        process = self.processes[slot]
        ranks = self.serving(process, prefill)
        links = [(process.incarnation, rank.incarnation) for rank in ranks]
        if (slot, prefill) not in self.wanted() or not self.answered.issuperset(links):
            return False
        here = {rank.incarnation for rank in ranks}
        for old in [p for d, p in self.linked if d == process.incarnation and self.everyone[p].instance == prefill]:
            if old not in here:
                self.lost(slot, old)
        process.wants.discard(prefill)
        self.linked.update(links)
        for rank in ranks:
            self.do(process, PeerReady(rank.incarnation, VERSION_MAX))
        self.do(process, Linked(prefill, self.roles(process, prefill)))
        return True

    def refuse(self, slot: str, prefill: str) -> bool:
        """The address cannot be paired with in time."""
        process = self.processes[slot]
        if prefill not in process.wants or self.is_linked(process, prefill) or process.frozen:
            return False
        process.wants.discard(prefill)
        self.do(process, Unreachable(prefill, Cause.PEER_LOST, "simulated"))
        return True

    def lost(self, slot: str, peer: str) -> bool:
        """One side has evidence that the other is gone; the other side may not have noticed anything."""
        process = self.processes[slot]
        link = (process.incarnation, peer) if process.role == "decode" else (peer, process.incarnation)
        links = self.linked if process.role == "decode" else self.greeted
        if link not in links or process.frozen:
            return False
        links.discard(link)
        self.answered.discard(link)
        if process.role == "prefill":
            self.network.end_connection(peer, process.incarnation)
        self.hit(process, peer, PeerLost(peer, "simulated"))
        return True

    def hit(self, process: Process, peer: str, event: Event) -> None:
        """Something befalls a peer; hand-offs with others go on."""
        instance = self.everyone[peer].instance
        for half in self.do(process, event):
            # Halves of one room meet in the order in which they come, so a request may have met another's attempt.
            room = (self.asks[half.tag].prefill, half.room, half.sibling)
            with_it = [a for a in self.asks.values() if instance in (a.prefill, a.decode)]
            known = any((a.prefill, a.room, a.sibling) == room for a in with_it)
            check(known, f"{event} changed a hand-off with others: {half}")

    def unnoticed(self) -> list[tuple[str, str]]:
        """Who has not noticed yet that a peer is dead."""
        pairs = [(self.everyone[d], self.everyone[p]) for d, p in sorted(self.linked)]
        pairs += [(self.everyone[p], self.everyone[d]) for d, p in sorted(self.greeted)]
        return [(a.slot, b.incarnation) for a, b in pairs if a.alive and not b.alive and not a.frozen]

    def fence(self, incarnation: str) -> bool:
        """Proof that a dead process touches memory no more: its bytes have stopped, and then everybody is told.

        What others write to it ends at once, and their engines learn it later. It is told again for as long as pages
        are held for it: whoever had not noticed the death by then may have offered pages to it since.
        """
        dead = self.everyone[incarnation]
        if dead.alive or any(process.frozen for process in self.processes.values()):
            return False
        dead.fenced = True
        self.flights = [flight for flight in self.flights if dead is not flight.writer]
        for flight in self.flights:
            if flight.target is dead:
                flight.left.clear()
        self.flights = [flight for flight in self.flights if flight.left or not flight.reported]
        for process in self.processes.values():
            self.hit(process, incarnation, Fenced(incarnation, "simulated"))
        return True

    def vouch(self) -> None:
        """Unsettled writes between the living: somebody proves to both sides that they are over."""
        for writer, target in self.unsettled:
            self.flights = [f for f in self.flights if not (f.reported and f.writer is writer and f.target is target)]
            self.hit(writer, target.incarnation, Fenced(target.incarnation, "simulated"))
            self.hit(target, writer.incarnation, Fenced(writer.incarnation, "simulated"))
        self.unsettled.clear()

    # --- Engines ---

    def ask(self, *fields: object) -> bool:
        """A request is sent to both sides, in a room that nobody uses; each side gets it at a time of its own."""
        ask = Ask(*fields)  # type: ignore[arg-type] # a schedule holds plain fields
        if not self.room_is_free(ask):
            return False
        return self.enqueue(ask)

    def ask_again(self, tag: int, new: int) -> bool:
        """Decode has given a request up to make room (a retraction), and both sides get it once more, at any time."""
        ask = self.asks.get(tag)
        if ask is None or new in self.asks or any(posted == tag for posted, _ in self.to_post):
            return False
        return self.room_is_free(ask, ask.request) and self.enqueue(ask._replace(tag=new))

    def enqueue(self, ask: Ask) -> bool:
        self.asks[ask.tag] = ask
        for instance in (ask.prefill, ask.decode):
            for rank in range(self.shape[instance]):
                self.to_post[ask.tag, f"{instance}.{rank}"] = ask
        return True

    def room_is_free(self, ask: Ask, but: str = "") -> bool:
        """True when nobody uses the ask's room, other than for the request `but`."""
        place = (ask.prefill, ask.room, ask.sibling)
        users = {a.tag for a in self.asks.values() if (a.prefill, a.room, a.sibling) == place and a.request != but}
        if any(tag in users for tag, _ in self.to_post):
            return False
        return all(half.ended or half.tag not in users for p in self.processes.values() for half in p.halves.values())

    def post(self, tag: int, slot: str) -> bool:
        """A rank's half of a request arrives at whatever process is there by then, when it has memory for it."""
        ask, process = self.to_post.get((tag, slot)), self.processes[slot]
        if ask is None or process.frozen:
            return False
        decode = process.role == "decode"
        prefix = ask.prefix if decode else 0
        half = Half(tag, ask.request, ask.room, ask.sibling, prefix, self.now, len(process.halves) + 1)
        if not process.equip(half, pages=ask.pages - prefix, state=ask.state):
            return False
        del self.to_post[tag, slot]
        process.halves[half.handle] = half
        draining = process.machine.draining
        if decode:
            self.tags[AttemptId(process.incarnation, half.handle)] = tag
            wish = OpenAttempt(
                handle=half.handle,
                prefill=ask.prefill,
                room=ask.room,
                sibling=ask.sibling,
                request_id=ask.request,
                pages=pack(half.pages),
                prefix_pages=ask.prefix,
                aux_slot=half.aux[0],
                state=pack(half.state),
                deadline_s=DEADLINE_S,
            )
            self.do(process, wish)
        else:
            self.do(process, OpenRequest(half.handle, ask.room, ask.sibling, ask.request, DEADLINE_S))
        check(half.ended or not draining, f"{slot} drains and has taken something new: {half}")
        return True

    def lose_post(self, tag: int) -> bool:
        """What has not reached prefill of a request never will."""
        lost = [(t, slot) for t, slot in self.to_post if t == tag and slot[0] == "p"]
        for key in lost:
            del self.to_post[key]
        self.lost_asks.update(self.asks[tag].request for _ in lost)
        return bool(lost)

    def send(self, tag: int, slot: str, upto: int) -> bool:
        """Prefill's engine has computed the pages up to `upto`, and hands them over, even if it is over by then."""
        process = self.processes[slot]
        half = process.half_of(tag)
        if half is None or half.releasable or half.closed or process.frozen or not half.sent <= upto <= len(half.pages):
            return False
        half.closed = upto == len(half.pages)
        pages = half.pages[half.sent : upto]
        aux, state = (half.aux[0], pack(half.state)) if half.closed else (None, b"")
        event = SendPages(half.handle, pack(pages), half.sent, half.closed, aux, state)
        half.sent = upto
        self.do(process, event)
        return True

    def abort(self, tag: int, slot: str) -> bool:
        """The engine gives a hand-off up."""
        process = self.processes[slot]
        half = process.half_of(tag)
        if half is None or process.frozen:
            return False
        half.aborted |= not half.ended
        self.do(process, AbortTransfer(half.handle, "simulated"))
        check(half.ended, f"an abort did not end it: {half}")
        return True

    # --- Time ---

    def wait(self, seconds: float) -> bool:
        """Time passes."""
        self.now += seconds
        for process in self.processes.values():
            due = process.machine.next_deadline
            if due is not None and due <= self.now and not process.frozen:
                self.do(process, Tick())
        for process in self.processes.values():
            for half in process.halves.values():
                if not half.ended and self.now > half.posted + DEADLINE_S + LATE_S and not process.frozen:
                    raise ViolationError(f"a hand-off outlived its deadline: {half}")
        return True

    def wait_for_due(self) -> bool:
        """Time passes up to the next deadline of anybody."""
        due = [p.machine.next_deadline for p in self.processes.values() if not p.frozen]
        nearest = min((when for when in due if when is not None), default=self.now)
        return self.wait(max(nearest - self.now, 0.0))


def check(holds: bool, what: str) -> None:
    """Raise ViolationError, which says what was broken, unless it holds."""
    if not holds:
        raise ViolationError(what)
