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


PageSum = Callable[[list[int], list[int]], int]
"""The sum over pages that go by these names."""


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

    def of_chunk(self, remote: KVMemory, *, here: bool) -> Callable[[Chunk], int] | None:
        """What gives the sum over a chunk's pages here; None where pages are cut by heads.

        `here`: they are the target, and so known by their ids here; otherwise by those that they have there. A memory
        that has nothing in common with ours gives 0: nothing is moved.
        """
        cells = self._common(remote)
        if cells is None:
            return None

        def chunk_sum(chunk: Chunk) -> int:
            if not cells or not len(chunk.local_pages):
                return 0
            chosen = cells if chunk.span is None else cells[slice(*chunk.span)]
            pages = chunk.local_pages.tolist()
            return self._sum(chosen, pages, pages if here else chunk.remote_pages.tolist())

        return chunk_sum

    def of_pages(self, remote: KVMemory) -> PageSum | None:
        """What gives the sum over pages here, known by other names, of all that both hold; None as with `of_chunk`."""
        cells = self._common(remote)
        return None if cells is None else lambda pages, names: self._sum(cells, pages, names)

    def _common(self, remote: KVMemory) -> list[tuple[int, int]] | None:
        """Layers and parts that both hold; None where their pages are cut by heads."""
        memory = self._memory
        common = overlap(memory, remote)
        if common.empty:
            return []
        if not same_heads(memory, remote):
            return None
        layers = range(common.first_layer, common.first_layer + common.layers)
        return [(layer, part) for layer in layers for part in range(memory.regions_per_layer)]

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
