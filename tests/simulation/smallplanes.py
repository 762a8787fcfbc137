"""Writes of a small world: they land page by page, end, fail, or fail while bytes are still on their way."""

from collections.abc import Iterator
from functools import partial

from pdpool_connector.protocol.events import StopWriting, Write, WriteEnded, WriteResult
from pdpool_connector.protocol.status import Phase

from tests.simulation.common import require, unpack
from tests.simulation.numbered import life_of, rank_of
from tests.simulation.scene import Flight, Landed, State
from tests.simulation.smalllinks import Action, SmallLinks


class SmallPlanes(SmallLinks):
    """The data plane: prefill ranks write into pages of decode ranks."""

    def _planes(self, state: State) -> Iterator[Action]:
        for index, flight in enumerate(state.flights):
            what = self._flight_name(flight)
            if flight.left:
                yield f"land {what}", partial(self._land, index=index)
            if not self._may_settle(state, flight):
                continue
            if not flight.left:
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

    def _writes(self, state: State, rank: int, flight: Flight) -> bool:
        """Whether the rank's present process is the writer."""
        return flight.ends[0] == (rank, state.lives[rank])

    def fly(self, state: State, rank: int, write: Write) -> None:
        """A write begins."""
        peer, life = rank_of(write.peer), life_of(write.peer)
        require((peer, life) not in state.fenced, "a write begins to a process that was fenced")
        here, there = unpack(write.source), unpack(write.target)
        request = state.owner[rank][here[0]]
        require(request >= 0, "a write reads pages that were given back")
        at = [state.halves[rank][request].pages.index(page) for page in here]
        left = tuple(zip(here, there, at, strict=True))
        lives = (state.lives[rank], life)
        state.flights.append(Flight(write.attempt, write.write, rank, peer, lives, request, left))

    def stop(self, state: State, rank: int, order: StopWriting) -> None:
        """The machine wants no more of an attempt's pages to be written."""
        for index, flight in enumerate(state.flights):
            peer = (rank_of(order.peer), life_of(order.peer))
            if flight.attempt == order.attempt and self._writes(state, rank, flight) and peer == flight.ends[1]:
                state.flights[index] = flight._replace(stopped=True)

    def check_stopped(self, state: State, rank: int) -> None:
        """What has failed is written no further."""
        for flight in state.flights:
            if self._writes(state, rank, flight) and state.halves[rank][flight.request].phase is Phase.FAILED:
                what = f"r{flight.request} has failed at {self.label(rank)} and is written on"
                require(flight.stopped or flight.reported, what)

    def check_untouched(self, state: State, rank: int, request: int) -> None:
        """No write on either side touches memory that goes back to its engine."""
        pages = state.halves[rank][request].pages
        for flight in state.flights:
            for at, end in enumerate(flight.ends):
                touched = end == (rank, state.lives[rank]) and any(unit[at] in pages for unit in flight.left)
                what = f"r{request} of {self.label(rank)} was given back while {self._flight_name(flight)} may touch it"
                require(not touched, what)

    def _land(self, state: State, index: int) -> None:
        flight = state.flights[index]
        (here, there, at), left = flight.left[0], flight.left[1:]
        prefill_lives, decode_lives = (state.lives[rank] == life for rank, life in flight.ends)
        if prefill_lives:
            held = state.owner[flight.prefill][here] == flight.request
            require(held, f"source page {here} of r{flight.request} was read after it was given back")
        if decode_lives:
            row = state.content[flight.decode - self.scenario.prefill]
            owner = state.owner[flight.decode][there]
            stale = f"stale write of r{flight.request} into page {there} of r{owner}"
            require(owner == flight.attempt.number - 1, stale)
            value: Landed = (self.scenario.prompt(flight.request), at)
            row[there] = (*row[there][: flight.prefill], value, *row[there][flight.prefill + 1 :])
        gone = not left and (flight.reported or not prefill_lives)
        state.flights[index : index + 1] = [] if gone else [flight._replace(left=left, moved=flight.moved + 1)]

    def _may_settle(self, state: State, flight: Flight) -> bool:
        return not flight.reported and self._writes(state, flight.prefill, flight)

    def _settle(self, state: State, index: int, result: WriteResult) -> None:
        flight = state.flights[index]
        unsettled = result is WriteResult.UNSETTLED
        if unsettled:
            state.unsettled |= {(flight.prefill, flight.decode)}
        state.flights[index : index + 1] = [flight._replace(reported=True)] if unsettled else []
        self.do(state, flight.prefill, WriteEnded(flight.attempt, flight.number, result, flight.moved, "explored"))

    def _fault(self, state: State, index: int, result: WriteResult) -> None:
        state.budget = (*state.budget[:3], state.budget[3] - 1)
        self._settle(state, index, result)

    def sever(self, state: State, rank: int, life: int) -> None:
        """A dead process writes no more, and nothing is written to it."""
        flights = []
        for flight in state.flights:
            if flight.ends[0] == (rank, life):
                continue
            if flight.ends[1] == (rank, life):
                flight = flight._replace(left=())
            if flight.left or not flight.reported:
                flights.append(flight)
        state.flights = flights
