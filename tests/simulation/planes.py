"""Data planes that move a unit at a time, are stopped, fail, or fail while bytes are still on their way."""

from dataclasses import dataclass

from pdpool_connector.protocol.events import Read, Write

from tests.simulation.memory import Half, ViolationError, unpack
from tests.simulation.processes import Process

Unit = tuple[str, int, int, int]
"""Pool ("pages", "aux" or "state"), prefill's unit, decode's unit, and which of the request's it is."""


@dataclass(eq=False, slots=True)
class Flight:
    """One transfer under way. `mover` makes it, for its `half`; `prefill` and `decode` are whose memory it touches.

    `reported`: the mover has been told of its end, and bytes may land all the same. `severed`: the process that it
    reads from is proved dead, so what has not landed never will. `astray`: what it read from pages given back.
    """

    name: str
    mover: Process
    prefill: Process
    decode: Process
    half: Half
    move: Write | Read
    left: list[Unit]
    stopped: bool = False
    reported: bool = False
    severed: bool = False
    moved: int = 0
    astray: str = ""

    @property
    def peer(self) -> Process:
        """Whose memory is moved to or from, seen from the mover."""
        return self.decode if self.mover is self.prefill else self.prefill

    def land(self) -> None:
        """One more unit arrives, whether or not anybody still wants it."""
        pool, source, target, index = self.left.pop(0)
        if self.mover is self.prefill:
            value: tuple[str, int] | None = (self.half.request, index)
            if self.mover.alive:
                getattr(self.mover, pool).read(source, self.half)
        else:
            # A reader gets what is in the page now, whoever has it by then.
            value = found(self.prefill, pool, source)
            if value != (self.half.request, index):
                self.astray = f"{pool} unit {source}, which holds {value}"
        if self.decode.alive:
            number = self.move.attempt.number
            getattr(self.decode, pool).put(target, self.prefill.rank, value, number)
        self.moved += 1


def found(process: Process, pool: str, unit: int) -> tuple[str, int] | None:
    """What a unit of prefill's holds: of which request, and which of its units; None where nothing was computed."""
    owner = getattr(process, pool).owner[unit]
    if owner is None:
        return None
    index = getattr(owner, pool).index(unit)
    computed = owner.closed if pool != "pages" else index < owner.sent
    return (owner.request, index) if computed else None


def units_of_write(write: Write, half: Half) -> list[Unit]:
    """What a write moves, in order; the aux row comes last, as it does in the connector."""
    units = pairs("pages", unpack(write.source), unpack(write.target), half.pages)
    units += pairs("state", unpack(write.state[0]), unpack(write.state[1]), half.state)
    if write.aux is not None:
        units += pairs("aux", [write.aux[0]], [write.aux[1]], half.aux)
    return units


def units_of_read(read: Read, half: Half) -> list[Unit]:
    """The same for a read: here it is the units that are read into which must be the half's."""
    units = pairs("pages", unpack(read.target), unpack(read.source), half.pages)
    units += pairs("state", unpack(read.state[1]), unpack(read.state[0]), half.state)
    if read.aux is not None:
        units += pairs("aux", [read.aux[1]], [read.aux[0]], half.aux)
    return [(pool, there, here, at + half.prefix if pool == "pages" else at) for pool, here, there, at in units]


def pairs(pool: str, here: list[int], there: list[int], owned: list[int]) -> list[Unit]:
    """Units of one pool. Raises ViolationError when the two sides do not match, or the mover's are not the half's."""
    if len(here) != len(there) or not set(here) <= set(owned):
        raise ViolationError(f"{pool} {here} are moved against {there}, but the half has {owned}")
    return [(pool, unit, at, owned.index(unit)) for unit, at in zip(here, there, strict=True)]
