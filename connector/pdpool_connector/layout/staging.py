"""Memory of ours through which scattered strips go out as whole pages.

Where decode's tensor parallelism is larger than prefill's, a page of the target is a strip of each token here: as many
descriptors as tokens. Gathered first, it is one. The CPU gathers, so the cache must lie in host memory.
"""

from __future__ import annotations

import mmap
import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .regions import Region

SLOT_BYTES: Final = 4 << 20
"""Bytes that are gathered and sent at a time."""


class Reservation:
    """One slot, until `release`, which may be called from any thread and as often as you like."""

    def __init__(self, staging: Staging, slot: int) -> None:
        self._staging, self._slot = staging, slot
        self.bytes: NDArray[np.uint8] = staging.bytes[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
        self.address: int = self.bytes.ctypes.data

    def release(self) -> None:
        """Give the slot back."""
        self._staging.take_back(self, self._slot)


class Staging:
    """`slots` slots of `SLOT_BYTES` bytes. Thread-safe.

    A slot belongs to one chunk. It is reserved until the chunk has settled, because bytes may be read from it until
    then. The kernel backs the memory when it is used. Raises ValueError for fewer slots than one.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}, must be at least 1")
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, slots * SLOT_BYTES), np.uint8)
        self._free = list(range(slots - 1, -1, -1))
        self._owners: dict[int, Reservation] = {}
        self._lock = threading.Lock()

    @property
    def region(self) -> Region:
        """The memory, to be registered with a transfer backend."""
        return Region(self.bytes.ctypes.data, SLOT_BYTES, len(self.bytes) // SLOT_BYTES)

    @property
    def reserved(self) -> int:
        """How many slots are not free."""
        return len(self._owners)

    def reserve(self) -> Reservation | None:
        """A slot, or None when all are taken."""
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
            self._owners[slot] = reservation = Reservation(self, slot)
            return reservation

    def take_back(self, reservation: Reservation, slot: int) -> None:
        """Free the slot if the reservation is still its owner."""
        with self._lock:
            if self._owners.get(slot) is reservation:
                del self._owners[slot]
                self._free.append(slot)
