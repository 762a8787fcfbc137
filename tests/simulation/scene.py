"""Where a small world stands: plain data that is cheap to copy and to compare."""

from dataclasses import dataclass, field
from typing import NamedTuple

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.outcome import Cause, Phase


class Scenario(NamedTuple):
    """`pages` of each request, sent one by one, in one room. `memory`: pages on each side. The rest are budgets."""

    name: str
    pages: tuple[int, ...]
    memory: int
    aborts: int = 1
    breaks: int = 0
    crashes: int = 0
    errors: int = 0


class Flight(NamedTuple):
    """One write: `source` is the request whose pages it reads, `lives` those of its writer and its target."""

    attempt: f.AttemptId
    write: int
    source: int
    lives: tuple[int, int]
    left: tuple[tuple[int, int], ...]
    stopped: bool = False
    reported: bool = False
    moved: int = 0


class Half(NamedTuple):
    """One side of a request, as its engine sees it."""

    phase: Phase | None = None
    cause: Cause | None = None
    releasable: bool = False
    pages: tuple[int, ...] = ()
    sent: int = 0

    @property
    def ended(self) -> bool:
        """Its engine was told that it is over."""
        return self.phase in (Phase.DONE, Phase.FAILED)


@dataclass(slots=True)
class State:
    """Where the world stands. `key` is all of it; budgets count what may still go wrong."""

    machines: list[int]
    lives: list[int]
    paired: list[bool]
    wants: bool
    halves: list[list[Half]]
    owner: list[list[int]]
    content: list[tuple[int, int] | None]
    flights: list[Flight]
    unsettled: bool
    fenced: frozenset[tuple[int, int]]
    soup: frozenset[int]
    budget: tuple[int, int, int, int]
    mail: list[int] = field(default_factory=list)

    def copy(self) -> "State":
        """A state that can be changed without this one."""
        return State(
            self.machines[:],
            self.lives[:],
            self.paired[:],
            self.wants,
            [side[:] for side in self.halves],
            [side[:] for side in self.owner],
            self.content[:],
            self.flights[:],
            self.unsettled,
            self.fenced,
            self.soup,
            self.budget,
            self.mail[:],
        )

    def key(self) -> tuple[object, ...]:
        """Equal for equal states."""
        return (
            *self.machines,
            *self.lives,
            *self.paired,
            self.wants,
            *(tuple(side) for side in self.halves),
            *(tuple(side) for side in self.owner),
            tuple(self.content),
            tuple(self.flights),
            self.unsettled,
            self.fenced,
            self.soup,
            self.budget,
            tuple(self.mail),
        )
