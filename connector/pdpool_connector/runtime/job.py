"""One write of pages on its way: the chunks that are still to be submitted, and what became of the others."""

from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pdpool_connector.layout.checksum import MASK
from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.pool import Ids
from pdpool_connector.protocol.events import Write, WriteEnded, WriteResult


@dataclass(slots=True, eq=False)
class Job:
    """A write, and how far it has come."""

    write: Write
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
    """Its end is reported, or about to be."""
    bytes_moved: int = 0
    checksum: int | None = None
    """Of the pages written so far, where they are sampled."""
    result: WriteResult = WriteResult.LANDED
    message: str = ""

    def fail(self, result: WriteResult, message: str) -> None:
        """Submit no more. An unsettled chunk outweighs every other outcome, and otherwise the first one counts."""
        self.chunks.clear()
        if self.result is WriteResult.LANDED or result is WriteResult.UNSETTLED:
            self.result, self.message = result, message

    def end(self) -> WriteEnded:
        """What the machine is given when nothing is in flight any more."""
        checksum = self.checksum & MASK if self.checksum is not None else None
        return ended(self.write, self.result, self.bytes_moved, self.message, checksum)


def without_pages(write: Write) -> Write:
    """The same write for a rank that gets no pages of ours."""
    return msgspec.structs.replace(write, source=b"", target=b"")


def ended(
    write: Write, result: WriteResult, bytes_moved: int = 0, message: str = "", checksum: int | None = None
) -> WriteEnded:
    """The event that ends a write."""
    return WriteEnded(write.attempt, write.write, result, bytes_moved, message, checksum)


_WIRE = np.dtype("<i4")


def as_ids(packed: bytes) -> Ids:
    """Ids of pages or of state items, unpacked without a copy."""
    return np.frombuffer(packed, _WIRE).astype(np.int32, copy=False)
