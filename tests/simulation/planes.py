"""Data planes that land a unit at a time, are stopped, fail, or fail while bytes are still on their way."""

from dataclasses import dataclass

from pdpool_connector.protocol.events import Write

from tests.simulation.memory import Half, ViolationError, unpack
from tests.simulation.processes import Process

Unit = tuple[str, int, int, int]
"""Pool ("pages", "aux" or "state"), source unit, target unit, and which of the request's it is."""


@dataclass(eq=False, slots=True)
class Flight:
    """One write under way. `reported`: the writer has been told of its end, and bytes may land all the same."""

    name: str
    writer: Process
    target: Process
    source: Half
    write: Write
    left: list[Unit]
    stopped: bool = False
    reported: bool = False
    moved: int = 0

    def land(self) -> None:
        """One more unit arrives, whether or not anybody still wants it."""
        pool, source, target, index = self.left.pop(0)
        if self.writer.alive:
            getattr(self.writer, pool).read(source, self.source)
        if self.target.alive:
            value = (self.source.request, index)
            getattr(self.target, pool).put(target, self.writer.rank, value, self.write.attempt.number)
        self.moved += 1


def units_of(write: Write, source: Half) -> list[Unit]:
    """What a write moves, in order; the aux row comes last, as it does in the connector."""
    units = pairs("pages", unpack(write.source), unpack(write.target), source.pages)
    units += pairs("state", unpack(write.state[0]), unpack(write.state[1]), source.state)
    if write.aux is not None:
        units += pairs("aux", [write.aux[0]], [write.aux[1]], source.aux)
    return units


def pairs(pool: str, here: list[int], there: list[int], owned: list[int]) -> list[Unit]:
    """Units of one pool. Raises ViolationError when the two sides do not match, or what is read is not the half's."""
    if len(here) != len(there) or not set(here) <= set(owned):
        raise ViolationError(f"a write takes {pool} {here} to {there}, but its half has {owned}")
    return [(pool, unit, at, owned.index(unit)) for unit, at in zip(here, there, strict=True)]
