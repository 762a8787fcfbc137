"""Which bytes go where: the pairing check of two memories, and the arrays that describe one chunk.

What can be known per pair is computed once, in `PairPlan`; a chunk costs a few vectorised operations on its page ids.
Every id is checked before any address or index is computed from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .memory import KVMemory, LayoutError

MAX_CHUNK_BYTES: Final = 16 << 20
"""A chunk is what an abort must wait for: a few milliseconds on a slow data plane."""
MAX_CHUNK_DESCRIPTORS: Final = 1024
"""What Mooncake's TCP transport takes at once without failing, and far beyond where batching still helps."""

Pages = NDArray[np.int32]
Aux = tuple[int, int] | None


class Runs(NamedTuple):
    """Byte ranges of one chunk, int64 arrays of the same length: `nbytes[i]` bytes from `local[i]` to `remote[i]`."""

    local: NDArray[np.int64]
    remote: NDArray[np.int64]
    nbytes: NDArray[np.int64]


def compatible(local: KVMemory, remote: KVMemory) -> list[str]:
    """What forbids moving pages from `local` to `remote`, one line for each field that differs; empty if nothing."""
    found = [
        f"{field} is {ours!r} here and {theirs!r} at the peer"
        for field in (
            *("model", "dtype", "page_tokens", "head_dim"),
            *("total_layers", "first_layer", "layers", "total_heads", "first_head", "kv_heads"),
        )
        if (ours := getattr(local, field)) != (theirs := getattr(remote, field))
    ]
    found += [
        f"item_bytes of kv region {index} is {ours.item_bytes} here and {theirs.item_bytes} at the peer"
        for index, (ours, theirs) in enumerate(zip(local.kv, remote.kv, strict=False))
        if ours.item_bytes != theirs.item_bytes
    ]
    if local.aux.item_bytes != remote.aux.item_bytes:
        found.append(f"item_bytes of aux is {local.aux.item_bytes} here and {remote.aux.item_bytes} at the peer")
    return found


class PairPlan:
    """How chunks move from one memory to another. Immutable and thread-safe.

    Items of a memory are numbered region by region: item `region * pages + page` of the KV regions, then the aux rows.
    Raises LayoutError when the memories are not `compatible`.
    """

    def __init__(self, local: KVMemory, remote: KVMemory) -> None:
        if problems := compatible(local, remote):
            raise LayoutError("memories cannot be paired: " + "; ".join(problems))
        self.local = local
        self.remote = remote
        regions = np.arange(len(local.kv), dtype=np.int32)[:, None]
        self._local_first = regions * np.int32(local.pages)
        self._remote_first = regions * np.int32(remote.pages)
        self._local_address = _column([region.address for region in local.kv])
        self._remote_address = _column([region.address for region in remote.kv])
        self._item_bytes = _column([region.item_bytes for region in local.kv])

    def check(self, local_pages: Pages, remote_pages: Pages, aux: Aux, *, read: bool = False) -> None:
        """Raise LayoutError unless the lists pair up, every id is within its memory and no target page occurs twice.

        read: the target is ours, not the peer's.
        """
        _check_pages("local_pages", local_pages, self.local.pages)
        _check_pages("remote_pages", remote_pages, self.remote.pages)
        if len(local_pages) != len(remote_pages):
            raise LayoutError(_unpaired(local_pages, remote_pages))
        if len(remote_pages) > 1:
            field, target = ("local_pages", local_pages) if read else ("remote_pages", remote_pages)
            ordered = np.sort(target)
            twice = ordered[1:][ordered[1:] == ordered[:-1]]
            if len(twice):
                raise LayoutError(f"{field} has page {twice[0]} twice, every target page may be written once")
        if aux is not None:
            _check_slot("local aux slot", aux[0], self.local.aux_rows)
            _check_slot("remote aux slot", aux[1], self.remote.aux_rows)

    def indices(self, local_pages: Pages, remote_pages: Pages, aux: Aux) -> tuple[Pages, Pages]:
        """Item numbers (int32) of a checked chunk on both sides, region by region, the aux row last.

        Pages that follow each other on both sides follow each other here, so that an engine may merge them.
        """
        local = (self._local_first + local_pages).ravel()
        remote = (self._remote_first + remote_pages).ravel()
        if aux is None:
            return local, remote
        local_aux = np.int32(len(self.local.kv) * self.local.pages + aux[0])
        remote_aux = np.int32(len(self.remote.kv) * self.remote.pages + aux[1])
        return np.append(local, local_aux), np.append(remote, remote_aux)

    def runs(self, local_pages: Pages, remote_pages: Pages, aux: Aux) -> Runs:
        """Byte ranges of a checked chunk; pages that follow each other on both sides are one range for each region."""
        bounds = np.concatenate(([0], _breaks(local_pages, remote_pages), [len(local_pages)]))
        first, count = bounds[:-1], bounds[1:] - bounds[:-1]
        if not len(local_pages):
            first = count = first[:0]
        local = (self._local_address + local_pages[first] * self._item_bytes).ravel()
        remote = (self._remote_address + remote_pages[first] * self._item_bytes).ravel()
        nbytes = (count * self._item_bytes).ravel()
        if aux is None:
            return Runs(local, remote, nbytes)
        ours, theirs = self.local.aux, self.remote.aux
        return Runs(
            np.append(local, ours.address + aux[0] * ours.item_bytes),
            np.append(remote, theirs.address + aux[1] * theirs.item_bytes),
            np.append(nbytes, ours.item_bytes),
        )


def split(memory: KVMemory, local_pages: Pages, remote_pages: Pages) -> Iterator[tuple[Pages, Pages]]:
    """Cut a page list into bounded chunks: at most `MAX_CHUNK_BYTES` and `MAX_CHUNK_DESCRIPTORS`, aux row included.

    Pairs are put in the order of their local pages, for allocators often hand pages out backwards and only ascending
    neighbours merge. A chunk holds one page at least, however large. Yields nothing for an empty list.
    """
    if len(local_pages) != len(remote_pages):
        raise LayoutError(_unpaired(local_pages, remote_pages))
    order = np.argsort(local_pages, kind="stable")
    local, remote = local_pages[order], remote_pages[order]
    breaks = _breaks(local, remote)
    most_pages = max(1, (MAX_CHUNK_BYTES - memory.aux.item_bytes) // memory.page_bytes)
    most_runs = max(1, (MAX_CHUNK_DESCRIPTORS - 1) // len(memory.kv))
    start = 0
    while start < len(local):
        stop = min(start + most_pages, len(local))
        last_run = int(np.searchsorted(breaks, start, side="right")) + most_runs - 1
        if last_run < len(breaks):
            stop = min(stop, int(breaks[last_run]))
        yield local[start:stop], remote[start:stop]
        start = stop


def _breaks(local_pages: Pages, remote_pages: Pages) -> NDArray[np.intp]:
    """Positions at which a new run begins, the first (0) left out."""
    local_steps = local_pages[1:] - local_pages[:-1]
    remote_steps = remote_pages[1:] - remote_pages[:-1]
    return np.flatnonzero((local_steps != 1) | (remote_steps != 1)) + 1


def _unpaired(local_pages: Pages, remote_pages: Pages) -> str:
    return f"local_pages has {len(local_pages)} ids and remote_pages {len(remote_pages)}, must be as many"


def _column(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)[:, None]


def _check_pages(field: str, pages: Pages, limit: int) -> None:
    if pages.dtype != np.int32 or pages.ndim != 1:
        raise LayoutError(f"{field} is a {pages.ndim}-dimensional array of {pages.dtype}, must be 1-dimensional int32")
    # As unsigned, negative ids are beyond every limit: one comparison does for both ends.
    if len(pages) and int(pages.view(np.uint32).max()) >= limit:
        at = int(np.flatnonzero(pages.view(np.uint32) >= limit)[0])
        raise LayoutError(f"{field}[{at}] is {pages[at]}, must be 0..{limit - 1}")


def _check_slot(field: str, slot: int, limit: int) -> None:
    if not 0 <= slot < limit:
        raise LayoutError(f"{field} is {slot}, must be 0..{limit - 1}")
