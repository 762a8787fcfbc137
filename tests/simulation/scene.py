"""Where a small world stands: plain data that is cheap to copy and to compare."""

from dataclasses import dataclass, field
from typing import NamedTuple

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.status import Cause, Phase

from tests.simulation.kinds import Direction


class Scenario(NamedTuple):
    """`pages` of each request, sent one by one, in one room. `memory`: pages of each rank. The rest are budgets.

    `announced`: decode may say that it has a request before it opens it. `timely`: no time passes until faults stop,
    and then no request of decode's may come to its deadline: whatever ended it is to be told. `prefill`, `decode`: how
    many ranks there are; every one of the one side serves every one of the other. `least_depth`: so many steps are
    searched however slow the machine, or `make simulate` fails.
    """

    name: str
    pages: tuple[int, ...]
    memory: int
    aborts: int = 0
    breaks: int = 0
    crashes: int = 0
    errors: int = 0
    prefill: int = 1
    decode: int = 1
    direction: Direction = "write"
    announced: bool = False
    timely: bool = False
    least_depth: int = 0

    @property
    def ranks(self) -> int:
        """Of both sides; prefill's have the lower numbers."""
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.direction.upper()} {self.prefill}x{self.decode}, {self.name}"


class Flight(NamedTuple):
    """One transfer: `request` is whose memory the mover uses, `lives` those of its two processes.

    `prefill` and `decode` are ranks. `left`: units that have not landed, as prefill's page, decode's page, and which
    of the request's pages it is. `severed`: what has not landed never will.
    """

    attempt: f.AttemptId
    number: int
    prefill: int
    decode: int
    lives: tuple[int, int]
    request: int
    left: tuple[tuple[int, int, int], ...]
    stopped: bool = False
    reported: bool = False
    severed: bool = False
    moved: int = 0
    astray: bool = False


class Half(NamedTuple):
    """One side of a request, as the engine of one rank sees it."""

    phase: Phase | None = None
    cause: Cause | None = None
    releasable: bool = False
    pages: tuple[int, ...] = ()
    sent: int = 0
    announced: bool = False

    @property
    def ended(self) -> bool:
        """Its engine was told that it is over."""
        return self.phase in (Phase.DONE, Phase.FAILED)


Landed = tuple[int, int] | None
"""Request and page; None is garbage."""


@dataclass(slots=True)
class State:
    """Where the world stands. `key` is all of it; `budget` counts what may still go wrong.

    By rank: `machines`, `lives`, `halves`, `owner` of each page. `up`: by prefill rank and decode rank, whether each of
    them holds the other for paired. `wants`: by decode rank. `content`: by decode rank and page, what each prefill rank
    has put there, or what was read from it.
    """

    machines: list[int]
    lives: list[int]
    up: list[tuple[bool, bool]]
    wants: list[bool]
    halves: list[list[Half]]
    owner: list[list[int]]
    content: list[list[tuple[Landed, ...]]]
    flights: list[Flight]
    unsettled: frozenset[tuple[int, int]]
    fenced: frozenset[tuple[int, int]]
    soup: frozenset[int]
    budget: tuple[int, int, int, int]
    mail: list[int] = field(default_factory=list)

    def copy(self) -> "State":
        """A state that can be changed without this one."""
        return State(
            self.machines[:],
            self.lives[:],
            self.up[:],
            self.wants[:],
            [rank[:] for rank in self.halves],
            [rank[:] for rank in self.owner],
            [rank[:] for rank in self.content],
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
            *self.up,
            *self.wants,
            *(tuple(rank) for rank in self.halves),
            *(tuple(rank) for rank in self.owner),
            *(tuple(rank) for rank in self.content),
            tuple(self.flights),
            self.unsettled,
            self.fenced,
            self.soup,
            self.budget,
            tuple(self.mail),
        )
