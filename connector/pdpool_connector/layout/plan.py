"""Which bytes go where between two memories: what a pair of them can move, cut into chunks.

What can be known per pair is computed once, in `PairPlan`; a chunk costs a few vectorised operations on its ids. Every
id is checked before any address or index is computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from .memory import MAX_ITEMS, KVMemory, LayoutError, Region
from .overlap import Overlap, compatible, overlap, same_heads
from .pool import Ids, PoolPlan, Row, Runs, Span, fits, named_twice, whole_row
from .staging import SLOT_BYTES, Reservation
from .state import copies_from, state_rows

STAGED_STRIP_BYTES: Final = 1024
"""Larger strips are not gathered: a second copy takes as long as their descriptors do (`proof.bench.staging`)."""
STAGED_FEWER: Final = 4
"""Gathering must make this many times fewer descriptors; pages of one token gain only where they follow each other."""

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A bounded part of a request: page `local_pages[i]` goes with page `remote_pages[i]`, and so do state ids.

    local_pages, remote_pages: int32 arrays of the same length, which may be 0. aux: pairs (local slot, remote slot).
    state: (local ids, remote ids), int32 arrays of the same length, or None. span: only these regions of the plan's, of
    pages or of state, whichever the chunk has; None means all. staged: where the pages were gathered to, if they were.
    """

    local_pages: Ids
    remote_pages: Ids
    aux: tuple[tuple[int, int], ...] = ()
    state: tuple[Ids, Ids] | None = None
    span: Span | None = None
    staged: Reservation | None = None

    @property
    def plain(self) -> bool:
        """Whether it has whole pages and aux rows only, and so may be `joined` with others."""
        return self.state is None and self.span is None and self.staged is None


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Several plain chunks as one."""
    return Chunk(
        np.concatenate([chunk.local_pages for chunk in chunks]),
        np.concatenate([chunk.remote_pages for chunk in chunks]),
        tuple(pair for chunk in chunks for pair in chunk.aux),
    )


class PairPlan:
    """How chunks move between one memory (ours) and another (theirs). Immutable and thread-safe.

    Of the cache moves what both hold: layers by their number in the model, and of each the heads that both hold. Where
    both hold the same heads a page moves whole, otherwise as one strip for each token; between memories that have
    nothing in common only aux rows move. State moves like pages that are whole, a region that is cut in as many pieces
    as it has segments in common.

    local_rows, remote_rows: the pieces that `indices` numbers, row after row: KV regions, state regions, aux.

    Raises LayoutError when the memories are not `compatible`.
    """

    def __init__(self, local: KVMemory, remote: KVMemory) -> None:
        if problems := compatible(local, remote):
            raise LayoutError("memories cannot be paired: " + "; ".join(problems))
        self.local, self.remote = local, remote
        common = overlap(local, remote)
        whole = same_heads(local, remote)
        strips = 1 if whole else local.page_tokens
        self._pages = PoolPlan(_page_rows(local, common, whole), _page_rows(remote, common, whole), strips)
        self._strips = strips
        self._page_pieces = self._pages.regions * strips
        state = state_rows(local, remote, common.first_layer, common.layers, heads=common.heads > 0)
        self._state = PoolPlan(state.local, state.remote, strips=1)
        self._state_whole, self._state_split = state.whole, state.whole + state.split
        self.local_rows = (*self._pages.local_rows, *self._state.local_rows, whole_row(local.aux))
        self.remote_rows = (*self._pages.remote_rows, *self._state.remote_rows, whole_row(remote.aux))
        self._local_first = _firsts(self._pages.local_rows, self._state.local_rows, local.aux)
        self._remote_first = _firsts(self._pages.remote_rows, self._state.remote_rows, remote.aux)
        first = np.zeros(1, np.int32)
        local_pieces, remote_pieces = self._pages.indices(first, first, (0, self._pages.regions))
        self._local_single = np.append(local_pieces, self._local_first[1]).astype(np.int32)
        self._remote_single = np.append(remote_pieces, self._remote_first[1]).astype(np.int32)
        """The numbers for page 0 and aux row 0."""
        self._single_runs, next_page = (self._runs(Chunk(page, page, ((0, 0),))) for page in (first, first + 1))
        """The ranges for page 0 and aux row 0."""
        self._local_step = next_page.local - self._single_runs.local
        self._remote_step = next_page.remote - self._single_runs.remote
        """By how much they move from page to page."""

    def check(self, chunk: Chunk, *, read: bool = False) -> None:
        """Raise LayoutError unless the lists pair up, every id is within its memory and no target occurs twice.

        read: the target is ours, not theirs.
        """
        local, remote = self.local, self.remote
        _check_pair("pages", chunk.local_pages, chunk.remote_pages, local.pages, remote.pages)
        _refuse_twice("pages", chunk.local_pages, chunk.remote_pages, read)
        if chunk.state is not None:
            _check_pair("state", *chunk.state, local.state_items, remote.state_items)
            _refuse_twice("state", *chunk.state, read)
        for ours, theirs in chunk.aux:
            _check_slot("local aux slot", ours, local.aux_rows)
            _check_slot("remote aux slot", theirs, remote.aux_rows)
        if len(chunk.aux) > 1:
            rows = np.array(chunk.aux, np.int32)
            _refuse_twice("aux", rows[:, 0], rows[:, 1], read)
        if chunk.span is not None:
            if len(chunk.local_pages) and chunk.state is not None:
                raise LayoutError("span is given for pages and state, must be for one of them")
            regions = self._pages.regions if chunk.state is None else self._state.regions
            if not 0 <= chunk.span[0] <= chunk.span[1] <= regions:
                raise LayoutError(f"span is {chunk.span}, must be within 0..{regions}")
        if chunk.staged is not None:
            self._check_staged(chunk, read)

    def _check_staged(self, chunk: Chunk, read: bool) -> None:
        if read or not self.can_stage:
            raise LayoutError(
                "staged is given, must be left out where pages of the target are not strips of the source"
            )
        nbytes = self._pages.nbytes(len(chunk.local_pages), self._span(self._pages, chunk))
        if nbytes > SLOT_BYTES:
            raise LayoutError(f"staged pages have {nbytes} bytes, must have at most {SLOT_BYTES}")

    def indices(self, chunk: Chunk) -> tuple[Ids, Ids]:
        """Numbers of a checked chunk's pieces (int32) in `local_rows` and in `remote_rows`, in the same order.

        Pieces that follow each other in memory on both sides follow each other here, so that an engine may merge them.
        Staged chunks are not of these pieces: there are only runs of them.
        """
        if len(chunk.local_pages) == 1 and len(chunk.aux) == 1 and chunk.state is None and chunk.span is None:
            ours, theirs = chunk.aux[0]
            return self._single(self._local_single, int(chunk.local_pages[0]), ours), self._single(
                self._remote_single, int(chunk.remote_pages[0]), theirs
            )
        local, remote = self._pages.indices(chunk.local_pages, chunk.remote_pages, self._span(self._pages, chunk))
        if not chunk.aux and chunk.state is None:
            return local, remote
        locals_, remotes = [local], [remote]
        if chunk.state is not None:
            local, remote = self._state.indices(*chunk.state, self._span(self._state, chunk))
            locals_.append(local + self._local_first[0])
            remotes.append(remote + self._remote_first[0])
        if chunk.aux:
            rows = np.array(chunk.aux, np.int32)
            locals_.append(rows[:, 0] + self._local_first[1])
            remotes.append(rows[:, 1] + self._remote_first[1])
        return np.concatenate(locals_), np.concatenate(remotes)

    def _single(self, zero: Ids, page: int, slot: int) -> Ids:
        numbers = zero + np.int32(page * self._strips)
        numbers[-1] = zero[-1] + slot
        return numbers

    def runs(self, chunk: Chunk) -> Runs:
        """Byte ranges of a checked chunk; what follows each other on both sides is one range for each region."""
        if len(chunk.local_pages) != 1 or len(chunk.aux) != 1 or not chunk.plain:
            return self._runs(chunk)
        ((ours, theirs),) = chunk.aux
        zero, row = self._single_runs, self.local.aux.item_bytes
        local = zero.local + int(chunk.local_pages[0]) * self._local_step
        remote = zero.remote + int(chunk.remote_pages[0]) * self._remote_step
        local[-1] += ours * row
        remote[-1] += theirs * row
        return Runs(local, remote, zero.nbytes)

    def _runs(self, chunk: Chunk) -> Runs:
        span = self._span(self._pages, chunk)
        if chunk.staged is None:
            parts = [self._pages.runs(chunk.local_pages, chunk.remote_pages, span)]
        else:
            parts = [self._pages.gathered_runs(chunk.staged.address, chunk.remote_pages, span)]
        if chunk.state is not None:
            parts.append(self._state.runs(*chunk.state, self._span(self._state, chunk)))
        if chunk.aux:
            ours, theirs = self.local.aux, self.remote.aux
            slots = np.array(chunk.aux, np.int64).T * ours.item_bytes
            nbytes = np.full(len(chunk.aux), ours.item_bytes, np.int64)
            parts.append(Runs(ours.address + slots[0], theirs.address + slots[1], nbytes))
        return parts[0] if len(parts) == 1 else Runs(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def nbytes(self, chunk: Chunk) -> int:
        """How many bytes a checked chunk moves."""
        moved = self._pages.nbytes(len(chunk.local_pages), self._span(self._pages, chunk))
        if chunk.state is not None:
            moved += self._state.nbytes(len(chunk.state[0]), self._span(self._state, chunk))
        return moved + len(chunk.aux) * self.local.aux.item_bytes

    def pieces(self, chunk: Chunk) -> int:
        """In how many pieces a plain chunk moves, where no neighbours merge."""
        return len(chunk.local_pages) * self._page_pieces + len(chunk.aux)

    def pages_within(self, nbytes: int, pieces: int) -> int:
        """How many pages, wherever they lie, have at most so many bytes and pieces; 0 where no page moves."""
        if not self._pages.item_bytes:
            return 0
        return min(nbytes // self._pages.item_bytes, pieces // self._page_pieces)

    @property
    def can_stage(self) -> bool:
        """Whether a write may gather its pages first: a page of theirs is strips of ours."""
        return self._pages.scatters

    def worth_staging(self, remote_pages: Ids) -> bool:
        """Whether to gather these pages is faster than to send strips: where those are many and small."""
        return (
            self.can_stage
            and self._pages.widest <= STAGED_STRIP_BYTES
            and self._pages.fewer(np.sort(remote_pages)) >= STAGED_FEWER
        )

    def stage(self, chunk: Chunk, slot: Reservation) -> Chunk:
        """Gather the pages of a chunk that `cut` made with `gather` into a slot, to be sent from there.

        Raises LayoutError as `check` does, before anything is copied.
        """
        self.check(replace(chunk, staged=slot))
        self._pages.gather(chunk.local_pages, slot.bytes, self._span(self._pages, chunk))
        return replace(chunk, staged=slot)

    def cut(
        self,
        local_pages: Ids,
        remote_pages: Ids,
        aux: tuple[int, int] | None = None,
        state: tuple[Ids, Ids] | None = None,
        *,
        gather: bool = False,
        within: Span | None = None,
        state_within: Span | None = None,
    ) -> list[Chunk]:
        """Cut a request into chunks within `MAX_CHUNK_BYTES` and `MAX_CHUNK_DESCRIPTORS`; state and aux go last.

        One item of one region is never cut. There is no chunk where nothing is to be moved. gather: pages are to be
        gathered into slots. within: only these regions of pages. state_within: only these rows of state. Raises
        LayoutError when two lists have different lengths.
        """
        _check_lengths("pages", local_pages, remote_pages)
        if len(local_pages) == 1 and state is None and not gather and within is None and self._page_fits():
            return [Chunk(local_pages, remote_pages, () if aux is None else (aux,))]
        spare = self.local.aux.item_bytes
        pages = self._pages.split(local_pages, remote_pages, spare, gather=gather, within=within)
        chunks = [Chunk(local, remote, span=span) for local, remote, span in pages]
        if state is not None:
            _check_lengths("state", *state)
            states = self._state.split(*state, spare, within=state_within)
            chunks = self._join(
                chunks, [Chunk(_NONE, _NONE, state=(local, remote), span=span) for local, remote, span in states]
            )
        if aux is not None:
            last = chunks.pop() if chunks else Chunk(_NONE, _NONE)
            chunks.append(replace(last, aux=(aux,)))
        return chunks

    def state_span(self, *, kv: bool, shares: bool, read: bool) -> Span | None:
        """Which rows of state this pair moves; None for all. See `pairing.Writer` for who moves what.

        kv: those that go with the pages. shares: those of regions that are cut; what is copied, one rank alone moves to
        each target. read: the target is ours, not theirs.
        """
        first, stop = 0 if kv else self._state_whole, self._state_whole
        if shares:
            ends = (self.remote, self.local) if read else (self.local, self.remote)
            stop = self._state.regions if copies_from(*ends) else self._state_split
        return None if (first, stop) == (0, self._state.regions) else (first, stop)

    def _page_fits(self) -> bool:
        nbytes = self._pages.item_bytes
        return nbytes > 0 and fits(self._page_pieces + 1, nbytes + self.local.aux.item_bytes)

    def _join(self, pages: list[Chunk], states: list[Chunk]) -> list[Chunk]:
        """Put little state into the last chunk of pages, so that it costs no chunk of its own."""
        if pages and len(states) == 1 and pages[-1].span is None and states[0].span is None:
            both = replace(pages[-1], state=states[0].state)
            if fits(len(self.runs(both).nbytes) + 1, self.nbytes(both) + self.local.aux.item_bytes):
                return [*pages[:-1], both]
        return pages + states

    def _span(self, pool: PoolPlan, chunk: Chunk) -> Span:
        return (0, pool.regions) if chunk.span is None else chunk.span


def _page_rows(memory: KVMemory, common: Overlap, whole: bool) -> list[Row]:
    """The common part of each KV region that both hold, by layer: pages, or strips of the heads in common."""
    rows = []
    for layer in range(common.first_layer, common.first_layer + (0 if common.empty else common.layers)):
        for part in range(memory.regions_per_layer):
            region = memory.kv[memory.region_of(layer, part)]
            if whole:
                rows.append(whole_row(region))
                continue
            token = region.item_bytes // memory.page_tokens
            head = token // memory.kv_heads
            offset = (common.first_head - memory.first_head) * head
            rows.append(Row(region.address + offset, common.heads * head, token, region.items * memory.page_tokens))
    return rows


def _firsts(pages: tuple[Row, ...], state: tuple[Row, ...], aux: Region) -> tuple[np.int32, np.int32]:
    """Numbers of the first piece of state and of the first aux row."""
    state_first = sum(row.pieces for row in pages)
    aux_first = state_first + sum(row.pieces for row in state)
    if aux_first + aux.items > MAX_ITEMS:
        raise LayoutError(f"the memory would be moved in {aux_first + aux.items} pieces, must be at most {MAX_ITEMS}")
    return np.int32(state_first), np.int32(aux_first)


def _check_lengths(name: str, local: Ids, remote: Ids) -> None:
    if len(local) != len(remote):
        raise LayoutError(f"local_{name} has {len(local)} ids and remote_{name} {len(remote)}, must be as many")


def _check_pair(name: str, local: Ids, remote: Ids, local_limit: int, remote_limit: int) -> None:
    _check_ids(f"local_{name}", local, local_limit)
    _check_ids(f"remote_{name}", remote, remote_limit)
    _check_lengths(name, local, remote)


def _refuse_twice(name: str, local: Ids, remote: Ids, read: bool) -> None:
    if len(remote) > 1:
        field, target = (f"local_{name}", local) if read else (f"remote_{name}", remote)
        twice = named_twice(target)
        if len(twice):
            unit = {"pages": "page", "aux": "row"}.get(name, "item")
            raise LayoutError(f"{field} has {unit} {twice[0]} twice, every target {unit} may be written once")


def _check_ids(field: str, ids: Ids, limit: int) -> None:
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise LayoutError(f"{field} is a {ids.ndim}-dimensional array of {ids.dtype}, must be 1-dimensional int32")
    # As unsigned, negative ids are beyond every limit: one comparison does for both ends.
    if len(ids) and (int(ids[0]) & 0xFFFFFFFF if len(ids) == 1 else int(ids.view(np.uint32).max())) >= limit:
        at = int(np.flatnonzero(ids.view(np.uint32) >= limit)[0])
        allowed = f"0..{limit - 1}" if limit else "left out: the memory has none"
        raise LayoutError(f"{field}[{at}] is {ids[at]}, must be {allowed}")


def _check_slot(field: str, slot: int, limit: int) -> None:
    if not 0 <= slot < limit:
        raise LayoutError(f"{field} is {slot}, must be 0..{limit - 1}")
