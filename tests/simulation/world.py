"""A world in which both machines run under a scheduler that is fully decided by a seed.

The network drops, duplicates, delays and reorders; connections break; processes crash and are replaced; data planes
land a page at a time, fail, or fail while bytes are still on their way. Memory is modelled page by page with owners: a
write into a page that has been given back, or a read of one, is a violation, and so is a success whose pages hold
anything but the request's own data.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Connect,
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
    StopWriting,
    Tick,
    Unreachable,
    Write,
    WriteEnded,
    Writer,
    WriteResult,
)
from pdpool_connector.protocol.frames import VERSION_MAX, Frame, decode, encode
from pdpool_connector.protocol.outcome import Cause, Phase, TransferStatus
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.states import TransitionError
from pdpool_connector.protocol.timing import Timing

TIMING = Timing(
    drain_s=3.0, retry_first_s=0.2, retry_max_s=1.0, query_s=1.0, verdict_s=30.0, acked_s=8.0, max_attempts=64
)
DEADLINE_S = 8.0
PAGES = 8
ROOMS = 3


class ViolationError(AssertionError):
    """A promise was broken."""


@dataclass(eq=False)
class Half:
    """One side of one request, as its engine sees it. `tag` is the request's own content."""

    tag: int
    room: int
    pages: list[int]
    posted: float
    handle: int = 0
    statuses: list[TransferStatus] = field(default_factory=list)
    sent: int = 0

    @property
    def ended(self) -> bool:
        return bool(self.statuses) and self.statuses[-1].ended

    @property
    def releasable(self) -> bool:
        return bool(self.statuses) and self.statuses[-1].releasable


@dataclass(eq=False)
class Process:
    """One life of one process: its machine, its memory, and what its engine has under way."""

    role: str
    slot: str
    incarnation: str
    machine: PrefillMachine | DecodeMachine
    alive: bool = True
    halves: dict[int, Half] = field(default_factory=dict)
    owner: list[Half | None] = field(default_factory=lambda: [None] * PAGES)
    content: list[object] = field(default_factory=lambda: [None] * PAGES)
    wants: set[str] = field(default_factory=set)
    handles: int = 0

    def take_pages(self, half: Half, count: int) -> list[int] | None:
        free = [page for page, owner in enumerate(self.owner) if owner is None]
        if len(free) < count:
            return None
        for page in free[:count]:
            self.owner[page] = half
        return free[:count]


@dataclass(eq=False)
class Flight:
    """One write of a data plane, landing page by page. `source` is the writer's half, whose pages it reads."""

    writer: Process
    target: Process
    source: Half
    write: Write
    left: list[tuple[int, int]]
    stopped: bool = False
    reported: bool = False
    moved: int = 0


def unpack(pages: bytes) -> list[int]:
    return [int.from_bytes(pages[at : at + 4], "little") for at in range(0, len(pages), 4)]


def pack(pages: list[int]) -> bytes:
    return b"".join(page.to_bytes(4, "little") for page in pages)


class World:
    """See the module's docstring. `run` plays `requests` requests and then lets the faults stop."""

    def __init__(
        self,
        seed: int,
        *,
        prefill: type[PrefillMachine] = PrefillMachine,
        decode: type[DecodeMachine] = DecodeMachine,
        requests: int = 14,
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.faulty = True
        self.classes = {"prefill": prefill, "decode": decode}
        self.processes: list[Process] = []
        self.slots: dict[str, Process] = {}
        self.paired: set[tuple[str, str]] = set()
        self.network: list[tuple[str, Frame]] = []
        self.flights: list[Flight] = []
        self.unsettled: list[Flight] = []
        self.rooms: dict[tuple[str, int], list[tuple[Process, Half]]] = {}
        self.to_post: list[Callable[[], bool]] = []
        self.requests = requests
        self.posted = 0
        self.done = 0
        self.pace = self.random.choice([5.0, 1.0, 0.2])
        self.log: list[str] = []
        for slot in ("p0", "p1", "d0", "d1"):
            self.boot(slot)

    # --- Processes ---

    def boot(self, slot: str) -> Process:
        role = "prefill" if slot[0] == "p" else "decode"
        incarnation = f"{len(self.processes):032x}"
        process = Process(role, slot, incarnation, self.classes[role](incarnation, TIMING))
        self.processes.append(process)
        self.slots[slot] = process
        return process

    def find(self, incarnation: str) -> Process:
        return self.processes[int(incarnation, 16)]

    def do(self, process: Process, event: Event) -> None:
        if not process.alive:
            return
        try:
            effects = process.machine.handle(event, self.now)
        except (TransitionError, LookupError) as error:  # others are faults of a test's own and surface as such
            raise ViolationError(f"the machine raised {error!r} on {event} (seed {self.seed})") from error
        for effect in effects:
            match effect:
                case Send(peer, frame):
                    self.network.append((peer, decode(encode(frame))))
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

    def report(self, process: Process, half: Half, status: TransferStatus) -> None:
        if half.ended:
            last = half.statuses[-1]
            self.check(status.phase is last.phase and status.cause is last.cause, "an ended hand-off changed its end")
            self.check(status.releasable or not last.releasable, "pages that were releasable are not any more")
        half.statuses.append(status)
        if status.phase is Phase.DONE and process.role == "decode":
            self.done += 1
            for index, page in enumerate(half.pages):
                self.check(process.content[page] == (half.tag, index), f"success with foreign data: {half}")
        if status.releasable:
            for page, owner in enumerate(process.owner):
                if owner is half:
                    process.owner[page] = None

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            raise ViolationError(f"{what} (seed {self.seed}, t={self.now:.2f})\n" + "\n".join(self.log[-30:]))

    def note(self, what: str) -> None:
        self.log.append(f"{self.now:7.2f} {what}")

    # --- Data planes ---

    def fly(self, writer: Process, write: Write) -> None:
        source = next(half for half in writer.halves.values() if half.tag == self.tag_of(writer, write))
        pairs = list(zip(unpack(write.source), unpack(write.target), strict=True))
        self.flights.append(Flight(writer, self.find(write.peer), source, write, pairs))

    def tag_of(self, writer: Process, write: Write) -> int:
        """Whose pages are read is known from the pages themselves: the model's engine gave them out."""
        pages = unpack(write.source)
        owner = writer.owner[pages[0]] if pages else None
        if owner is None:
            live = [half for half in writer.halves.values() if not half.releasable]
            self.check(not pages, "a write reads pages that were given back")
            owner = live[0]
        return owner.tag

    def land(self, flight: Flight) -> None:
        """One more page arrives, whether or not anybody still wants it."""
        source, target = flight.left.pop(0)
        if flight.writer.alive:
            self.check(flight.writer.owner[source] is flight.source, "source pages were read after they were released")
        if flight.target.alive:
            number = flight.write.attempt.number
            owner = flight.target.owner[target]
            self.check(owner is not None and owner.handle == number, "stale write into pages that were given back")
            flight.target.content[target] = (flight.source.tag, flight.source.pages.index(source))
        flight.moved += 1

    def report_flight(self, flight: Flight, result: WriteResult) -> None:
        flight.reported = True
        if result is WriteResult.UNSETTLED:
            self.unsettled.append(flight)
        else:
            self.flights.remove(flight)
        event = WriteEnded(flight.write.attempt, flight.write.write, result, flight.moved, "simulated")
        self.do(flight.writer, event)

    def step_flight(self) -> None:
        flight = self.random.choice(self.flights)
        settled = not flight.writer.alive or flight.reported
        if flight.left and not (flight.stopped and not settled and self.random.random() < 0.5):
            self.land(flight)
        if settled:
            if not flight.left:
                self.flights.remove(flight)
        elif not flight.left:
            self.report_flight(flight, WriteResult.LANDED)
        elif flight.stopped:
            self.report_flight(flight, WriteResult.STOPPED)
        elif not flight.target.alive:
            self.report_flight(flight, WriteResult.FAILED)
        elif self.faulty and self.random.random() < 0.05:
            self.report_flight(flight, self.random.choice([WriteResult.FAILED, WriteResult.UNSETTLED]))

    # --- The network ---

    def step_network(self) -> None:
        index = self.random.randrange(len(self.network))
        peer, frame = self.network[index]
        fate = self.random.random() if self.faulty else 1.0
        if fate >= 0.1:  # below: duplicated, it stays; below half of that: lost
            self.network.pop(index)
        elif fate < 0.05:
            self.network.pop(index)
            return
        self.do(self.find(peer), Received(frame))

    def pair(self) -> None:
        """A decode that wants to reach a prefill, or is owed a word by it, gets a connection, or is refused one."""
        for decode_side in list(self.slots.values()):
            if decode_side.role != "decode":
                continue
            owed = {p for p in ("p0", "p1") if decode_side.machine.holds_for(p)}
            for prefill in sorted(decode_side.wants | owed):
                process = self.slots[prefill]
                link = (decode_side.incarnation, process.incarnation)
                if link in self.paired or self.random.random() < 0.3:
                    continue
                decode_side.wants.discard(prefill)
                if self.faulty and self.random.random() < 0.1:
                    self.do(decode_side, Unreachable(prefill, Cause.PEER_LOST, "simulated"))
                    continue
                self.paired.add(link)
                self.do(process, PeerReady(decode_side.incarnation, VERSION_MAX))
                self.do(decode_side, PeerReady(process.incarnation, VERSION_MAX))
                self.do(decode_side, Linked(prefill, (Writer(process.incarnation),)))

    def unpair(self, link: tuple[str, str]) -> None:
        self.paired.discard(link)
        sides = list(link)
        self.random.shuffle(sides)
        for side in sides:
            other = link[0] if side == link[1] else link[1]
            self.do(self.find(side), PeerLost(other, "simulated"))

    def crash(self) -> None:
        slot = self.random.choice(list(self.slots))
        process = self.slots[slot]
        self.note(f"crash of {slot}")
        process.alive = False
        self.boot(slot)
        for link in [link for link in self.paired if process.incarnation in link]:
            self.unpair(link)

    def fence(self, dead: Process) -> None:
        """Proof that a dead process is touched, and touches, no more: its flights are gone, and then it is said."""
        self.flights = [flight for flight in self.flights if dead not in (flight.writer, flight.target)]
        for process in self.slots.values():
            self.do(process, Fenced(dead.incarnation, "simulated"))

    # --- Engines ---

    def post_request(self) -> None:
        """A request reaches both sides, each at its own time, in a room that nobody uses."""
        prefill, decode_slot = self.random.choice(("p0", "p1")), self.random.choice(("d0", "d1"))
        room = self.random.randrange(ROOMS)
        users = self.rooms.get((prefill, room), [])
        if any(process.alive and not half.ended for process, half in users) or len(users) == 1:
            return
        if any(user_room == (prefill, room) for user_room in self.waiting_rooms()):
            return
        tag = self.posted
        self.posted += 1
        count = self.random.randint(0, 3)
        self.rooms[prefill, room] = []
        self.to_post.append(PostPrefill(self, prefill, room, tag, count))
        self.to_post.append(PostDecode(self, prefill, decode_slot, room, tag, count))

    def waiting_rooms(self) -> list[tuple[str, int]]:
        return [(post.prefill, post.room) for post in self.to_post]

    def step_post(self) -> None:
        post = self.random.choice(self.to_post)
        if post():
            self.to_post.remove(post)

    def step_send(self) -> None:
        for process in self.slots.values():
            for half in process.halves.values():
                if process.role == "prefill" and not half.ended and half.sent <= len(half.pages):
                    if self.random.random() < 0.5:
                        continue
                    upto = self.random.randint(half.sent, len(half.pages))
                    last = upto == len(half.pages)
                    pages = half.pages[half.sent : upto]
                    event = SendPages(half.handle, pack(pages), half.sent, last, None)
                    half.sent = upto + last
                    self.do(process, event)

    def step_abort(self) -> None:
        process = self.random.choice(list(self.slots.values()))
        live = [half for half in process.halves.values() if not half.ended]
        if live:
            self.do(process, AbortTransfer(self.random.choice(live).handle, "simulated"))

    # --- Time ---

    def advance(self) -> None:
        due = [p.machine.next_deadline for p in self.slots.values() if p.machine.next_deadline is not None]
        target = self.now + self.random.uniform(0.01, 0.5 if self.faulty else 2.0)
        if due and self.random.random() < 0.7:
            target = max(self.now, min(due))
        self.now = target
        for process in self.slots.values():
            when = process.machine.next_deadline
            if when is not None and when <= self.now:
                self.do(process, Tick())
        for process in self.slots.values():
            for half in process.halves.values():
                late = self.now > half.posted + DEADLINE_S + 1.0
                self.check(half.ended or not late, f"a hand-off outlived its deadline: {half}")

    # --- The play ---

    def step(self) -> None:
        actions = [(self.advance, 3.0), (self.pair, 2.0), (self.step_send, 2.0)]
        if self.network:
            actions.append((self.step_network, 8.0))
        if self.flights:
            actions.append((self.step_flight, self.pace))
        if self.to_post:
            actions.append((self.step_post, 3.0))
        if self.posted < self.requests:
            actions.append((self.post_request, 1.0))
        if self.faulty:
            actions += [(self.step_abort, 0.4), (self.step_unpair, 0.15), (self.crash, 0.06)]
        calls, weights = zip(*actions, strict=True)
        self.random.choices(calls, weights)[0]()

    def step_unpair(self) -> None:
        if self.paired:
            self.unpair(self.random.choice(sorted(self.paired)))

    def run(self) -> "World":
        while self.posted < self.requests or self.to_post:
            self.step()
        self.faulty = False
        end = self.now + DEADLINE_S + TIMING.drain_s + 5
        self.pace = 5.0
        while self.now < end or self.network or any(not flight.reported for flight in self.flights):
            self.step()
        for process in self.processes:
            if not process.alive:
                self.fence(process)
        self.fence_unsettled()
        end = self.now + 3 * (TIMING.verdict_s + TIMING.acked_s)
        while self.now < end:
            if self.network or self.flights:
                self.step()
            else:
                self.pair()
                self.advance()
        self.judge_end()
        return self

    def fence_unsettled(self) -> None:
        """Unsettled writes between living processes: somebody vouches that they are over, to both sides."""
        for flight in self.unsettled:
            if flight in self.flights:
                self.flights.remove(flight)
            self.do(flight.writer, Fenced(flight.target.incarnation, "simulated"))
            self.do(flight.target, Fenced(flight.writer.incarnation, "simulated"))

    def judge_end(self) -> None:
        for process in self.slots.values():
            for half in process.halves.values():
                self.check(half.releasable, f"pages were never released: {half}")
            self.check(not any(process.owner), "pages are left with an owner")
            self.check(process.machine.rows == 0, f"{process.machine.rows} rows are left on {process.slot}")

    def begin_half(self, process: Process, post: "PostPrefill | PostDecode") -> Half | None:
        """Give a process its half of a request, with pages of its own; None while it has not enough."""
        half = Half(post.tag, post.room, [], self.now)
        pages = process.take_pages(half, post.count)
        if pages is None:
            return None
        half.pages = pages
        process.handles += 1
        half.handle = process.handles
        process.halves[half.handle] = half
        self.rooms[post.prefill, post.room].append((process, half))
        return half


@dataclass(eq=False)
class PostPrefill:
    """Prefill's half of a request arrives at whatever process is there by then."""

    world: World
    prefill: str
    room: int
    tag: int
    count: int

    def __call__(self) -> bool:
        process = self.world.slots[self.prefill]
        half = self.world.begin_half(process, self)
        if half is None:
            return False
        event = OpenRequest(half.handle, self.room, 0, f"r{self.tag}", DEADLINE_S)
        self.world.do(process, event)
        return True


@dataclass(eq=False)
class PostDecode:
    """Decode's half of a request arrives at whatever process is there by then."""

    world: World
    prefill: str
    slot: str
    room: int
    tag: int
    count: int

    def __call__(self) -> bool:
        process = self.world.slots[self.slot]
        half = self.world.begin_half(process, self)
        if half is None:
            return False
        event = OpenAttempt(half.handle, self.prefill, self.room, 0, f"r{self.tag}", pack(half.pages), 0, 0, DEADLINE_S)
        self.world.do(process, event)
        return True
