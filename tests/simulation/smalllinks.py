"""How the ranks of a small world connect, lose each other, and are proved dead."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import Event, Fenced, Linked, PeerLost, PeerReady, Unreachable, Writer
from pdpool_connector.protocol.status import Cause

from tests.simulation.common import Machines, require
from tests.simulation.numbered import Numbered, name
from tests.simulation.scene import Scenario, State

Action = tuple[str, Callable[[State], None]]


class SmallLinks(ABC):
    """Ranks by number, prefill's first. A link is a pair of a prefill rank and a decode rank, by number as well."""

    frames: list[tuple[int, int, f.AttemptFrame]]

    def __init__(self, scenario: Scenario, classes: Machines) -> None:
        self.scenario = scenario
        self.machines = Numbered(classes)
        self.prefills = range(scenario.prefill)
        self.decodes = range(scenario.prefill, scenario.ranks)
        self.links = [(prefill, decode) for prefill in self.prefills for decode in self.decodes]

    @abstractmethod
    def do(self, state: State, rank: int, event: Event, after: float = 0.0) -> None:
        """Give an event to a machine, and carry out its effects."""

    @abstractmethod
    def sever(self, state: State, rank: int, life: int) -> None:
        """A dead process writes no more, and nothing is written to it."""

    def label(self, rank: int) -> str:
        """Short name of a rank."""
        return f"p{rank}" if rank in self.prefills else f"d{rank - self.scenario.prefill}"

    def links_of(self, rank: int) -> list[int]:
        """Numbers of the links of a rank."""
        return [number for number, link in enumerate(self.links) if rank in link]

    def dead(self, state: State) -> list[tuple[int, int]]:
        """Ranks and lives that are over."""
        return [(rank, life) for rank in range(self.scenario.ranks) for life in range(state.lives[rank])]

    # --- What can happen ---

    def _pairing(self, state: State, *, again: bool) -> Iterator[Action]:
        """`again`: hellos are repeated, though they were answered."""
        for decode in self.decodes:
            if self._wanted(state, decode):
                answered = [self._answered(state, link) for link in self.links_of(decode)]
                for link, there in zip(self.links_of(decode), answered, strict=True):
                    if again or not there:
                        yield f"greet {self._named(link)}", partial(self._greet, link=link)
                if all(answered):
                    yield f"link {self.label(decode)}", partial(self._link, decode=decode)
        for link in range(len(self.links)):
            for at_prefill in (True, False):
                if state.up[link][not at_prefill] and self.changed(state, link, at_prefill=at_prefill):
                    what = f"lost {self._named(link)} at {'p' if at_prefill else 'd'}"
                    yield what, partial(self.lose, link=link, at_prefill=at_prefill)

    def _breaks(self, state: State) -> Iterator[Action]:
        for link in range(len(self.links)):
            for at_prefill in (True, False):
                if state.up[link][not at_prefill] and not self.changed(state, link, at_prefill=at_prefill):
                    what = f"break {self._named(link)} at {'p' if at_prefill else 'd'}"
                    yield what, partial(self._break, link=link, at_prefill=at_prefill)
        for decode in self.decodes:
            if state.wants[decode - self.scenario.prefill] and not self._linked(state, decode):
                yield f"refuse {self.label(decode)}", partial(self._refuse, decode=decode)

    def _named(self, link: int) -> str:
        prefill, decode = self.links[link]
        return f"{self.label(decode)}-{self.label(prefill)}"

    # --- What it does ---

    def _linked(self, state: State, decode: int) -> bool:
        return all(state.up[link][1] for link in self.links_of(decode))

    def _answered(self, state: State, link: int) -> bool:
        return state.up[link][0] and not self.changed(state, link, at_prefill=True)

    def _wanted(self, state: State, decode: int) -> bool:
        machine = self.machines.get(state.machines[decode])
        wants = state.wants[decode - self.scenario.prefill] or machine.holds_for("p")
        return wants and not self._linked(state, decode)

    def known(self, state: State, link: int, *, at_prefill: bool) -> list[str]:
        """Lives of the link's other end that this end holds for paired."""
        here, there = self.links[link] if at_prefill else self.links[link][::-1]
        stem = name(there, 0)[:16]
        return [peer for peer in self.machines.get(state.machines[here])._versions if peer.startswith(stem)]

    def changed(self, state: State, link: int, *, at_prefill: bool) -> bool:
        """The process with which it is paired no longer exists."""
        there = self.links[link][at_prefill]
        return name(there, state.lives[there]) not in self.known(state, link, at_prefill=at_prefill)

    def _greet(self, state: State, link: int) -> None:
        prefill, decode = self.links[link]
        if state.up[link][0] and self.changed(state, link, at_prefill=True):
            self.lose(state, link, at_prefill=True)
        state.up[link] = (True, state.up[link][1])
        before = state.halves[prefill][:]
        self.do(state, prefill, PeerReady(name(decode, state.lives[decode]), f.VERSION_MAX))
        require(state.halves[prefill] == before, f"a greeting of {self.label(decode)} changed a hand-off")

    def _link(self, state: State, decode: int) -> None:
        """Decode is paired with all ranks; the processes that were at their addresses before are lost."""
        links = self.links_of(decode)
        writers = [name(self.links[link][0], state.lives[self.links[link][0]]) for link in links]
        for link in links:
            if state.up[link][1] and self.changed(state, link, at_prefill=False):
                self.lose(state, link, at_prefill=False)
            state.up[link] = (state.up[link][0], True)
        state.wants[decode - self.scenario.prefill] = False
        for writer in writers:
            self.do(state, decode, PeerReady(writer, f.VERSION_MAX))
        index, count = decode - self.scenario.prefill, self.scenario.decode
        last = writers[-1]
        self.do(state, decode, Linked("p", tuple(Writer(one, index, count, one == last) for one in writers)))

    def lose(self, state: State, link: int, *, at_prefill: bool) -> None:
        """One side learns that its connection to the peer it knew has ended."""
        here = self.links[link][not at_prefill]
        at = state.up[link]
        state.up[link] = (False, at[1]) if at_prefill else (at[0], False)
        for peer in self.known(state, link, at_prefill=at_prefill):
            self.do(state, here, PeerLost(peer, "explored"))
            if at_prefill:
                # Prefill has one connection to a peer: frames that were sent on it arrive no more.
                state.soup = frozenset(
                    n for n in state.soup if (self.frames[n][0], self.frames[n][2].sender) != (here, peer)
                )

    def _break(self, state: State, link: int, *, at_prefill: bool) -> None:
        state.budget = (state.budget[0], state.budget[1] - 1, *state.budget[2:])
        self.lose(state, link, at_prefill=at_prefill)

    def _refuse(self, state: State, decode: int) -> None:
        state.budget = (state.budget[0], state.budget[1] - 1, *state.budget[2:])
        state.wants[decode - self.scenario.prefill] = False
        self.do(state, decode, Unreachable("p", Cause.PEER_LOST, "explored"))

    def _fence(self, state: State, rank: int, life: int) -> None:
        """Its bytes have stopped; then all ranks of the other side get the proof."""
        state.fenced |= {(rank, life)}
        self.sever(state, rank, life)
        for other in self.decodes if rank in self.prefills else self.prefills:
            self.do(state, other, Fenced(name(rank, life), "explored"))
