"""Which bytes go where between two memories, cut into chunks.

What is the same for all chunks of a pair is computed once, in `PairPlan`. A chunk costs a few vectorised operations on
its ids. Every id is checked before an address or index is computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from .chunk import Chunk, StateItems, check_lengths, check_pair, check_slot, check_span, refuse_twice
from .memory import KVMemory
from .overlap import Cell, cells_of, compatible, moves_whole, overlap
from .pool import Ids, PoolPlan, Row, Runs, Span, Spare, fits, whole_row
from .regions import MAX_ITEMS, LayoutError
from .staging import SLOT_BYTES, Reservation
from .state import copies_from, state_rows

STAGED_STRIP_BYTES: Final = 1024
"""Larger strips are not gathered: a second copy takes as long as their descriptors do (`proof.bench.staging`)."""
STAGED_FEWER: Final = 4
"""Gathering must make this many times fewer descriptors; pages of one token gain only where they follow each other."""

_NONE = np.empty(0, np.int32)
_NO_RUNS = Runs(*(np.empty(0, np.int64) for _ in range(3)))


class Group(NamedTuple):
    """The rows in one memory of ours and one of theirs. One transfer of a backend stays within one group.

    local_device, remote_device: None for host memory. local_rows, remote_rows: the pieces that `PairPlan.indices`
    numbers, row after row: KV, then state pools, then aux.
    """

    local_device: int | None
    remote_device: int | None
    local_rows: tuple[Row, ...]
    remote_rows: tuple[Row, ...]


class _Placed(NamedTuple):
    """A pool within its group: the numbers of its first pieces."""

    plan: PoolPlan
    group: int
    local_first: np.int32
    remote_first: np.int32

    def indices(self, local: Ids, remote: Ids, span: Span | None) -> tuple[Ids, Ids]:
        """As `PoolPlan.indices`, numbered within the group."""
        ours, theirs = self.plan.indices(local, remote, _span(self.plan, span))
        # Both are 0 for the first pool of a group.
        return (ours + self.local_first, theirs + self.remote_first) if self.local_first else (ours, theirs)


class PairPlan:
    """How chunks move from one memory (ours) to another (theirs). Immutable and thread-safe.

    KV pages: the layers that both hold, and of each the heads that `overlap` gives this pair. A page moves whole where
    both hold the same heads, otherwise in strips. Between memories that have nothing in common only aux rows move.
    State items move whole, or in as many pieces as both have segments in common.

    groups: the rows by memory; group 0 is host to host and always exists.

    Raises:
        LayoutError: The memories are not `compatible`.
    """

    def __init__(self, local: KVMemory, remote: KVMemory) -> None:
        if problems := compatible(local, remote):
            raise LayoutError("memories cannot be paired: " + "; ".join(problems))
        self.local, self.remote = local, remote
        common = overlap(local, remote)
        cells = cells_of(local, remote)
        self._strips = 1 if moves_whole(local, remote, cells) else local.strips
        pages = PoolPlan(_page_rows(local, cells, self._strips), _page_rows(remote, cells, self._strips), self._strips)
        states = [
            state_rows(ours, theirs, common.first_layer, common.layers, heads=common.heads > 0)
            for ours, theirs in zip(local.state, remote.state, strict=True)
        ]
        self._state_bounds = [(rows.whole, rows.whole + rows.split) for rows in states]
        aux = PoolPlan([whole_row(one) for one in local.aux], [whole_row(one) for one in remote.aux], strips=1)
        pools = [pages, *(PoolPlan(rows.local, rows.remote, strips=1) for rows in states), aux]
        places = [
            (local.kv[0].device, remote.kv[0].device),
            *((ours.device, theirs.device) for ours, theirs in zip(local.state, remote.state, strict=True)),
            (local.aux[0].device, remote.aux[0].device) if local.aux else (None, None),
        ]
        placed, self.groups = _grouped(pools, places)
        self._pages, *self._state, self._aux = placed
        self._spare: Spare = (aux.item_bytes, aux.regions)
        self._page_pieces = pages.regions * self._strips
        self._prepare_single()

    def _prepare_single(self) -> None:
        """Compute the pieces and runs of page 0 and aux row 0, and by how far runs move from item to item."""
        pages, aux = self._pages, self._aux
        self._aux_beside = not aux.plan.regions or not pages.plan.regions or aux.group == pages.group
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        self._single = self._indices(Chunk(zero, zero, ((0, 0),)))
        self._single_runs, by_page, by_row = (
            self._runs(Chunk(page, page, (row,))) for page, row in ((zero, (0, 0)), (one, (0, 0)), (zero, (1, 1)))
        )
        first = self._single_runs
        self._page_shift = by_page.local - first.local, by_page.remote - first.remote
        self._row_shift = (by_row.local - first.local)[first.local.size - aux.plan.regions :]

    def check(self, chunk: Chunk) -> None:
        """Check a chunk against both memories.

        Raises:
            LayoutError: Lists do not pair up, an id is outside its memory, a target occurs twice, or the chunk names
                memory of several groups.
        """
        local, remote = self.local, self.remote
        check_pair("pages", chunk.local_pages, chunk.remote_pages, local.pages, remote.pages)
        refuse_twice("pages", chunk.remote_pages)
        for ours, theirs in chunk.aux:
            check_slot("local aux slot", ours, local.aux_rows)
            check_slot("remote aux slot", theirs, remote.aux_rows)
        if len(chunk.aux) > 1:
            refuse_twice("aux", np.array(chunk.aux, np.int32)[:, 1])
        if chunk.state:
            self._check_state(chunk.state)
        if chunk.span is not None:
            check_span("span", chunk.span, self._pages.plan.regions)
        if chunk.staged is not None:
            self._check_staged(chunk)
        if len(self.groups) > 1 or chunk.group:
            self._check_group(chunk)

    def _check_state(self, state: tuple[StateItems, ...]) -> None:
        for items in state:
            if not 0 <= items.pool < len(self._state):
                raise LayoutError(f"state names pool {items.pool}, must be one of the memory's {len(self._state)}")
            name = self.local.state[items.pool].name
            ours, theirs = (memory.state[items.pool].items for memory in (self.local, self.remote))
            check_pair(f"state {name!r}", items.local, items.remote, ours, theirs)
            refuse_twice(f"state {name!r}", items.remote)
            if items.span is not None:
                check_span(f"span of state {name!r}", items.span, self._state[items.pool].plan.regions)
        if len({items.pool for items in state}) < len(state):
            raise LayoutError("state names a pool twice, must name each pool once")

    def _check_staged(self, chunk: Chunk) -> None:
        if not self.can_stage:
            raise LayoutError(
                "staged is given, must be left out where target pages are not strips of ours in host memory"
            )
        nbytes = self._pages.plan.nbytes(len(chunk.local_pages), _span(self._pages.plan, chunk.span))
        if nbytes > SLOT_BYTES:
            raise LayoutError(f"staged pages have {nbytes} bytes, must have at most {SLOT_BYTES}")

    def _check_group(self, chunk: Chunk) -> None:
        named = [("pages", self._pages)] if len(chunk.local_pages) else []
        named += [("state", self._state[items.pool]) for items in chunk.state]
        named += [("aux", self._aux)] if chunk.aux else []
        for field, pool in named:
            if pool.plan.regions and pool.group != chunk.group:
                raise LayoutError(
                    f"chunk is of group {chunk.group} and names {field} of group {pool.group}, must name one group only"
                )
        if not 0 <= chunk.group < len(self.groups):
            raise LayoutError(f"group is {chunk.group}, must be 0..{len(self.groups) - 1}")

    def indices(self, chunk: Chunk) -> tuple[Ids, Ids]:
        """Numbers of a checked chunk's pieces (int32) in the rows of its group, here and at the peer in the same order.

        Pieces that follow each other in memory on both sides follow each other here, so that a backend may merge them.
        Staged chunks have runs only.
        """
        if len(chunk.local_pages) != 1 or len(chunk.aux) != 1 or not chunk.plain or not self._aux_beside:
            return self._indices(chunk)
        ((ours, theirs),) = chunk.aux
        return (
            self._single_pieces(self._single[0], int(chunk.local_pages[0]), ours),
            self._single_pieces(self._single[1], int(chunk.remote_pages[0]), theirs),
        )

    def _single_pieces(self, zero: Ids, page: int, slot: int) -> Ids:
        numbers = zero + np.int32(page * self._strips)
        rows = self._spare[1]
        if rows == 1:  # mostly; a scalar takes half the time of a slice
            numbers[-1] = zero[-1] + slot
        elif rows:
            numbers[-rows:] = zero[-rows:] + np.int32(slot)
        return numbers

    def _indices(self, chunk: Chunk) -> tuple[Ids, Ids]:
        found = []
        if len(chunk.local_pages):
            found.append(self._pages.indices(chunk.local_pages, chunk.remote_pages, chunk.span))
        found += [self._state[one.pool].indices(one.local, one.remote, one.span) for one in chunk.state]
        if chunk.aux:
            rows = np.array(chunk.aux, np.int32)
            found.append(self._aux.indices(rows[:, 0], rows[:, 1], None))
        if len(found) == 1:
            return found[0]
        if not found:
            return _NONE, _NONE
        return np.concatenate([local for local, _ in found]), np.concatenate([remote for _, remote in found])

    def runs(self, chunk: Chunk) -> Runs:
        """Byte ranges of a checked chunk; what follows each other on both sides is one range for each region."""
        if len(chunk.local_pages) != 1 or len(chunk.aux) != 1 or not chunk.plain:
            return self._runs(chunk)
        ((ours, theirs),) = chunk.aux
        zero, shift, row = self._single_runs, self._page_shift, self._row_shift
        local = zero.local + int(chunk.local_pages[0]) * shift[0]
        remote = zero.remote + int(chunk.remote_pages[0]) * shift[1]
        if len(row) == 1:
            local[-1] += ours * int(row[0])
            remote[-1] += theirs * int(row[0])
        elif len(row):
            local[-len(row) :] += ours * row
            remote[-len(row) :] += theirs * row
        return Runs(local, remote, zero.nbytes)

    def _runs(self, chunk: Chunk) -> Runs:
        parts = []
        if len(chunk.local_pages):
            pages, span = self._pages.plan, _span(self._pages.plan, chunk.span)
            if chunk.staged is None:
                parts.append(pages.runs(chunk.local_pages, chunk.remote_pages, span))
            else:
                parts.append(pages.gathered_runs(chunk.staged.address, chunk.remote_pages, span))
        for items in chunk.state:
            plan = self._state[items.pool].plan
            parts.append(plan.runs(items.local, items.remote, _span(plan, items.span)))
        if chunk.aux:
            rows, aux = np.array(chunk.aux, np.int32), self._aux.plan
            parts.append(aux.runs(rows[:, 0], rows[:, 1], (0, aux.regions)))
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return _NO_RUNS
        return Runs(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def nbytes(self, chunk: Chunk) -> int:
        """How many bytes a checked chunk moves."""
        moved = self._pages.plan.nbytes(len(chunk.local_pages), _span(self._pages.plan, chunk.span))
        for items in chunk.state:
            plan = self._state[items.pool].plan
            moved += plan.nbytes(len(items.local), _span(plan, items.span))
        return moved + len(chunk.aux) * self._aux.plan.item_bytes

    def pieces(self, chunk: Chunk) -> int:
        """In how many pieces a plain chunk moves, where no neighbours merge."""
        return len(chunk.local_pages) * self._page_pieces + len(chunk.aux) * self._aux.plan.regions

    def pages_within(self, nbytes: int, pieces: int) -> int:
        """How many pages, wherever they lie, have at most so many bytes and pieces; 0 where no page moves."""
        if not self._pages.plan.item_bytes:
            return 0
        return min(nbytes // self._pages.plan.item_bytes, pieces // self._page_pieces)

    @property
    def can_stage(self) -> bool:
        """Whether a write may gather its pages first: a page of theirs is strips of ours, which the CPU can read."""
        return self._pages.plan.scatters and not self.local.on_device

    def worth_staging(self, remote_pages: Ids) -> bool:
        """Whether to gather these pages is faster than to send strips: where those are many and small."""
        return (
            self.can_stage
            and self._pages.plan.widest <= STAGED_STRIP_BYTES
            and self._pages.plan.fewer(np.sort(remote_pages)) >= STAGED_FEWER
        )

    def stage(self, chunk: Chunk, slot: Reservation) -> Chunk:
        """Gather the pages of a chunk that `cut` made with `gather` into a slot, to be sent from there.

        Raises LayoutError as `check` does, before anything is copied.
        """
        staged = replace(chunk, staged=slot)
        self.check(staged)
        self._pages.plan.gather(chunk.local_pages, slot.bytes, _span(self._pages.plan, chunk.span))
        return staged

    def as_strips(self, chunk: Chunk) -> list[Chunk]:
        """A chunk that `cut` made with `gather`, cut so that it can be sent without a slot; in order."""
        chunks = self._cut_pages(chunk.local_pages, chunk.remote_pages, gather=False, within=chunk.span)
        if chunk.state:
            chunks.append(Chunk(_NONE, _NONE, state=chunk.state, group=chunk.group))
        return self._with_aux(chunks, chunk.aux[0]) if chunk.aux else chunks

    def cut(
        self,
        local_pages: Ids,
        remote_pages: Ids,
        aux: tuple[int, int] | None = None,
        state: Sequence[tuple[Ids, Ids]] = (),
        *,
        gather: bool = False,
        state_within: Sequence[Span | None] = (),
    ) -> list[Chunk]:
        """Cut a request into chunks within `MAX_CHUNK_BYTES` and `MAX_CHUNK_DESCRIPTORS`; state and aux go last.

        One item of one region is never cut. There is no chunk where nothing is to be moved.

        Args:
            local_pages, remote_pages: int32 page ids.
            aux: Local and remote slot.
            state: For each state pool in order the local and remote ids; empty for none at all.
            gather: Pages are to be gathered into slots.
            state_within: For each state pool only these rows, as `state_spans` gives them; empty for all.

        Raises:
            LayoutError: Lists that belong together have different lengths.
        """
        check_lengths("pages", local_pages, remote_pages)
        beside = aux is None or self._aux_beside
        if len(local_pages) == 1 and beside and not state and not gather and self._page_fits():
            return [Chunk(local_pages, remote_pages, () if aux is None else (aux,), group=self._pages.group)]
        chunks = self._cut_pages(local_pages, remote_pages, gather=gather, within=None)
        if state:
            if len(state) != len(self._state):
                raise LayoutError(f"state has ids of {len(state)} pools, must have them of all {len(self._state)}")
            for index, (ours, theirs) in enumerate(state):
                check_lengths(f"state {self.local.state[index].name!r}", ours, theirs)
                chunks = self._join(chunks, self._cut_state(index, ours, theirs, state_within))
        return chunks if aux is None else self._with_aux(chunks, aux)

    def _cut_pages(self, local: Ids, remote: Ids, *, gather: bool, within: Span | None) -> list[Chunk]:
        pages = self._pages
        pieces = pages.plan.split(local, remote, self._spare, gather=gather, within=within)
        return [Chunk(ours, theirs, span=span, group=pages.group) for ours, theirs, span in pieces]

    def _cut_state(self, index: int, local: Ids, remote: Ids, within: Sequence[Span | None]) -> list[Chunk]:
        pool = self._state[index]
        pieces = pool.plan.split(local, remote, self._spare, within=within[index] if within else None)
        return [
            Chunk(_NONE, _NONE, state=(StateItems(index, ours, theirs, span),), group=pool.group)
            for ours, theirs, span in pieces
        ]

    def _page_fits(self) -> bool:
        pages, (nbytes, rows) = self._pages.plan, self._spare
        return pages.item_bytes > 0 and fits(self._page_pieces + rows, pages.item_bytes + nbytes)

    def _join(self, chunks: list[Chunk], states: list[Chunk]) -> list[Chunk]:
        """Put little state into the last chunk, so that it costs no chunk of its own."""
        if chunks and len(states) == 1:
            last, (only,) = chunks[-1], states
            if last.group == only.group and last.span is None and only.state[0].span is None:
                both = replace(last, state=(*last.state, *only.state))
                if fits(len(self.runs(both).nbytes) + self._spare[1], self.nbytes(both) + self._spare[0]):
                    return [*chunks[:-1], both]
        return chunks + states

    def _with_aux(self, chunks: list[Chunk], aux: tuple[int, int]) -> list[Chunk]:
        """Put the aux row into the last chunk, or behind it where that is full or of another group."""
        if chunks and chunks[-1].group == self._aux.group:
            both = replace(chunks[-1], aux=(aux,))
            # Only an item that is cut by regions may fill a chunk: others keep room for the row.
            if both.span is None or fits(len(self.runs(both).nbytes), 0):
                return [*chunks[:-1], both]
        return [*chunks, Chunk(_NONE, _NONE, (aux,), group=self._aux.group)]

    def state_spans(self, *, kv: bool, shares: bool) -> tuple[Span | None, ...]:
        """For each state pool the rows that this pair moves; None for all. See `pairing.Writer`.

        Args:
            kv: The pair moves pages, and with them regions that are not cut.
            shares: The pair moves regions that are cut. Copied groups go to each target from one rank only.
        """
        spans: list[Span | None] = []
        for index, (whole, split) in enumerate(self._state_bounds):
            first, stop, regions = 0 if kv else whole, whole, self._state[index].plan.regions
            if shares:
                copies = copies_from(self.local.state[index], self.remote.state[index])
                stop = regions if copies else split
            spans.append(None if (first, stop) == (0, regions) else (first, stop))
        return tuple(spans)


def _grouped(
    pools: Sequence[PoolPlan], places: Sequence[tuple[int | None, int | None]]
) -> tuple[list[_Placed], tuple[Group, ...]]:
    """The pools with their places in the groups, and the groups."""
    keys: list[tuple[int | None, int | None]] = [(None, None)]
    keys += sorted({place for place, pool in zip(places, pools, strict=True) if pool.regions} - {keys[0]}, key=str)
    rows: list[tuple[list[Row], list[Row]]] = [([], []) for _ in keys]
    firsts = []
    for pool, place in zip(pools, places, strict=True):
        group = keys.index(place) if pool.regions else 0
        ours, theirs = rows[group]
        firsts.append((pool, group, _pieces(ours), _pieces(theirs)))
        ours += pool.local_rows
        theirs += pool.remote_rows
    pieces = max(_pieces(side) for sides in rows for side in sides)
    if pieces > MAX_ITEMS:
        raise LayoutError(f"the memory would be moved in {pieces} pieces, must be at most {MAX_ITEMS}")
    placed = [_Placed(pool, group, np.int32(local), np.int32(remote)) for pool, group, local, remote in firsts]
    groups = (Group(*key, tuple(ours), tuple(theirs)) for key, (ours, theirs) in zip(keys, rows, strict=True))
    return placed, tuple(groups)


def _pieces(rows: Sequence[Row]) -> int:
    return sum(row.pieces for row in rows)


def _page_rows(memory: KVMemory, cells: Sequence[Cell], strips: int) -> list[Row]:
    """A row for each cell: pages, or strips of the heads that move."""
    rows = []
    for cell in cells:
        region = memory.kv[memory.region_of(cell.layer, cell.part)]
        if strips == 1 and memory.heads_of(cell.layer).kv_heads == cell.heads:
            rows.append(whole_row(region))
            continue
        held = memory.heads_of(cell.layer)
        strip = region.item_bytes // strips
        head = strip // held.kv_heads
        offset = (cell.first_head - held.first_head) * head
        rows.append(Row(region.address + offset, cell.heads * head, strip, region.items * strips))
    return rows


def _span(pool: PoolPlan, span: Span | None) -> Span:
    return (0, pool.regions) if span is None else span
