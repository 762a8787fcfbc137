"""Chunks: bounded parts of a request, and checks of the ids in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .pool import Ids, Span, named_twice
from .regions import LayoutError
from .staging import Reservation


class StateItems(NamedTuple):
    """Items of one state pool: item `local[i]` goes with item `remote[i]`.

    pool: index in `KVMemory.state`. local, remote: int32 arrays of the same length. span: only these rows of the
    pool's; None for all.
    """

    pool: int
    local: Ids
    remote: Ids
    span: Span | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A bounded part of a request: page `local_pages[i]` goes to page `remote_pages[i]`.

    Args:
        local_pages, remote_pages: int32 arrays of the same length, which may be 0.
        aux: Pairs (local slot, remote slot).
        state: Items of state pools, each pool at most once.
        span: Only these rows of the pages; None for all.
        staged: Where the pages were gathered to, if they were.
        group: Index in `PairPlan.groups` of the memory that all of it lies in.
    """

    local_pages: Ids
    remote_pages: Ids
    aux: tuple[tuple[int, int], ...] = ()
    state: tuple[StateItems, ...] = ()
    span: Span | None = None
    staged: Reservation | None = None
    group: int = 0

    @property
    def plain(self) -> bool:
        """Whether it may be `joined` with others: whole pages and aux rows in host memory only."""
        return not self.state and self.span is None and self.staged is None and not self.group


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Several plain chunks as one."""
    return Chunk(
        np.concatenate([chunk.local_pages for chunk in chunks]),
        np.concatenate([chunk.remote_pages for chunk in chunks]),
        tuple(pair for chunk in chunks for pair in chunk.aux),
    )


def check_span(field: str, span: Span, regions: int) -> None:
    """Raises LayoutError if a span is not within a pool of so many regions."""
    if not 0 <= span[0] <= span[1] <= regions:
        raise LayoutError(f"{field} is {span}, must be within 0..{regions}")


def check_lengths(name: str, local: Ids, remote: Ids) -> None:
    """Raises LayoutError if two lists that belong together have different lengths."""
    if len(local) != len(remote):
        raise LayoutError(f"local_{name} has {len(local)} ids and remote_{name} {len(remote)}, must be as many")


def check_pair(name: str, local: Ids, remote: Ids, local_limit: int, remote_limit: int) -> None:
    """Raises LayoutError for ids of another type, ids outside their memory, or lists of different lengths."""
    _check_ids(f"local_{name}", local, local_limit)
    _check_ids(f"remote_{name}", remote, remote_limit)
    check_lengths(name, local, remote)


def refuse_twice(name: str, remote: Ids) -> None:
    """Raises LayoutError if a target occurs twice."""
    if len(remote) > 1:
        twice = named_twice(remote)
        if len(twice):
            unit = {"pages": "page", "aux": "row"}.get(name, "item")
            raise LayoutError(f"remote_{name} has {unit} {twice[0]} twice, every target {unit} may be written once")


def _check_ids(field: str, ids: Ids, limit: int) -> None:
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise LayoutError(f"{field} is a {ids.ndim}-dimensional array of {ids.dtype}, must be 1-dimensional int32")
    # As unsigned, negative ids are beyond every limit: one comparison does for both ends.
    if len(ids) and (int(ids[0]) & 0xFFFFFFFF if len(ids) == 1 else int(ids.view(np.uint32).max())) >= limit:
        at = int(np.flatnonzero(ids.view(np.uint32) >= limit)[0])
        allowed = f"0..{limit - 1}" if limit else "left out: the memory has none"
        raise LayoutError(f"{field}[{at}] is {ids[at]}, must be {allowed}")


def check_slot(field: str, slot: int, limit: int) -> None:
    """Raises LayoutError for a slot outside its memory."""
    if not 0 <= slot < limit:
        allowed = f"0..{limit - 1}" if limit else "left out: the memory has no aux rows"
        raise LayoutError(f"{field} is {slot}, must be {allowed}")
