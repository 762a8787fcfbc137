"""Checksums of pages that two memories agree on, whichever ids the pages have here and however they were cut.

The sum over a set of pages is that of one hash for each page of each region, seeded with the region's place in the
model (layer, K or V) and with the page's id at the target. It therefore does not depend on the order in which pages
move, and the sums of several writers (ranks that hold different layers) add up to that of the whole. xxh3: it runs at
the speed of memory, three times that of zlib's CRC-32, and a seed costs nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final

import xxhash

from .memory import KVMemory, Region
from .overlap import overlap, same_heads
from .plan import Chunk

MASK: Final = (1 << 63) - 1
"""A sum is taken modulo 2**63, so that it fits the protocol's `Count`."""
YIELD_BYTES: Final = 1 << 20
"""After as much (0.1 ms), or as many pages as cost that, other threads get a turn: hashing is a loop in Python."""
CALL_BYTES: Final = 4096
"""What one call costs beside its bytes, in bytes."""
_SPREAD: Final = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: multiplication by it spreads consecutive numbers evenly (Knuth)."""


def sampled(number: int, rate: float) -> bool:
    """Whether the attempt with this number is among the share `rate` that is checked; the same on every rank."""
    return (number * _SPREAD & 0xFFFFFFFFFFFFFFFF) < rate * 2**64


class PageSums:
    """Sums over pages of one memory, which must be mapped in this process and stay so."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._view = lru_cache(maxsize=None)(_view)

    def whole(self, pages: Iterable[int]) -> int:
        """Sum over all that is held of these pages, which are known by their own ids."""
        memory = self._memory
        layers = range(memory.first_layer, memory.first_layer + memory.layers)
        cells = [(layer, part) for layer in layers for part in range(memory.regions_per_layer)]
        ids = list(pages)
        return self._sum(cells, ids, ids)

    def of_chunk(self, remote: KVMemory) -> Callable[[Chunk], int] | None:
        """What gives the sum over a chunk's pages here, known by their ids there; None where pages are cut by heads.

        A memory that has nothing in common with ours gives 0: nothing is moved to it.
        """
        memory = self._memory
        common = overlap(memory, remote)
        if common.empty:
            return lambda _: 0
        if not same_heads(memory, remote):
            return None
        layers = range(common.first_layer, common.first_layer + common.layers)
        cells = [(layer, part) for layer in layers for part in range(memory.regions_per_layer)]

        def chunk_sum(chunk: Chunk) -> int:
            if not len(chunk.local_pages):
                return 0
            chosen = cells if chunk.span is None else cells[slice(*chunk.span)]
            return self._sum(chosen, chunk.local_pages.tolist(), chunk.remote_pages.tolist())

        return chunk_sum

    def _sum(self, cells: list[tuple[int, int]], pages: list[int], names: list[int]) -> int:
        total = work = 0
        for layer, part in cells:
            region = self._memory.kv[self._memory.region_of(layer, part)]
            view, size = self._view(region), region.item_bytes
            seed = (layer << 1 | part) << 32
            for page, name in zip(pages, names, strict=True):
                total += xxhash.xxh3_64_intdigest(view[page * size : (page + 1) * size], seed | name)
                work += size + CALL_BYTES
                if work >= YIELD_BYTES:
                    work = 0
                    time.sleep(0)
        return total & MASK


def _view(region: Region) -> memoryview:
    return memoryview((ctypes.c_ubyte * region.nbytes).from_address(region.address)).cast("B")
