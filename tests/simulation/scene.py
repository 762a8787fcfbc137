"""Where a small world is: plain data that is cheap to copy and to compare."""

from dataclasses import dataclass, field
from typing import NamedTuple

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.status import Cause, Phase


class Scenario(NamedTuple):
    """`pages` of each request, sent one by one, all requests in one room. `memory`: pages of each rank.

    `aborts`, `breaks`, `crashes`, `errors`: budgets. `prefill`, `decode`: ranks; every rank of one side serves every
    rank of the other. `same`: all requests have the same prompt (n > 1). `named`: both halves have the same request id.
    `timely`: no time passes until faults stop, and then no request of decode may reach its deadline: prefill must send
    it the cause of its end. A drain may take the place of an abort. `least_depth`: so many steps are searched, or
    `make simulate` fails.
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
    same: bool = False
    named: bool = False
    timely: bool = False
    least_depth: int = 0

    @property
    def ranks(self) -> int:
        """Of both sides; prefill's have the lower numbers."""
        return self.prefill + self.decode

    def prompt(self, request: int) -> int:
        """Which prompt a request has; it stands for the content of its pages."""
        return 0 if self.same else request

    def __str__(self) -> str:
        return f"{self.prefill}x{self.decode}, {self.name}"


class Flight(NamedTuple):
    """One write: `request` is the prefill half whose pages it reads, `lives` are those of its two processes.

    `prefill` and `decode` are ranks. `left`: pages that have not landed, as prefill's page, decode's page, and which of
    the request's pages it is. `reported`: the writer has its result, and bytes are still on their way.
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
    moved: int = 0

    @property
    def ends(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rank and life of prefill and of decode."""
        return (self.prefill, self.lives[0]), (self.decode, self.lives[1])


class Half(NamedTuple):
    """One side of a request, as the engine of one rank sees it.

    `offered`: the engine of decode has given it memory. `exposed`: that memory was sent to a peer.
    """

    phase: Phase | None = None
    cause: Cause | None = None
    releasable: bool = False
    pages: tuple[int, ...] = ()
    sent: int = 0
    offered: bool = False
    exposed: bool = False

    @property
    def ended(self) -> bool:
        """Its engine knows that it is over."""
        return self.phase in (Phase.DONE, Phase.FAILED)


Landed = tuple[int, int] | None
"""Prompt and page; None is garbage."""


@dataclass(slots=True)
class State:
    """Where the world is. `key` is all of it; `budget` counts what may still go wrong.

    By rank: `machines`, `lives`, `halves`, `owner` of each page. `up`: by link, whether prefill and whether decode
    holds the other for paired. `wants`: by decode rank. `content`: by decode rank and page, what each prefill rank has
    written there. `soup`: frames that may be delivered at any time; `mail`: those that were sent last, in order.
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
