"""Few ranks, few requests: everything that can happen from a given state, and what each of it does."""

from collections.abc import Iterator
from functools import partial

import msgspec
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Connect,
    Drain,
    Event,
    OfferPages,
    OpenAttempt,
    OpenRequest,
    Received,
    Report,
    Send,
    SendPages,
    StopWriting,
    Tick,
    Write,
)
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus

from tests.simulation.common import MACHINES, Machines, pack, require
from tests.simulation.numbered import life_of, rank_of
from tests.simulation.scene import Half, Scenario, State
from tests.simulation.smalllinks import Action
from tests.simulation.smallplanes import SmallPlanes

DEADLINE_S = 4.0
ROOM = 7


class SmallWorld(SmallPlanes):
    """Changes states as machines and faults would. `frames` are all that were ever sent, by number."""

    def __init__(self, scenario: Scenario, classes: Machines = MACHINES) -> None:
        super().__init__(scenario, classes)
        self.frames: list[tuple[int, int, f.AttemptFrame]] = []
        self._frame_numbers: dict[tuple[int, int, f.AttemptFrame], int] = {}

    def start(self) -> State:
        plan = self.scenario
        requests = len(plan.pages)
        return State(
            machines=[self.machines.fresh(rank, 0, decode=rank in self.decodes) for rank in range(plan.ranks)],
            lives=[0] * plan.ranks,
            up=[(False, False)] * len(self.links),
            wants=[False] * plan.decode,
            halves=[[Half()] * requests for _ in range(plan.ranks)],
            owner=[[-1] * plan.memory for _ in range(plan.ranks)],
            content=[[(None,) * plan.prefill] * plan.memory for _ in range(plan.decode)],
            flights=[],
            unsettled=frozenset(),
            fenced=frozenset(),
            soup=frozenset(),
            budget=(plan.aborts, plan.breaks, plan.crashes, plan.errors),
        )

    # --- What can happen ---

    def _actions(self, state: State) -> Iterator[Action]:
        yield from self._ordinary(state, again=True)
        for frame in sorted(state.soup):
            rank, life, _ = self.frames[frame]
            if state.lives[rank] == life:
                yield f"deliver {self._letter(frame)}", partial(self._deliver, frame=frame)
        for rank in range(self.scenario.ranks):
            if not self.scenario.timely and self.machines.due(state.machines[rank]) is not None:
                yield f"timer {self.label(rank)}", partial(self._tick, rank=rank)
        yield from self._faults(state)

    def _ordinary(self, state: State, *, again: bool) -> Iterator[Action]:
        """What happens without a fault, but for frames and timers. `again`: see `_pairing`."""
        for request, pages in enumerate(self.scenario.pages):
            for rank in range(self.scenario.ranks):
                if self._may_post(state, rank, request):
                    yield f"post {self.label(rank)} r{request}", partial(self._post, rank=rank, request=request)
            for rank in self.decodes:
                if self._may_offer(state, rank, request):
                    yield f"offer {self.label(rank)} r{request}", partial(self._offer, rank=rank, request=request)
            for rank in self.prefills:
                half = state.halves[rank][request]
                if half.phase and not half.releasable and half.sent < pages:
                    yield f"send {self.label(rank)} r{request}", partial(self._send, rank=rank, request=request)
        yield from self._pairing(state, again=again)
        yield from self._planes(state)

    def _faults(self, state: State) -> Iterator[Action]:
        aborts, breaks, crashes, errors = state.budget
        for rank in range(self.scenario.ranks):
            for request, half in enumerate(state.halves[rank]):
                if aborts and half.phase and not half.ended:
                    yield f"abort {self.label(rank)} r{request}", partial(self._abort, rank=rank, request=request)
            if crashes:
                yield f"crash {self.label(rank)}", partial(self._crash, rank=rank)
            if aborts and self.scenario.timely and not self.machines.get(state.machines[rank]).draining:
                yield f"drain {self.label(rank)}", partial(self._drain, rank=rank)
        if breaks:
            yield from self._breaks(state)
        if errors:
            yield from self._errors(state)
        for rank, life in self.dead(state):
            if (rank, life) not in state.fenced:
                yield f"fence {self.label(rank)} {life}", partial(self._fence, rank=rank, life=life)

    def _letter(self, frame: int) -> str:
        rank, life, content = self.frames[frame]
        source = self.label(rank_of(content.sender))
        about = f"{self.label(rank_of(content.attempt.decode))}/{content.attempt.number}"
        return f"{source}>{self.label(rank)} {life} {type(content).__name__} {about}"

    # --- Machines and their effects ---

    def do(self, state: State, rank: int, event: Event, after: float = 0.0) -> None:
        state.machines[rank], effects = self.machines.move(state.machines[rank], event, after)
        for effect in effects:
            match effect:
                case Send(peer, frame):
                    assert isinstance(frame, f.AttemptFrame)
                    self._mail(state, rank, peer, frame)
                case Report(handle, status):
                    self._report(state, rank, handle - 1, status)
                case Write():
                    self.fly(state, rank, effect)
                case StopWriting():
                    self.stop(state, rank, effect)
                case Connect():
                    state.wants[rank - self.scenario.prefill] = True
        self.check_stopped(state, rank)

    def _mail(self, state: State, rank: int, peer: str, frame: f.AttemptFrame) -> None:
        if isinstance(frame, f.Open):
            # What is left of the attempt's life would make equal frames differ; how long one travels is open.
            frame = msgspec.structs.replace(frame, deadline_s=DEADLINE_S)
        if isinstance(frame, f.Offer):
            half = state.halves[rank][frame.attempt.number - 1]
            require(half.offered and not half.ended, f"r{frame.attempt.number - 1} is offered without memory")
            state.halves[rank][frame.attempt.number - 1] = half._replace(exposed=True)
        key = (rank_of(peer), life_of(peer), frame)
        if key not in self._frame_numbers:
            self._frame_numbers[key] = len(self.frames)
            self.frames.append(key)
        state.soup |= {self._frame_numbers[key]}
        state.mail.append(self._frame_numbers[key])

    def _report(self, state: State, rank: int, request: int, status: TransferStatus) -> None:
        half = state.halves[rank][request]
        who = f"r{request} at {self.label(rank)}"
        if half.ended:
            same = (status.phase, status.cause) == (half.phase, half.cause)
            require(same and status.releasable >= half.releasable, f"{who} changed its end")
        if status.phase is Phase.DONE and rank in self.decodes:
            found = [state.content[rank - self.scenario.prefill][page] for page in half.pages]
            wanted = [((self.scenario.prompt(request), at),) * self.scenario.prefill for at in range(len(found))]
            require(half.exposed and found == wanted, f"false success: {who} holds {found}")
        if status.ended and rank in self.decodes:
            require(status.releasable or half.exposed, f"{who} is kept, and no peer was sent its memory")
        if status.releasable and not half.releasable:
            self.check_untouched(state, rank, request)
            state.owner[rank] = [-1 if owner == request else owner for owner in state.owner[rank]]
        state.halves[rank][request] = half._replace(
            phase=status.phase, cause=status.cause, releasable=status.releasable
        )

    # --- Engines ---

    def _has_memory(self, state: State, rank: int, request: int) -> bool:
        return state.owner[rank].count(-1) >= self.scenario.pages[request]

    def _take(self, state: State, rank: int, request: int) -> tuple[int, ...]:
        free = [page for page, owner in enumerate(state.owner[rank]) if owner < 0][: self.scenario.pages[request]]
        for page in free:
            state.owner[rank][page] = request
        return tuple(free)

    def _may_post(self, state: State, rank: int, request: int) -> bool:
        """A prefill engine takes a request when it has memory to compute it, a decode engine at once."""
        if state.halves[rank][request].phase is not None:
            return False
        return rank in self.decodes or self._has_memory(state, rank, request)

    def _post(self, state: State, rank: int, request: int) -> None:
        prompt = f"p{self.scenario.prompt(request)}".encode()
        rid = f"r{request}" if self.scenario.named else f"{self.label(rank)[0]} makes up {request}"
        if rank in self.prefills:
            state.halves[rank][request] = Half(phase=Phase.WAITING, pages=self._take(state, rank, request))
            self.do(state, rank, OpenRequest(request + 1, ROOM, rid, DEADLINE_S, prompt))
        else:
            state.halves[rank][request] = Half(phase=Phase.WAITING)
            self.do(state, rank, OpenAttempt(request + 1, "p", ROOM, rid, DEADLINE_S, prompt))

    def _may_offer(self, state: State, rank: int, request: int) -> bool:
        half = state.halves[rank][request]
        waits = half.phase is not None and not half.ended and not half.offered
        return waits and self._has_memory(state, rank, request)

    def _offer(self, state: State, rank: int, request: int) -> None:
        pages = self._take(state, rank, request)
        state.halves[rank][request] = state.halves[rank][request]._replace(pages=pages, offered=True)
        self.do(state, rank, OfferPages(request + 1, pack(pages)))

    def _send(self, state: State, rank: int, request: int) -> None:
        half = state.halves[rank][request]
        state.halves[rank][request] = half._replace(sent=half.sent + 1)
        page, last = half.pages[half.sent], half.sent + 1 == len(half.pages)
        self.do(state, rank, SendPages(request + 1, pack([page]), half.sent, last, None))

    def _abort(self, state: State, rank: int, request: int) -> None:
        state.budget = (state.budget[0] - 1, *state.budget[1:])
        self.do(state, rank, AbortTransfer(request + 1, "explored"))
        require(state.halves[rank][request].ended, f"an abort did not end r{request}")

    def _drain(self, state: State, rank: int) -> None:
        state.budget = (state.budget[0] - 1, *state.budget[1:])
        self.do(state, rank, Drain())

    # --- Frames and timers ---

    def _deliver(self, state: State, frame: int) -> None:
        rank, _, content = self.frames[frame]
        self.do(state, rank, Received(content))
        state.mail.clear()

    def _tick(self, state: State, rank: int) -> None:
        due = self.machines.due(state.machines[rank])
        assert due is not None
        self.do(state, rank, Tick(), due)
        state.mail.clear()

    # --- Processes ---

    def _crash(self, state: State, rank: int) -> None:
        """The process is gone, a new one is in its place; its memory and its halves are gone with it."""
        state.budget = (*state.budget[:2], state.budget[2] - 1, state.budget[3])
        state.lives[rank] += 1
        state.machines[rank] = self.machines.fresh(rank, state.lives[rank], decode=rank in self.decodes)
        state.owner[rank] = [-1] * self.scenario.memory
        gone = Half(phase=Phase.FAILED, cause=Cause.PEER_LOST, releasable=True)
        state.halves[rank] = [half if half.phase is None else gone for half in state.halves[rank]]
        for link in self.links_of(rank):
            at_prefill, at_decode = state.up[link]
            state.up[link] = (False, at_decode) if rank in self.prefills else (at_prefill, False)
        if rank in self.decodes:
            state.wants[rank - self.scenario.prefill] = False
            state.content[rank - self.scenario.prefill] = [(None,) * self.scenario.prefill] * self.scenario.memory
