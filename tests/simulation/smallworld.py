"""One prefill, one decode, few requests: everything that can happen from a given state, and what each of it does."""

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
from pdpool_connector.protocol import frames as f
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
from pdpool_connector.protocol.outcome import Cause, Phase, TransferStatus
from pdpool_connector.protocol.prefill import PrefillMachine

from tests.simulation.memory import ViolationError, pack, unpack
from tests.simulation.numbered import Numbered, name
from tests.simulation.scene import Flight, Half, Scenario, State
from tests.simulation.world import Machines

DEADLINE_S = 4.0
P, D = 0, 1
SIDES = "pd"
Action = tuple[str, Callable[[State], None]]


class SmallWorld:
    """Changes states as machines and faults would. `frames` are all that were ever sent, by number."""

    def __init__(self, scenario: Scenario, classes: Machines = (PrefillMachine, DecodeMachine)) -> None:
        self.scenario = scenario
        self.machines = Numbered(classes)
        self.frames: list[tuple[int, int, f.AttemptFrame]] = []
        self._frame_numbers: dict[tuple[int, int, f.AttemptFrame], int] = {}

    def start(self) -> State:
        memory, requests, budget = self.scenario.memory, len(self.scenario.pages), self.scenario
        return State(
            machines=[self.machines.fresh(P, 0), self.machines.fresh(D, 0)],
            lives=[0, 0],
            paired=[False, False],
            wants=False,
            halves=[[Half()] * requests, [Half()] * requests],
            owner=[[-1] * memory, [-1] * memory],
            content=[None] * memory,
            flights=[],
            unsettled=False,
            fenced=frozenset(),
            soup=frozenset(),
            budget=(budget.aborts, budget.breaks, budget.crashes, budget.errors),
        )

    # --- What can happen ---

    def _actions(self, state: State) -> Iterator[Action]:
        yield from self._ordinary(state)
        for frame in sorted(state.soup):
            side, life, _ = self.frames[frame]
            if state.lives[side] == life:
                yield f"deliver {self._letter(frame)}", partial(self._deliver, frame=frame)
        for side in (P, D):
            if self.machines.due(state.machines[side]) is not None:
                yield f"timer {SIDES[side]}", partial(self._tick, side=side)
        yield from self._faults(state)

    def _ordinary(self, state: State) -> Iterator[Action]:
        """What happens without a fault, but for frames and timers."""
        for request, pages in enumerate(self.scenario.pages):
            for side in (P, D):
                if self._may_post(state, side, request):
                    yield f"post {SIDES[side]} r{request}", partial(self._post, side=side, request=request)
            half = state.halves[P][request]
            if half.phase and not half.releasable and half.sent < pages:
                yield f"send r{request}", partial(self._send, request=request)
        if self._wanted(state):
            yield "greet", self._greet
            if state.paired[P]:
                yield "link", self._link
        for side in (P, D):
            if state.paired[side] and self._peer_changed(state, side):
                yield f"lost {SIDES[side]}", partial(self._lose, side=side)
        for index, flight in enumerate(state.flights):
            what = f"r{flight.source} write {flight.write}"
            if flight.left:
                yield f"land {what}", partial(self._land, index=index)
            result = WriteResult.STOPPED if flight.left else WriteResult.LANDED
            if self._may_settle(state, flight) and (flight.stopped or not flight.left):
                yield f"{result} {what}", partial(self._settle, index=index, result=result)

    def _faults(self, state: State) -> Iterator[Action]:
        aborts, breaks, crashes, errors = state.budget
        for side in (P, D):
            for request, half in enumerate(state.halves[side]):
                if aborts and half.phase and not half.ended:
                    yield f"abort {SIDES[side]} r{request}", partial(self._abort, side=side, request=request)
            if breaks and state.paired[side] and not self._peer_changed(state, side):
                yield f"break {SIDES[side]}", partial(self._break, side=side)
            if crashes:
                yield f"crash {SIDES[side]}", partial(self._crash, side=side)
        if breaks and state.wants and not state.paired[D]:
            yield "refuse", self._refuse
        if errors:
            yield from self._errors(state)
        for side, life in self._dead(state):
            if (side, life) not in state.fenced:
                yield f"fence {SIDES[side]} {life}", partial(self._fence, side=side, life=life)

    def _errors(self, state: State) -> Iterator[Action]:
        for index, flight in enumerate(state.flights):
            for result in (WriteResult.FAILED, WriteResult.UNSETTLED):
                if flight.left and self._may_settle(state, flight):
                    what = f"{result} r{flight.source} write {flight.write}"
                    yield what, partial(self._fault, index=index, result=result)

    def _letter(self, frame: int) -> str:
        side, life, content = self.frames[frame]
        return f"{SIDES[1 - side]}>{SIDES[side]}{life} {type(content).__name__} {content.attempt.number}"

    # --- Machines and what they say ---

    def _do(self, state: State, side: int, event: Event, after: float = 0.0) -> None:
        state.machines[side], effects = self.machines.move(state.machines[side], event, after)
        for effect in effects:
            match effect:
                case Send(peer, frame):
                    assert isinstance(frame, f.AttemptFrame)
                    self._mail(state, peer, frame)
                case Report(handle, status):
                    self._report(state, side, handle - 1, status)
                case Write():
                    self._fly(state, effect)
                case StopWriting(attempt):
                    lives = (state.lives[P], int(attempt.decode[16:], 16))
                    state.flights = [
                        fl._replace(stopped=True) if (fl.attempt, fl.lives) == (attempt, lives) else fl
                        for fl in state.flights
                    ]
                case Connect():
                    state.wants = True

    def _mail(self, state: State, peer: str, frame: f.AttemptFrame) -> None:
        if isinstance(frame, f.Open):
            # What is left of the attempt's life would tell equal offers apart; how long a frame travelled is unknown.
            frame = msgspec.structs.replace(frame, deadline_s=DEADLINE_S)
        key = (int(peer[:16], 16), int(peer[16:], 16), frame)
        if key not in self._frame_numbers:
            self._frame_numbers[key] = len(self.frames)
            self.frames.append(key)
        state.soup |= {self._frame_numbers[key]}
        state.mail.append(self._frame_numbers[key])

    def _report(self, state: State, side: int, request: int, status: TransferStatus) -> None:
        half = state.halves[side][request]
        if half.ended:
            same = (status.phase, status.cause) == (half.phase, half.cause)
            require(same and status.releasable >= half.releasable, f"r{request} changed its end at {SIDES[side]}")
        if status.phase is Phase.DONE and side == D:
            found = [state.content[page] for page in half.pages]
            require(found == [(request, at) for at in range(len(found))], f"false success: r{request} holds {found}")
        if status.releasable:
            state.owner[side] = [-1 if owner == request else owner for owner in state.owner[side]]
        state.halves[side][request] = half._replace(
            phase=status.phase, cause=status.cause, releasable=status.releasable
        )
        failed = side == P and status.phase is Phase.FAILED
        if failed:
            lives = state.lives[P]
            going = [fl for fl in state.flights if fl.source == request and fl.lives[P] == lives]
            require(all(fl.stopped or fl.reported for fl in going), f"r{request} has failed and is written on")

    # --- Engines ---

    def _may_post(self, state: State, side: int, request: int) -> bool:
        """A room is used again when nobody has a hand-off there any more, as far as the engines know."""
        if state.halves[side][request].phase is not None:
            return False
        before = [half[number] for half in state.halves for number in range(request)]
        free = state.owner[side].count(-1) >= self.scenario.pages[request]
        return free and all(half.ended for half in before)

    def _post(self, state: State, side: int, request: int) -> None:
        free = [page for page, owner in enumerate(state.owner[side]) if owner < 0][: self.scenario.pages[request]]
        for page in free:
            state.owner[side][page] = request
        state.halves[side][request] = Half(phase=Phase.WAITING, pages=tuple(free))
        rid = f"r{request}"
        if side == P:
            self._do(state, P, OpenRequest(request + 1, 7, 0, rid, DEADLINE_S))
        else:
            self._do(state, D, OpenAttempt(request + 1, "p", 7, 0, rid, pack(free), 0, 0, DEADLINE_S))

    def _send(self, state: State, request: int) -> None:
        half = state.halves[P][request]
        state.halves[P][request] = half._replace(sent=half.sent + 1)
        page, last = half.pages[half.sent], half.sent + 1 == len(half.pages)
        self._do(state, P, SendPages(request + 1, pack([page]), half.sent, last, None))

    def _abort(self, state: State, side: int, request: int) -> None:
        state.budget = (state.budget[0] - 1, *state.budget[1:])
        self._do(state, side, AbortTransfer(request + 1, "explored"))
        require(state.halves[side][request].ended, f"an abort did not end r{request}")

    # --- Frames, timers, pairing ---

    def _deliver(self, state: State, frame: int) -> None:
        side, _, content = self.frames[frame]
        self._do(state, side, Received(content))
        state.mail.clear()

    def _tick(self, state: State, side: int) -> None:
        due = self.machines.due(state.machines[side])
        assert due is not None
        self._do(state, side, Tick(), due)
        state.mail.clear()

    def _wanted(self, state: State) -> bool:
        machine = self.machines.get(state.machines[D])
        return not state.paired[D] and (state.wants or machine.holds_for("p"))

    def _peer_changed(self, state: State, side: int) -> bool:
        """The process with which it is paired is not there any more."""
        return name(1 - side, state.lives[1 - side]) not in self.machines.get(state.machines[side])._versions

    def _greet(self, state: State) -> None:
        if state.paired[P] and self._peer_changed(state, P):
            self._lose(state, P)
        state.paired[P] = True
        self._do(state, P, PeerReady(name(D, state.lives[D]), f.VERSION_MAX))

    def _link(self, state: State) -> None:
        prefill = name(P, state.lives[P])
        state.paired[D], state.wants = True, False
        self._do(state, D, PeerReady(prefill, f.VERSION_MAX))
        self._do(state, D, Linked("p", (Writer(prefill),)))

    def _lose(self, state: State, side: int) -> None:
        """A side learns that the connection to whom it knew has ended."""
        state.paired[side] = False
        for peer in list(self.machines.get(state.machines[side])._versions):
            self._do(state, side, PeerLost(peer, "explored"))
            if side == P:
                # Prefill hears a peer on one connection only: what it had sent on that comes no more.
                state.soup = frozenset(n for n in state.soup if self.frames[n][2].sender != peer)

    def _break(self, state: State, side: int) -> None:
        state.budget = (state.budget[0], state.budget[1] - 1, *state.budget[2:])
        self._lose(state, side)

    def _refuse(self, state: State) -> None:
        state.budget = (state.budget[0], state.budget[1] - 1, *state.budget[2:])
        state.wants = False
        self._do(state, D, Unreachable("p", Cause.PEER_LOST, "explored"))

    # --- Processes ---

    def _crash(self, state: State, side: int) -> None:
        """The process is gone, a new one is in its place; its memory and its halves are gone with it."""
        state.budget = (*state.budget[:2], state.budget[2] - 1, state.budget[3])
        state.lives[side] += 1
        state.machines[side] = self.machines.fresh(side, state.lives[side])
        state.paired[side] = False
        state.owner[side] = [-1] * self.scenario.memory
        gone = Half(phase=Phase.FAILED, cause=Cause.PEER_LOST, releasable=True)
        state.halves[side] = [half if half.phase is None else gone for half in state.halves[side]]
        if side == D:
            state.wants = False
            state.content = [None] * self.scenario.memory

    def _dead(self, state: State) -> list[tuple[int, int]]:
        return [(side, life) for side in (P, D) for life in range(state.lives[side])]

    def _fence(self, state: State, side: int, life: int) -> None:
        """Its bytes have stopped, and then the other side is told."""
        state.fenced |= {(side, life)}
        if side == P:
            state.flights = [fl for fl in state.flights if fl.lives[P] != life]
        else:
            flights = [fl._replace(left=()) if fl.lives[D] == life else fl for fl in state.flights]
            state.flights = [fl for fl in flights if fl.left or not fl.reported]
        self._do(state, 1 - side, Fenced(name(side, life), "explored"))

    # --- Data plane ---

    def _fly(self, state: State, write: Write) -> None:
        here, there = unpack(write.source), unpack(write.target)
        source = state.owner[P][here[0]]
        require(source >= 0, "a write reads pages that were given back")
        lives = (state.lives[P], int(write.peer[16:], 16))
        pairs = tuple(zip(here, there, strict=True))
        state.flights.append(Flight(write.attempt, write.write, source, lives, pairs))

    def _land(self, state: State, index: int) -> None:
        flight = state.flights[index]
        (here, there), left = flight.left[0], flight.left[1:]
        half = state.halves[P][flight.source]
        at = half.pages.index(here) if here in half.pages else 0
        if flight.lives[P] == state.lives[P]:
            held = state.owner[P][here] == flight.source
            require(held, f"source page {here} of r{flight.source} was read after it was given back")
        if flight.lives[D] == state.lives[D]:
            owner = state.owner[D][there]
            require(
                owner == flight.attempt.number - 1, f"stale write of r{flight.source} into page {there} of r{owner}"
            )
            state.content[there] = (flight.source, at)
        flight = flight._replace(left=left, moved=flight.moved + 1)
        gone = not left and (flight.reported or flight.lives[P] != state.lives[P])
        state.flights[index : index + 1] = [] if gone else [flight]

    def _may_settle(self, state: State, flight: Flight) -> bool:
        return not flight.reported and flight.lives[P] == state.lives[P]

    def _settle(self, state: State, index: int, result: WriteResult) -> None:
        flight = state.flights[index]
        unsettled = result is WriteResult.UNSETTLED
        state.unsettled |= unsettled
        state.flights[index : index + 1] = [flight._replace(reported=True)] if unsettled else []
        self._do(state, P, WriteEnded(flight.attempt, flight.write, result, flight.moved, "explored"))

    def _fault(self, state: State, index: int, result: WriteResult) -> None:
        state.budget = (*state.budget[:3], state.budget[3] - 1)
        self._settle(state, index, result)


def require(holds: bool, what: str) -> None:
    """Raise ViolationError, which says what was broken, unless it holds."""
    if not holds:
        raise ViolationError(what)
