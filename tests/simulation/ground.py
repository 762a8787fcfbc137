"""What a world consists of: processes, the network, transfers under way, and the requests that engines were asked for.

The other modules say what each of it does: `hosts`, `wires`, `links`, `transfers`, `engines`. `World` is all of them.
"""

from abc import ABC, abstractmethod
from collections import Counter
from typing import NamedTuple

from pdpool_connector.protocol.events import Event, Writer
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.timeouts import Timeouts

from tests.simulation.kinds import Direction, Machines
from tests.simulation.memory import Half, ViolationError
from tests.simulation.network import Network
from tests.simulation.planes import Flight
from tests.simulation.processes import Process

TIMING = Timeouts(
    meet_s=6.0,
    drain_s=3.0,
    retry_first_s=0.2,
    retry_max_s=1.0,
    query_s=1.0,
    expect_s=1.0,
    verdict_s=30.0,
    acked_s=8.0,
    max_attempts=64,
    max_tombstones=14,
)


class Ask(NamedTuple):
    """One request as the router sends it to both sides. No two have the same prompt, for which `request` stands."""

    tag: int
    prefill: str
    decode: str
    room: int
    sibling: int
    pages: int
    prefix: int
    state: int
    request: str

    @property
    def place(self) -> tuple[str, int, int]:
        """Where its halves meet."""
        return self.prefill, self.room, self.sibling

    def rid(self, role: str) -> str:
        """The request's id; the router gives every other request one, and otherwise each side makes its own."""
        return self.request if int(self.request[1:]) % 2 else f"{role} {self.request}"


class Ground(ABC):
    """Everything that a step may change. `shape` maps each instance ("p0", "d1") to its number of ranks.

    `prompts`: engines tell the prompts of their requests; otherwise a room is all that halves have in common.
    """

    def __init__(self, shape: dict[str, int], machines: Machines, direction: Direction, prompts: bool) -> None:
        self.shape = shape
        self.machines = machines
        self.direction = direction
        self.prompts = prompts
        self.now = 0.0
        self.processes: dict[str, Process] = {}
        self.lives: Counter[str] = Counter()
        self.everyone: dict[str, Process] = {}
        self.network = Network()
        self.flights: list[Flight] = []
        self.unsettled: list[tuple[Process, Process]] = []
        """Who moves and who is moved to or from, where a transfer ended without anybody knowing whether it has."""
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
        self.announced: dict[tuple[str, str, int], float] = {}
        """Until when a prefill knows that a decode has a request and has not opened it."""
        self.done = 0
        self.happened: Counter[str] = Counter()

    @abstractmethod
    def do(self, process: Process, event: Event) -> list[Half]:
        """Have the machine take an event in, and do what it says; returns the halves that heard of it."""

    def runs(self, slot: str) -> bool:
        """Whether the process there is not stopped."""
        return not self.processes[slot].frozen

    def served(self, prefill: str, rank: int, decode: str) -> list[int]:
        """Ranks of instance `decode` that rank `rank` of `prefill` serves: those whose share of the model meets its."""
        mine, theirs = self.shape[prefill], self.shape[decode]
        return [
            other
            for other in range(theirs)
            if rank * theirs < (other + 1) * mine and other * mine < (rank + 1) * theirs
        ]

    def serving(self, process: Process, prefill: str) -> list[Process]:
        """The ranks of `prefill` whose pages come to this decode rank; of the last of them the aux row does."""
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


def check(holds: bool, what: str) -> None:
    """Raise ViolationError, which says what was broken, unless it holds."""
    if not holds:
        raise ViolationError(what)
