"""Transfers of a small world: they land page by page, end, fail, or fail while bytes are still on their way."""

from collections.abc import Iterator
from functools import partial

from pdpool_connector.protocol.events import Read, ReadEnded, StopReading, StopWriting, Write, WriteEnded, WriteResult
from pdpool_connector.protocol.status import Phase

from tests.simulation.memory import ViolationError, unpack
from tests.simulation.numbered import life_of, rank_of
from tests.simulation.scene import Flight, Landed, State
from tests.simulation.smalllinks import Action, SmallLinks


class SmallPlanes(SmallLinks):
    """Who moves is prefill in WRITE, decode in READ."""

    def _planes(self, state: State) -> Iterator[Action]:
        for index, flight in enumerate(state.flights):
            what = self._flight_name(flight)
            if flight.left:
                yield f"land {what}", partial(self._land, index=index)
            if not self._may_settle(state, flight):
                continue
            if flight.severed:
                yield f"failed {what}", partial(self._settle, index=index, result=WriteResult.FAILED)
            elif not flight.left:
                yield f"landed {what}", partial(self._settle, index=index, result=WriteResult.LANDED)
            elif flight.stopped:
                yield f"stopped {what}", partial(self._settle, index=index, result=WriteResult.STOPPED)

    def _errors(self, state: State) -> Iterator[Action]:
        for index, flight in enumerate(state.flights):
            for result in (WriteResult.FAILED, WriteResult.UNSETTLED):
                if flight.left and self._may_settle(state, flight):
                    what = f"{result} {self._flight_name(flight)}"
                    yield what, partial(self._fault, index=index, result=result)

    def _flight_name(self, flight: Flight) -> str:
        return f"{self.label(flight.prefill)}-{self.label(flight.decode)} r{flight.request} {flight.number}"

    def _ends(self, flight: Flight) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rank and life of prefill and of decode."""
        return (flight.prefill, flight.lives[0]), (flight.decode, flight.lives[1])

    def _moves(self, state: State, rank: int, flight: Flight) -> bool:
        """Whether the rank's present process is the one that moves."""
        at = flight.prefill in self.movers
        return self._ends(flight)[not at] == (rank, state.lives[rank])

    def _fly(self, state: State, mover: int, move: Write | Read) -> None:
        peer, life = rank_of(move.peer), life_of(move.peer)
        require((peer, life) not in state.fenced, "a transfer begins with a process that was fenced")
        here, there = unpack(move.source), unpack(move.target)
        if isinstance(move, Write):
            prefill, decode, number = mover, peer, move.write
            lives = (state.lives[mover], life)
            request = state.owner[prefill][here[0]]
            require(request >= 0, "a write reads pages that were given back")
            at = [state.halves[prefill][request].pages.index(page) for page in here]
        else:
            prefill, decode, number = peer, mover, move.read
            lives = (life, state.lives[mover])
            request = state.owner[decode][there[0]]
            require(request >= 0, "a read goes into pages that were given back")
            at = [state.halves[decode][request].pages.index(page) for page in there]
        left = tuple(zip(here, there, at, strict=True))
        state.flights.append(Flight(move.attempt, number, prefill, decode, lives, request, left))

    def _stop(self, state: State, mover: int, order: StopWriting | StopReading) -> None:
        for index, flight in enumerate(state.flights):
            peer = (rank_of(order.peer), life_of(order.peer))
            if flight.attempt == order.attempt and self._moves(state, mover, flight) and peer in self._ends(flight):
                state.flights[index] = flight._replace(stopped=True)

    def _check_stopped(self, state: State, rank: int) -> None:
        """What has failed is moved no further."""
        for flight in state.flights:
            if self._moves(state, rank, flight) and state.halves[rank][flight.request].phase is Phase.FAILED:
                what = f"r{flight.request} has failed at {self.label(rank)} and is moved on"
                require(flight.stopped or flight.reported, what)

    def _check_untouched(self, state: State, rank: int, request: int) -> None:
        """Memory that goes back to its engine is touched by no transfer any more, on either side of it."""
        pages = state.halves[rank][request].pages
        for flight in state.flights:
            for at, end in enumerate(self._ends(flight)):
                touched = end == (rank, state.lives[rank]) and any(unit[at] in pages for unit in flight.left)
                what = f"r{request} of {self.label(rank)} was given back while {self._flight_name(flight)} may touch it"
                require(not touched, what)

    def _land(self, state: State, index: int) -> None:
        flight = state.flights[index]
        (here, there, at), left = flight.left[0], flight.left[1:]
        prefill_lives, decode_lives = (state.lives[rank] == life for rank, life in self._ends(flight))
        value: Landed = (flight.request, at)
        if prefill_lives and flight.prefill in self.movers:
            held = state.owner[flight.prefill][here] == flight.request
            require(held, f"source page {here} of r{flight.request} was read after it was given back")
        elif prefill_lives:
            value = self._found(state, flight.prefill, here)
        if decode_lives:
            row = state.content[flight.decode - self.scenario.prefill]
            owner = state.owner[flight.decode][there]
            stale = f"stale transfer of r{flight.request} into page {there} of r{owner}"
            require(owner == flight.attempt.number - 1, stale)
            row[there] = (*row[there][: flight.prefill], value, *row[there][flight.prefill + 1 :])
        astray = flight.astray or value != (flight.request, at)
        flight = flight._replace(left=left, moved=flight.moved + 1, astray=astray)
        gone = not left and (flight.reported or not (prefill_lives if flight.prefill in self.movers else decode_lives))
        state.flights[index : index + 1] = [] if gone else [flight]
        if gone:
            self._check_source(flight)

    def _found(self, state: State, prefill: int, page: int) -> Landed:
        """What is in a page of prefill's by now; a reader gets that, whatever it wants."""
        owner = state.owner[prefill][page]
        if owner < 0:
            return None
        half = state.halves[prefill][owner]
        at = half.pages.index(page)
        return (owner, at) if at < half.sent else None

    def _check_source(self, flight: Flight) -> None:
        what = f"{self._flight_name(flight)} has read pages that were given back"
        require(not flight.astray, what)

    def _may_settle(self, state: State, flight: Flight) -> bool:
        return not flight.reported and any(self._moves(state, rank, flight) for rank in self.movers)

    def _settle(self, state: State, index: int, result: WriteResult) -> None:
        flight = state.flights[index]
        unsettled = result is WriteResult.UNSETTLED
        mover, peer = (flight.prefill, flight.decode)[:: 1 if flight.prefill in self.movers else -1]
        if unsettled:
            state.unsettled |= {(mover, peer)}
        state.flights[index : index + 1] = [flight._replace(reported=True)] if unsettled else []
        kind = WriteEnded if flight.prefill in self.movers else ReadEnded
        self.do(state, mover, kind(flight.attempt, flight.number, result, flight.moved, "explored"))
        self._check_source(flight)

    def _fault(self, state: State, index: int, result: WriteResult) -> None:
        state.budget = (*state.budget[:3], state.budget[3] - 1)
        self._settle(state, index, result)

    def sever(self, state: State, rank: int, life: int) -> None:
        """See `SmallLinks`."""
        flights = []
        for flight in state.flights:
            dead = (rank, life) in self._ends(flight)
            if dead and rank in self.movers:
                continue
            if dead:
                severed = bool(flight.left) and flight.decode in self.movers
                flight = flight._replace(left=(), severed=severed)
            if flight.left or not flight.reported:
                flights.append(flight)
        state.flights = flights


def require(holds: bool, what: str) -> None:
    """Raise ViolationError, which says what was broken, unless it holds."""
    if not holds:
        raise ViolationError(what)
