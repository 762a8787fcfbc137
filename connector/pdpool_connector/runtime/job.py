"""One move of pages on its way: the chunks that are still to be submitted, and what became of the others.

A move goes either way: what is `Write` to prefill's connector is `Read` to decode's.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pdpool_connector.backends.base import Op
from pdpool_connector.layout.checksum import MASK
from pdpool_connector.layout.plan import Chunk
from pdpool_connector.layout.pool import Ids
from pdpool_connector.protocol.events import Read, ReadEnded, Write, WriteEnded, WriteResult

Move = Write | Read
Ended = WriteEnded | ReadEnded
OutcomeLog = tuple[Ids, Ids, tuple[int, int] | None, tuple[Ids, Ids] | None]


@dataclass(slots=True, eq=False)
class Job:
    """A move, and how far it has come."""

    move: Move
    stopped: bool = False
    prepared: bool = False
    chunks: deque[Chunk] = field(default_factory=deque)
    gather: bool = False
    """The chunks of pages are cut to be gathered."""
    size: tuple[int, int] | None = None
    """Bytes and pieces of its one chunk, where that may travel together with those of others."""
    tried_again: bool = False
    """It has asked for a new connection to the peer."""
    in_flight: int = 0
    ahead: int = 0
    """Chunks under way that it has begun while no other job waited: turns that it has had before those that come."""
    over: bool = False
    """Its end is told, or about to be."""
    bytes_moved: int = 0
    checksum: int | None = None
    """Of the pages written from, or read into, so far, where they are sampled."""
    result: WriteResult = WriteResult.LANDED
    message: str = ""

    @property
    def op(self) -> Op:
        """Which way it goes."""
        return Op.WRITE if isinstance(self.move, Write) else Op.READ

    def fail(self, result: WriteResult, message: str) -> None:
        """Submit no more. An unsettled chunk outweighs every other outcome, and otherwise the first one counts."""
        self.chunks.clear()
        if self.result is WriteResult.LANDED or result is WriteResult.UNSETTLED:
            self.result, self.message = result, message

    def end(self) -> Ended:
        """What the machine is told when nothing is in flight any more; a READ's checksum is compared first."""
        checksum = self.checksum & MASK if self.checksum is not None else None
        told = self.move.checksum if isinstance(self.move, Read) else None
        if checksum is not None and told is not None and checksum != told:
            what = f"the checksum of its pages is {checksum:016x} here and {told:016x} at prefill"
            self.fail(WriteResult.CORRUPT, what)
        return ended(self.move, self.result, self.bytes_moved, self.message, checksum)


def number_of(move: Move | Ended) -> int:
    """The number by which the machine knows a move."""
    return move.write if isinstance(move, Write | WriteEnded) else move.read


def without_pages(move: Move, *, state: bool) -> Move:
    """The same move for a rank with which aux rows are exchanged and, where `state`, its share of state."""
    if isinstance(move, Read):
        move = msgspec.structs.replace(move, checksum=None)
    return msgspec.structs.replace(move, source=b"", target=b"", state=move.state if state else (b"", b""))


def ended(
    move: Move, result: WriteResult, bytes_moved: int = 0, message: str = "", checksum: int | None = None
) -> Ended:
    """What the machine is told of the end of a move."""
    if isinstance(move, Write):
        return WriteEnded(move.attempt, move.write, result, bytes_moved, message, checksum)
    return ReadEnded(move.attempt, move.read, result, bytes_moved, message)


def ends_of(move: Move) -> OutcomeLog:
    """Our end of a move and the peer's: pages, aux rows, state items. The machine names source and target."""
    ours, theirs, aux, state = _ids(move.source), _ids(move.target), move.aux, move.state
    items = (_ids(state[0]), _ids(state[1])) if state[0] or state[1] else None
    if isinstance(move, Write):
        return ours, theirs, aux, items
    return theirs, ours, aux[::-1] if aux is not None else None, items[::-1] if items is not None else None


_WIRE = np.dtype("<i4")


def _ids(packed: bytes) -> Ids:
    return np.frombuffer(packed, _WIRE).astype(np.int32, copy=False)
