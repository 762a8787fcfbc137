"""How the items of one pool move between two memories: the arrays for a list of ids, and where to cut it.

A *pool* is a set of regions in which one id selects an item each. An item moves whole or, where both sides hold
different heads, as `strips` strips whose beginnings lie `stride` bytes apart. A region that moves in several pieces
(`state`) counts as several regions here.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .regions import Region
from .staging import SLOT_BYTES

MAX_CHUNK_BYTES: Final = (16 << 20) + (64 << 10)
"""16 MiB, and an aux row beside them. An abort waits for a chunk: a few milliseconds on a slow network."""
MAX_CHUNK_DESCRIPTORS: Final = 1024
"""What Mooncake's TCP transport takes at once without failing, and far beyond where batching still helps."""

Spare = tuple[int, int]
"""Bytes and descriptors of a chunk that are kept free for an aux row."""

Ids = NDArray[np.int32]
Span = tuple[int, int]
"""Regions `first` .. `stop` - 1 of a pool."""


class Row(NamedTuple):
    """`pieces` pieces of `nbytes` bytes each, the first at `address`, their beginnings `stride` bytes apart."""

    address: int
    nbytes: int
    stride: int
    pieces: int


def whole_row(region: Region) -> Row:
    """A row whose pieces are the items of a region."""
    return Row(region.address, region.item_bytes, region.item_bytes, region.items)


class Runs(NamedTuple):
    """Byte ranges, int64 arrays of the same length: `nbytes[i]` bytes between `local[i]` and `remote[i]`."""

    local: NDArray[np.int64]
    remote: NDArray[np.int64]
    nbytes: NDArray[np.int64]


class PoolPlan:
    """The regions of a pool that two memories have in common, as rows of `strips` pieces for each item.

    local, remote: one row for each region, on both sides with the same `nbytes` in the same order. Immutable.
    The caller ensures that an int32 can number all pieces.
    """

    def __init__(self, local: Sequence[Row], remote: Sequence[Row], strips: int) -> None:
        self.local_rows, self.remote_rows = tuple(local), tuple(remote)
        self.strips = strips
        self.regions = len(self.local_rows)
        self._local = _Side(self.local_rows)
        self._remote = _Side(self.remote_rows)
        self._nbytes = _column([row.nbytes for row in local])
        self._region_bytes = [row.nbytes * strips for row in local]
        self.item_bytes = sum(self._region_bytes)
        """Bytes that move for one item, over all regions."""
        self._item_column = _column(self._region_bytes)
        self._merges = all(row.nbytes == row.stride for row in (*local, *remote))
        self._remote_dense = all(row.nbytes == row.stride for row in remote)
        self._strip = np.arange(strips, dtype=np.int32)

    @property
    def scatters(self) -> bool:
        """Whether items are strips here and whole at the other side, so that gathering may make fewer pieces."""
        return self._remote_dense and not self._merges

    @property
    def widest(self) -> int:
        """Bytes of the largest piece."""
        return max((row.nbytes for row in self.local_rows), default=0)

    def nbytes(self, items: int, span: Span) -> int:
        """Bytes that move for `items` items in the regions of `span`."""
        whole = span[1] - span[0] == self.regions
        return items * (self.item_bytes if whole else sum(self._region_bytes[span[0] : span[1]]))

    def indices(self, local: Ids, remote: Ids, span: Span) -> tuple[Ids, Ids]:
        """Numbers of the pieces (int32), region by region; those of the first region begin at 0.

        Pieces that follow each other in memory on both sides follow each other here, so that a backend may merge them.
        """
        regions = slice(*span)
        return (
            (self._local.first[regions] + self._pieces(local)).ravel(),
            (self._remote.first[regions] + self._pieces(remote)).ravel(),
        )

    def runs(self, local: Ids, remote: Ids, span: Span) -> Runs:
        """Byte ranges; items that follow each other on both sides are one range for each region, if they move whole."""
        regions = slice(*span)
        nbytes = self._nbytes[regions]
        if self._merges and len(local):
            bounds = np.concatenate(([0], breaks(local, remote), [len(local)]))
            first, count = bounds[:-1], bounds[1:] - bounds[:-1]
            local, remote = local[first], remote[first]
            nbytes = nbytes * count
        else:
            local, remote = self._pieces(local), self._pieces(remote)
            nbytes = np.broadcast_to(nbytes, (len(nbytes), len(local)))
        return Runs(
            (self._local.address[regions] + local * self._local.stride[regions]).ravel(),
            (self._remote.address[regions] + remote * self._remote.stride[regions]).ravel(),
            nbytes.ravel(),
        )

    def fewer(self, remote: Ids) -> float:
        """How many times fewer pieces there are when these items are gathered."""
        return len(remote) * self.strips / (1 + len(breaks(remote, remote)))

    def gathered_runs(self, address: int, remote: Ids, span: Span) -> Runs:
        """Byte ranges for items that were gathered to `address`; those that follow each other there are one range."""
        nbytes = self._item_column[slice(*span)]
        bounds = np.concatenate(([0], breaks(remote, remote), [len(remote)]))
        first, count = bounds[:-1], bounds[1:] - bounds[:-1]
        lengths = (nbytes * count).ravel()
        source = address + np.concatenate(([0], np.cumsum(lengths)[:-1]))
        # Their side is dense: an item begins there where its first strip does.
        target = self._remote.address[slice(*span)] + remote[first] * nbytes
        return Runs(source, target.ravel(), lengths)

    def gather(self, local: Ids, into: NDArray[np.uint8], span: Span) -> None:
        """Copy the strips of these items, region by region, to where `gathered_runs` takes them from."""
        start = 0
        for row, strips in zip(self.local_rows[slice(*span)], self._strip_views[slice(*span)], strict=True):
            end = start + len(local) * self.strips * row.nbytes
            target = into[start:end].view(strips.dtype).reshape(len(local), self.strips)
            # Of pages in a row no copy is made on the way, as it is of a list of pages.
            in_a_row = bool(len(local)) and not len(breaks(local, local))
            target[...] = strips[local[0] : local[0] + len(local)] if in_a_row else strips[local]
            start = end

    @cached_property
    def _strip_views(self) -> list[NDArray[np.void]]:
        """For each region here its strips: (item, strip), elements of as many bytes as a strip has."""
        views = []
        for row in self.local_rows:
            nbytes = row.stride * (row.pieces - 1) + row.nbytes
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(row.address))
            shape, strides = (row.pieces // self.strips, self.strips), (row.stride * self.strips, row.stride)
            views.append(np.ndarray(shape, np.dtype((np.void, row.nbytes)), memory, strides=strides))
        return views

    def split(
        self, local: Ids, remote: Ids, spare: Spare, *, gather: bool = False, within: Span | None = None
    ) -> Iterator[tuple[Ids, Ids, Span | None]]:
        """Cut lists of ids into chunks of at most `MAX_CHUNK_BYTES` and `MAX_CHUNK_DESCRIPTORS`, less `spare`.

        Pairs are sorted by their local ids: allocators often hand pages out backwards, and only ascending neighbours
        merge. Pairs that are to be gathered are sorted by their remote ids, and a chunk fits into a slot.
        Where one item over all regions is too much, each chunk is one item in some of the regions. One item in one
        region is never cut.

        Args:
            spare: what is kept free in each chunk.
            gather: the items are to be gathered.
            within: only these regions.

        Yields:
            Local ids, remote ids and the span of regions, None for all. Nothing for empty lists or without regions.
        """
        first, stop = within or (0, self.regions)
        if first == stop or not len(local):
            return
        order = np.argsort(remote if gather else local, kind="stable")
        local, remote = local[order], remote[order]
        most_bytes = SLOT_BYTES if gather else MAX_CHUNK_BYTES - spare[0]
        most_pieces = MAX_CHUNK_DESCRIPTORS - spare[1]
        strips = 1 if gather else self.strips
        if within or self.item_bytes > most_bytes or self.regions * strips > most_pieces:
            spans = self._spans(first, stop, most_bytes, most_pieces // strips)
            for at in range(len(local)):
                yield from ((local[at : at + 1], remote[at : at + 1], span) for span in spans)
            return
        ends = np.arange(1, len(local))
        if gather or self._merges:
            ends = breaks(remote, remote if gather else local)
        most_items = most_bytes // self.item_bytes
        most_runs = most_pieces // (self.regions * strips)
        start = 0
        while start < len(local):
            end = min(start + most_items, len(local))
            last_run = int(np.searchsorted(ends, start, side="right")) + most_runs - 1
            if last_run < len(ends):
                end = min(end, int(ends[last_run]))
            yield local[start:end], remote[start:end], None
            start = end

    def _spans(self, first: int, stop: int, most_bytes: int, most_items: int) -> list[Span]:
        """Cut the regions, evenly, so that one item in each span is within both bounds."""
        regions = stop - first
        most = min(most_bytes // max(self._region_bytes[first:stop]), most_items)
        count = -(-regions // max(1, most))
        return list(itertools.pairwise(first + regions * cut // count for cut in range(count + 1)))

    def _pieces(self, ids: Ids) -> Ids:
        if self.strips == 1:
            return ids
        return (ids[:, None] * np.int32(self.strips) + self._strip).ravel()


class _Side:
    """Columns over the regions of one side."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.address = _column([row.address for row in rows])
        self.stride = _column([row.stride for row in rows])
        self.first = np.cumsum([0, *(row.pieces for row in rows)])[:-1, None].astype(np.int32)


def fits(descriptors: int, nbytes: int) -> bool:
    """Whether so much may go out as one chunk."""
    return descriptors <= MAX_CHUNK_DESCRIPTORS and nbytes <= MAX_CHUNK_BYTES


def named_twice(ids: Ids) -> Ids:
    """The ids that stand in a list more than once, in order; empty where there are none."""
    ordered = np.sort(ids)
    twice: Ids = ordered[1:][ordered[1:] == ordered[:-1]]
    return twice


def breaks(local: Ids, remote: Ids) -> NDArray[np.intp]:
    """Positions at which a new run begins, the first (0) left out."""
    return np.flatnonzero((local[1:] - local[:-1] != 1) | (remote[1:] - remote[:-1] != 1)) + 1


def _column(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64).reshape(-1, 1)
