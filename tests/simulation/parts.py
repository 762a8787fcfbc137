"""What a random world consists of: processes with their memory, halves of requests, frames and writes under way."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from pdpool_connector.protocol.events import Write
from pdpool_connector.protocol.frames import AttemptFrame
from pdpool_connector.protocol.status import Phase, TransferStatus

UNITS = {"pages": 8, "aux": 4, "window": 5, "mamba": 4}
"""Units of memory of each process: pages, aux rows, and items of two state pools."""
STATE_POOLS = ("window", "mamba")

Units = dict[str, list[int]]
Unit = tuple[str, int, int, int]
"""One unit of a write: pool, unit of prefill, unit of decode, and which one of the request's it is."""


class Ask(NamedTuple):
    """One request as the router sends it to both sides. `prompt` stands for its content and decides its size.

    `knows`: sides that know the prompt. `named`: both sides have the same request id.
    """

    tag: int
    prefill: str
    decode: str
    room: int
    prompt: int
    prefix: int
    knows: str = "pd"
    named: bool = False

    @property
    def size(self) -> dict[str, int]:
        """Units that a half at prefill needs."""
        return {"pages": self.prompt % 4, "aux": 1, "window": self.prompt % 3, "mamba": self.prompt % 2}

    def __str__(self) -> str:
        return f"r{self.tag}"

    def digest(self, side: str) -> bytes:
        """The prompt as the engine of one side gives it to the connector."""
        return f"p{self.prompt}".encode() if side in self.knows else b""

    def request_id(self, side: str) -> str:
        """The request id on one side; the router gives one to both, or each side makes its own."""
        return f"r{self.tag}" if self.named else f"{side}-{self.tag}"


@dataclass(eq=False, slots=True)
class Half:
    """One side of one request, as the engine of one rank sees it.

    `units` hold logical pages `prefix` onward. `exposed`: they were sent to a peer (decode), or a write has read them
    (prefill). `sent`: pages given to the machine. `closed`: nothing more is sent.
    """

    ask: Ask
    handle: int
    opened: float
    units: Units = field(default_factory=dict)
    offered: bool = False
    exposed: bool = False
    sent: int = 0
    closed: bool = False
    aborted: bool = False
    over: float = 0.0
    statuses: list[TransferStatus] = field(default_factory=list)

    @property
    def status(self) -> TransferStatus:
        """What its engine knows."""
        return self.statuses[-1] if self.statuses else TransferStatus(Phase.WAITING)

    def __str__(self) -> str:
        shown = [f"{s.phase}{f'({s.cause})' if s.cause else ''}{'!' * s.releasable}" for s in self.statuses]
        return f"r{self.ask.tag} in room {self.ask.room} ({', '.join(shown)})"


@dataclass(eq=False, slots=True)
class Process:
    """`slot` is the place (instance and rank), `incarnation` the life in it; a crash ends the life, not the place.

    `scale`: memory, in multiples of UNITS. `content`: by pool, unit and rank of the writer, the prompt and index that
    was written.
    """

    slot: str
    incarnation: str
    machine: Any
    scale: int = 1
    alive: bool = True
    frozen: bool = False
    fenced: bool = False
    halves: dict[int, Half] = field(default_factory=dict)
    owner: dict[tuple[str, int], Half] = field(default_factory=dict)
    content: dict[tuple[str, int, int], tuple[int, int]] = field(default_factory=dict)
    wants: set[str] = field(default_factory=set)
    handles: Iterator[int] = field(default_factory=lambda: count(1))

    def __str__(self) -> str:
        return self.slot

    @property
    def side(self) -> str:
        """'p' or 'd'."""
        return self.slot[0]

    @property
    def instance(self) -> str:
        """The instance that it is a rank of; for prefill, its bootstrap address."""
        return self.slot.split(".")[0]

    @property
    def rank(self) -> int:
        """Its index within the instance."""
        return int(self.slot.split(".")[1])

    def free(self, pool: str) -> list[int]:
        """Units that no half has."""
        return [unit for unit in range(UNITS[pool] * self.scale) if (pool, unit) not in self.owner]

    def has(self, size: dict[str, int]) -> bool:
        """Whether there is memory for a half."""
        return all(len(self.free(pool)) >= count for pool, count in size.items())

    def take(self, half: Half, size: dict[str, int]) -> None:
        """Give memory to a half."""
        half.units = {pool: self.free(pool)[:count] for pool, count in size.items()}
        self.owner |= {(pool, unit): half for pool, units in half.units.items() for unit in units}

    def give_back(self, half: Half) -> None:
        """The engine has the memory of a half again, and may give it to the next."""
        self.owner = {unit: owner for unit, owner in self.owner.items() if owner is not half}


class Letter(NamedTuple):
    """A frame on its way to the process `target`."""

    source: str
    target: Process
    frame: AttemptFrame

    def __str__(self) -> str:
        return f"{self.source}>{self.target.slot} {type(self.frame).__name__} {self.frame.attempt.number}"


@dataclass(eq=False, slots=True)
class Flight:
    """A write under way. `half`: whose memory it reads. `left`: units that have not landed yet.

    `reported`: the writer has its result; bytes may still be on their way.
    """

    write: Write
    source: Process
    target: Process
    half: Half
    left: list[Unit]
    moved: int = 0
    stopped: bool = False
    reported: bool = False

    def __str__(self) -> str:
        return f"{self.source.slot}>{self.target.slot} r{self.half.ask.tag} write {self.write.write}"
