"""Checksums of pages that two memories agree on, whichever ids the pages have here and however they are cut.

Formula: the sum over all words x of m * w * (x ^ x >> 16), modulo 2**32. A word is at most 4 bytes of one head of one
token. w is an odd number that depends on the word's place in the page: K or V, token, head, place in the head. m is an
odd number that depends on the layer, on K or V, and on the page's id at the target.

The sums of several writers add up to the sum of the target's pages. The writers may hold other layers, or other heads
of the same pages. m and w are odd, so a change of one word always changes the sum. 32 bits suffice against accidents.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .chunk import Chunk
from .memory import KVMemory
from .overlap import Cell, cells_of

MASK: Final = (1 << 32) - 1
"""Sums are taken modulo 2**32."""
BATCH_BYTES: Final = 1024 << 10
"""Bytes that are summed at a time (0.3 ms). Other threads get a turn between batches."""
_SPREAD: Final = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: multiplication by it spreads consecutive numbers evenly (Knuth)."""

CopyPages = Callable[[int, Sequence[int]], bytes | bytearray | memoryview]
"""Copies pages of one region to host memory: (index in `KVMemory.kv`, page ids) -> the pages one after the other."""


def sampled(number: int, rate: float) -> bool:
    """Whether the attempt with this number is among the share `rate` that is checked; the same on every rank."""
    return (number * _SPREAD & 0xFFFFFFFFFFFFFFFF) < rate * 2**64


class PageSums:
    """Sums over pages of one memory, which must stay mapped.

    Args:
        memory: the memory.
        copy_pages: copies pages of a device to the host. Without it, pages of a device have no sums.
    """

    def __init__(self, memory: KVMemory, copy_pages: CopyPages | None = None) -> None:
        self._memory = memory
        self._copy_pages = copy_pages
        self._view = lru_cache(maxsize=None)(self._make_view)
        layers = range(memory.first_layer, memory.first_layer + memory.layers)
        heads = ((layer, memory.heads_of(layer)) for layer in layers)
        self._all = [
            Cell(layer, part, held.first_head, held.kv_heads)
            for layer, held in heads
            for part in range(memory.regions_per_layer)
        ]

    @property
    def possible(self) -> bool:
        """Whether sums can be taken: the CPU never reads the memory of a device."""
        return not self._memory.on_device or self._copy_pages is not None

    def whole(self, pages: Iterable[int]) -> int:
        """The sum over all that the memory holds of these pages, which are known by their own ids."""
        ids = list(pages)
        return self._sum(self._all, ids, ids)

    def of_chunk(self, remote: KVMemory) -> Callable[[Chunk], int] | None:
        """A function that gives the sum of what a chunk writes to `remote`; None where sums are not `possible`.

        The pages are known by their ids at the target. A chunk without pages has the sum 0.
        """
        if not self.possible:
            return None
        cells = cells_of(self._memory, remote)

        def chunk_sum(chunk: Chunk) -> int:
            if not cells or not len(chunk.local_pages):
                return 0
            chosen = cells if chunk.span is None else cells[slice(*chunk.span)]
            return self._sum(chosen, chunk.local_pages.tolist(), chunk.remote_pages.tolist())

        return chunk_sum

    def _sum(self, cells: list[Cell], pages: list[int], names: list[int]) -> int:
        # One allocation for all batches: an allocation for each would cost more than the sums.
        room = max(BATCH_BYTES, *(region.item_bytes for region in self._memory.kv))
        buffers, named = np.empty((2, room), np.uint8), np.array(names, np.uint64)
        total = 0
        for cell in cells:
            by_page = self._sums_of(cell, pages, buffers)
            spread = _odd((np.uint64(cell.layer << 1 | cell.part) << np.uint64(32)) + named)
            total += int((by_page * spread).sum(dtype=np.uint32))
        return total & MASK

    def _sums_of(self, cell: Cell, pages: list[int], buffers: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """For each page the sum over w * (x ^ x >> 16)."""
        index = self._memory.region_of(cell.layer, cell.part)
        shape, held = self._shape(index), self._memory.heads_of(cell.layer)
        weights, cut = _weights(shape, held.first_head, held.total_heads), None
        if cell.heads < held.kv_heads:
            first = cell.first_head - held.first_head
            some = slice(first, first + cell.heads)
            cut = (slice(None), some) if shape.heads_first else (slice(None), slice(None), some)
            weights = weights[cut]
        flat_weights, sums = weights.ravel(), np.empty(len(pages), np.uint32)
        step = buffers.shape[1] // self._memory.kv[index].item_bytes
        for start in range(0, len(pages), step):
            batch = pages[start : start + step]
            words = self._read(index, batch, buffers[0]).view(np.dtype(f"u{shape.word}"))
            if cut is not None:
                words = words.reshape(len(batch), *shape.axes)[(slice(None), *cut)].reshape(len(batch), -1)
            np.einsum("pw,w->p", _mixed(words, buffers[1]), flat_weights, out=sums[start : start + step])
            if len(batch) == step:
                time.sleep(0)
        return sums

    def _read(self, index: int, pages: list[int], buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The bytes of pages of one region: (page, byte)."""
        size = self._memory.kv[index].item_bytes
        if self._memory.on_device:
            assert self._copy_pages is not None
            return np.frombuffer(self._copy_pages(index, pages), np.uint8).reshape(len(pages), size)
        found = buffer[: len(pages) * size].reshape(len(pages), size)
        return np.take(self._view(index), pages, axis=0, out=found, mode="clip")  # "raise" would copy twice

    def _shape(self, index: int) -> _Shape:
        memory, size = self._memory, self._memory.kv[index].item_bytes
        heads = memory.heads_of(memory.first_layer + index // memory.regions_per_layer).kv_heads
        halves = 2 if memory.kv_order == "interleaved" else 1
        tokens = memory.page_tokens
        if size % (halves * tokens * heads):
            # A page that cannot be divided by heads never moves by heads.
            halves = tokens = heads = 1
        nbytes = size // (halves * tokens * heads)
        word = next(word for word in (4, 2, 1) if nbytes % word == 0)
        return _Shape(halves, heads, tokens, nbytes // word, word, memory.layout == "HND")

    def _make_view(self, index: int) -> NDArray[np.uint8]:
        region = self._memory.kv[index]
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * region.nbytes).from_address(region.address))
        return memory.reshape(region.items, region.item_bytes)


class _Shape(NamedTuple):
    """A page: halves (K and V), heads, tokens, words in a head of a token, bytes of a word, order of the axes."""

    halves: int
    heads: int
    tokens: int
    words: int
    word: int
    heads_first: bool

    @property
    def axes(self) -> tuple[int, int, int, int]:
        """The axes of a page's words as they lie in memory."""
        middle = (self.heads, self.tokens) if self.heads_first else (self.tokens, self.heads)
        return (self.halves, *middle, self.words)


@lru_cache(maxsize=16)
def _weights(shape: _Shape, first_head: int, total_heads: int) -> NDArray[np.uint32]:
    """The weights of a page's words, in the order of `_Shape.axes`. The number of a word is the same in every order."""
    heads = slice(first_head, first_head + shape.heads)
    half, head, token, place = np.ogrid[: shape.halves, heads, : shape.tokens, : shape.words]
    number = ((half * total_heads + head) * shape.tokens + token) * shape.words + place
    return _odd((number if shape.heads_first else number.swapaxes(1, 2)).astype(np.uint64))


def _mixed(words: NDArray[Any], buffer: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """x ^ x >> 16 of each word x. High bits alone would count little: their products leave the sum."""
    if words.itemsize < 4:
        return words.astype(np.uint32)
    mixed = buffer[: words.nbytes].view(np.uint32).reshape(words.shape)
    np.right_shift(words, 16, out=mixed)
    np.bitwise_xor(mixed, words, out=mixed)
    return mixed


def _odd(numbers: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Odd numbers that look random, one for each number (the finaliser of splitmix64)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(_SPREAD)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
