"""Pair plans against moving each cell by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdpool_connector.layout import pool
from pdpool_connector.layout.memory import LayoutError
from pdpool_connector.layout.plan import Chunk, PairPlan, joined
from pdpool_connector.layout.pool import MAX_CHUNK_BYTES, MAX_CHUNK_DESCRIPTORS

from tests.unit.layout.model import AUX_BYTES, Rank, apply_runs, moved_by_hand

# On a busy machine a deadline would fail at random; derandomised, a run can be repeated.
steady = settings(deadline=None, derandomize=True)
parts = settings(deadline=None, derandomize=True, max_examples=300)


def ids(*values):
    return np.array(values, np.int32)


@st.composite
def ranges(draw, total):
    first = draw(st.integers(0, total - 1))
    return first, draw(st.integers(1, total - first))


@st.composite
def id_lists(draw, local_items, remote_items):
    """Lists that pair up, often in runs; a source may occur twice, a target not."""
    count = draw(st.integers(0, remote_items))
    if draw(st.booleans()):
        local = draw(st.lists(st.integers(0, local_items - 1), min_size=count, max_size=count))
        return ids(*local), ids(*draw(st.permutations(range(remote_items)))[:count])
    count = min(count, local_items)
    first, to = draw(st.integers(0, local_items - count)), draw(st.integers(0, remote_items - count))
    return ids(*range(first, first + count)), ids(*range(to, to + count))


@st.composite
def pairs(draw):
    """Two memories with any parts of one model, and a chunk between them."""
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    head_bytes = draw(st.sampled_from([(2, 2), (3, 1), (5,)]))
    page_tokens = draw(st.integers(1, 3))
    same_part = draw(st.booleans())
    by_layer = draw(st.booleans())  # state is told by layer: 2 regions of even layers, none of odd ones
    ranks = []
    for seed, pages in enumerate((5, 7)):
        if seed == 0 or not same_part:
            first_layer, held = draw(ranges(layers))
            if seed == 0 or not by_layer:
                first_head, kv_heads = draw(ranges(heads))
        state_layers = [layer for layer in range(first_layer, first_layer + held) if not layer % 2 for _ in (0, 1)]
        ranks.append(
            Rank(
                pages=pages,
                page_tokens=page_tokens,
                layers=held,
                kv_heads=kv_heads,
                first_layer=first_layer,
                total_layers=layers,
                first_head=first_head,
                total_heads=heads,
                head_bytes=head_bytes,
                state=[(6, 9)[at % 2] for at in range(len(state_layers))] if by_layer else (6, 9) if same_part else (),
                state_layers=tuple(state_layers) if by_layer else (),
                state_items=3 + seed,
                seed=seed,
            )
        )
    local, remote = draw(id_lists(5, 7))
    sources, targets = st.integers(0, 2), st.permutations(range(3))
    aux = tuple((draw(sources), slot) for slot in draw(targets)[: draw(st.integers(0, 3))])
    stateful = all(rank.memory.state for rank in ranks)
    state = draw(st.none() | id_lists(3, 4)) if stateful else None
    return *ranks, Chunk(local, remote, aux, state)


@parts
@given(pairs())
def test_runs_give_every_cell_that_both_hold_and_touch_nothing_else(pair):
    source, target, chunk = pair
    plan = PairPlan(source.memory, target.memory)
    plan.check(chunk)
    assert np.array_equal(apply_runs(source, target, plan.runs(chunk)), moved_by_hand(source, target, chunk))


@parts
@given(pairs(), st.integers(0, 5))
def test_joined_chunks_move_what_each_of_them_does(pair, at):
    source, target, chunk = pair
    chunk = replace(chunk, state=None)
    local, remote = chunk.local_pages, chunk.remote_pages
    parts = [Chunk(local[:at], remote[:at], chunk.aux[:1]), Chunk(local[at:], remote[at:], chunk.aux[1:])]
    plan, whole = PairPlan(source.memory, target.memory), joined(parts)
    plan.check(whole)
    assert np.array_equal(apply_runs(source, target, plan.runs(whole)), moved_by_hand(source, target, chunk))
    assert plan.nbytes(whole) == sum(map(plan.nbytes, parts))
    assert len(plan.indices(whole)[0]) == plan.pieces(whole) == sum(map(plan.pieces, parts))


@parts
@given(pairs(), st.integers(0, 2), st.integers(0, 2))
def test_one_page_with_its_aux_row_has_the_runs_of_the_longer_way(pair, ours, theirs):
    local, remote, _ = pair
    plan = PairPlan(local.memory, remote.memory)
    for page in range(5):
        chunk = Chunk(ids(page), ids(6 - page), ((ours, theirs),))
        for short, long in zip(plan.runs(chunk), plan._runs(chunk), strict=True):
            assert short.tolist() == long.tolist()


@parts
@given(pairs())
def test_pieces_move_the_same_bytes_as_runs(pair):
    source, target, chunk = pair
    plan = PairPlan(source.memory, target.memory)
    local, remote = plan.indices(chunk)
    assert local.dtype == remote.dtype == np.int32
    pieces = [
        [(row.address + piece * row.stride, row.nbytes) for row in rows for piece in range(row.pieces)]
        for rows in (plan.local_rows, plan.remote_rows)
    ]
    moved = [(pieces[0][ours], pieces[1][theirs]) for ours, theirs in zip(local, remote, strict=True)]
    assert all(ours[1] == theirs[1] for ours, theirs in moved)
    columns = [(ours[0], theirs[0], ours[1]) for ours, theirs in moved]
    runs = pool.Runs(*(np.array(column, np.int64) for column in zip(*columns, strict=True))) if columns else None
    after = target.space if runs is None else apply_runs(source, target, runs)
    assert np.array_equal(after, moved_by_hand(source, target, chunk))
    assert plan.nbytes(chunk) == sum(nbytes for _, _, nbytes in columns)


@parts
@given(pairs())
def test_chunks_of_a_request_move_the_same_bytes_as_one(pair):
    source, target, chunk = pair
    chunk = replace(chunk, aux=chunk.aux[:1])
    plan = PairPlan(source.memory, target.memory)
    wanted = moved_by_hand(source, target, chunk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "MAX_CHUNK_BYTES", 40)
        patch.setattr(pool, "MAX_CHUNK_DESCRIPTORS", 6)
        chunks = plan.cut(chunk.local_pages, chunk.remote_pages, chunk.aux[0] if chunk.aux else None, chunk.state)
        for piece in chunks:
            plan.check(piece)
            target.space = apply_runs(source, target, plan.runs(piece))
            few = plan.nbytes(piece) <= 40 and len(plan.runs(piece).nbytes) <= 6
            items = sum(len(some) for some in (piece.local_pages, *(piece.state or ())[:1]))
            assert few or (items == 1 and piece.span is not None and piece.span[1] - piece.span[0] == 1)
    assert np.array_equal(target.space, wanted)


def instance(tp, layer_cuts, heads, seed, **fields):
    """All ranks of an instance: heads divided by `tp`, layers at `layer_cuts`."""
    bounds = [*layer_cuts, 6]
    return [
        Rank(
            layers=stop - start,
            first_layer=start,
            total_layers=6,
            kv_heads=heads // tp,
            first_head=rank * heads // tp,
            total_heads=heads,
            seed=seed + 10 * start + rank,
            **fields,
        )
        for start, stop in zip([0, *layer_cuts], bounds, strict=True)
        for rank in range(tp)
    ]


@pytest.mark.parametrize("page_tokens", [1, 4])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((1, []), (2, [])),
        ((2, []), (1, [])),
        ((2, []), (3, [])),
        ((6, []), (2, [1])),
        ((1, [1, 2]), (1, [4])),
        ((2, [5]), (3, [1, 3])),
    ],
)
def test_every_cell_of_every_decode_rank_comes_from_exactly_one_prefill_rank(prefill, decode, page_tokens):
    writers = instance(*prefill, heads=6, seed=1, page_tokens=page_tokens)
    chunk = Chunk(ids(4, 0, 1), ids(1, 2, 3))
    for target in instance(*decode, heads=6, seed=1000, page_tokens=page_tokens):
        written = np.zeros(len(target.space), np.int64)
        for source in writers:
            plan = PairPlan(source.memory, target.memory)
            runs = plan.runs(chunk)
            assert np.array_equal(apply_runs(source, target, runs), moved_by_hand(source, target, chunk))
            for start, count in zip(runs.remote.tolist(), runs.nbytes.tolist(), strict=True):
                written[start - target.base : start - target.base + count] += 1
        cells = np.zeros(len(target.space), np.int64)
        for region in target.memory.kv:
            for page in (1, 2, 3):
                start = region.address - target.base + page * region.item_bytes
                cells[start : start + region.item_bytes] = 1
        assert np.array_equal(written, cells)


def test_memories_with_nothing_in_common_exchange_aux_rows_only():
    first, second = instance(1, [3], heads=1, seed=1, state=(8,))
    plan = PairPlan(first.memory, second.memory)
    assert plan.cut(ids(1, 2), ids(3, 4)) == []
    (only,) = plan.cut(ids(1, 2), ids(3, 4), (0, 1), (ids(1), ids(2)))
    plan.check(only)
    assert plan.runs(only).nbytes.tolist() == [AUX_BYTES]
    whole = Chunk(ids(1, 2), ids(3, 4), ((0, 1),), (ids(1), ids(2)))
    plan.check(whole)
    assert plan.runs(whole).nbytes.tolist() == [AUX_BYTES]
    assert [len(side) for side in plan.indices(whole)] == [1, 1]


@steady
@given(id_lists(12, 17))
def test_no_run_of_whole_pages_continues_the_one_before_it(lists):
    plan = PairPlan(Rank(pages=12).memory, Rank(pages=17).memory)
    ours, theirs, count = plan.runs(Chunk(*lists))
    continues = ((ours + count)[:-1] == ours[1:]) & ((theirs + count)[:-1] == theirs[1:])
    assert not continues.any()


def test_pages_in_a_row_are_one_run_for_each_region():
    plan = PairPlan(Rank(pages=12).memory, Rank(pages=17).memory)
    runs = plan.runs(Chunk(ids(3, 4, 5, 9), ids(6, 7, 8, 10)))
    assert runs.nbytes.tolist() == [12, 4] * 4


def big(pages, layers, item_bytes, **fields):
    """As a memory alone: these sizes are not for bytes."""
    memory = Rank(pages=1, layers=layers, head_bytes=(2, 2), **fields).memory
    regions = tuple(
        type(region)((index + 1) << 44, item_bytes, pages) for index, region in enumerate((*memory.kv, *memory.state))
    )
    count = len(memory.kv)
    changes = {field: getattr(memory, field) for field in memory.__struct_fields__}
    return type(memory)(**{**changes, "kv": regions[:count], "state": regions[count:]})


def sizes(chunks):
    return [len(chunk.local_pages) for chunk in chunks]


@steady
@given(st.lists(st.integers(0, 400), unique=True, max_size=300), st.randoms(use_true_random=False))
def test_cut_keeps_every_pair_once_within_the_bound_of_bytes(local, random):
    remote = list(local)
    if random.random() < 0.5:
        random.shuffle(remote)
    memory = big(401, 2, 1 << 19)
    chunks = PairPlan(memory, memory).cut(ids(*local), ids(*remote))
    moved = [pair for chunk in chunks for pair in zip(chunk.local_pages, chunk.remote_pages, strict=True)]
    assert sorted(moved) == sorted(zip(local, remote, strict=True))
    assert all(1 <= size <= (MAX_CHUNK_BYTES - AUX_BYTES) // (4 << 19) for size in sizes(chunks))


@steady
@given(st.integers(0, 2**32))
def test_cut_bounds_the_descriptors_of_scattered_pages(seed):
    remote = np.random.default_rng(seed).permutation(300)
    memory = big(300, 20, 8)
    plan = PairPlan(memory, memory)
    for chunk in plan.cut(np.arange(300, dtype=np.int32), ids(*remote), (0, 0)):
        assert len(plan.runs(chunk).nbytes) <= MAX_CHUNK_DESCRIPTORS


def test_cut_cuts_no_more_than_it_must():
    memory = big(3000, 20, 8)
    plan = PairPlan(memory, memory)
    ascending = np.arange(3000, dtype=np.int32)
    assert sizes(plan.cut(ascending, ascending)) == [3000]
    assert sizes(plan.cut(ascending[::-1], ascending[::-1])) == [3000], "sorted, so they merge"
    assert sizes(plan.cut(ascending[::2], ascending[::2])) == [25] * 60, "1023 // 40 regions = 25 runs"


def test_strips_count_as_descriptors():
    one = big(100, 4, 16 * 2, page_tokens=16, total_heads=2)
    two = big(100, 4, 16 * 4, page_tokens=16, kv_heads=2)
    pages = np.arange(100, dtype=np.int32)
    for plan in (PairPlan(one, two), PairPlan(two, one)):
        chunks = plan.cut(pages, pages, (0, 0))
        assert sizes(chunks) == [7] * 14 + [2], "1023 // (8 regions * 16 strips) = 7 pages"
        assert [len(plan.runs(chunk).nbytes) for chunk in chunks] == [896] * 14 + [257]
        assert sum(plan.nbytes(chunk) for chunk in chunks) == 100 * 8 * 32 + AUX_BYTES


def test_a_page_beyond_the_bounds_is_cut_by_regions():
    huge = big(5, 5, 3 << 20)
    plan = PairPlan(huge, huge)
    chunks = plan.cut(ids(1, 2), ids(3, 4), (0, 0))
    assert [chunk.span for chunk in chunks] == [(0, 5), (5, 10)] * 2
    assert [chunk.aux for chunk in chunks] == [(), (), (), ((0, 0),)]


def test_an_item_of_one_region_beyond_the_bound_is_a_chunk_of_its_own():
    huge = big(5, 1, 1 << 25)
    plan = PairPlan(huge, huge)
    assert [(len(chunk.local_pages), chunk.span) for chunk in plan.cut(ids(1, 2), ids(1, 2))] == [
        (1, (0, 1)),
        (1, (1, 2)),
    ] * 2
    assert plan.cut(ids(), ids()) == []


def test_little_state_goes_with_the_last_pages_and_much_state_apart():
    rank = Rank(pages=40, state=(8, 8), state_items=40)
    plan = PairPlan(rank.memory, rank.memory)
    pages = np.arange(10, dtype=np.int32)
    (only,) = plan.cut(pages, pages, (1, 1), (ids(3), ids(5)))
    assert (len(only.local_pages), only.state[0].tolist(), only.aux) == (10, [3], ((1, 1),))
    memory = big(40, 2, 1 << 20, state=(1, 1))
    plan = PairPlan(memory, memory)
    chunks = plan.cut(pages, pages, (1, 1), (pages, pages))
    assert [(len(chunk.local_pages), len(chunk.state[0]) if chunk.state else 0) for chunk in chunks] == [
        (4, 0),
        (4, 0),
        (2, 0),
        (0, 8),
        (0, 2),
    ]
    assert [chunk.aux for chunk in chunks] == [()] * 4 + [((1, 1),)]


def test_aux_goes_last_and_alone_where_there_is_nothing_else():
    memory = big(64, 1, 1 << 20)
    plan = PairPlan(memory, memory)
    pages = np.arange(20, dtype=np.int32)
    chunks = plan.cut(pages, pages, (1, 2))
    assert sizes(chunks) == [8, 8, 4], "8 pages of 2 MiB and an aux row are one chunk"
    assert [chunk.aux for chunk in chunks] == [(), (), ((1, 2),)]
    (only,) = plan.cut(ids(), ids(), (0, 2))
    assert (sizes([only]), only.aux) == ([0], ((0, 2),))
    assert plan.cut(ids(), ids()) == []


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ((ids(1, 2), ids(1)), "local_pages has 2 ids and remote_pages 1"),
        ((ids(), ids(), (), (ids(1, 2), ids(1))), "local_state has 2 ids and remote_state 1"),
    ],
)
def test_cut_refuses_lists_that_do_not_pair_up(lists, message):
    rank = Rank(state=(8,))
    with pytest.raises(LayoutError, match=message):
        PairPlan(rank.memory, rank.memory).cut(*lists)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk(ids(12), ids(0)), "local_pages[0] is 12, must be 0..11"),
        (Chunk(ids(0, -1), ids(0, 1)), "local_pages[1] is -1, must be 0..11"),
        (Chunk(ids(0), ids(17)), "remote_pages[0] is 17, must be 0..16"),
        (Chunk(ids(0, 1), ids(0)), "local_pages has 2 ids and remote_pages 1, must be as many"),
        (Chunk(ids(0, 1, 2), ids(5, 9, 5)), "remote_pages has page 5 twice"),
        (Chunk(np.array([0]), ids(0)), "local_pages is a 1-dimensional array of int64, must be 1-dimensional int32"),
        (Chunk(ids(0), np.zeros((1, 1), np.int32)), "remote_pages is a 2-dimensional array of int32"),
        (Chunk(ids(), ids(), ((3, 0),)), "local aux slot is 3, must be 0..2"),
        (Chunk(ids(), ids(), ((0, -1),)), "remote aux slot is -1, must be 0..2"),
        (Chunk(ids(), ids(), ((0, 1), (2, 1))), "remote_aux has row 1 twice"),
        (Chunk(ids(), ids(), (), (ids(4), ids(0))), "local_state[0] is 4, must be 0..3"),
        (Chunk(ids(), ids(), (), (ids(0), ids(-1))), "remote_state[0] is -1, must be 0..5"),
        (Chunk(ids(), ids(), (), (ids(0, 1), ids(5, 5))), "remote_state has item 5 twice"),
        (Chunk(ids(), ids(), (), (ids(0, 1), ids(5))), "local_state has 2 ids and remote_state 1"),
        (Chunk(ids(1), ids(1), span=(0, 5)), "span is (0, 5), must be within 0..4"),
        (Chunk(ids(1), ids(1), span=(-1, 2)), "span is (-1, 2), must be within 0..4"),
        (Chunk(ids(), ids(), (), (ids(0), ids(0)), span=(0, 2)), "span is (0, 2), must be within 0..1"),
        (Chunk(ids(1), ids(1), (), (ids(0), ids(0)), span=(0, 1)), "span is given for pages and state"),
    ],
)
def test_check_names_value_and_range_of_what_is_wrong(chunk, message):
    plan = PairPlan(Rank(pages=12, state=(8,)).memory, Rank(pages=17, state=(8,), state_items=6).memory)
    with pytest.raises(LayoutError) as caught:
        plan.check(chunk)
    assert message in str(caught.value)


def test_a_read_may_fetch_a_page_twice_but_put_none_in_one_place_twice():
    rank = Rank(pages=12, state=(8,))
    plan = PairPlan(rank.memory, rank.memory)
    plan.check(Chunk(ids(1, 2), ids(5, 5), (), (ids(0, 1), ids(2, 2))), read=True)
    with pytest.raises(LayoutError, match="local_pages has page 5 twice"):
        plan.check(Chunk(ids(5, 5), ids(1, 2)), read=True)
    with pytest.raises(LayoutError, match="local_state has item 1 twice"):
        plan.check(Chunk(ids(), ids(), (), (ids(1, 1), ids(1, 2))), read=True)


def test_state_for_a_memory_without_any_is_refused():
    rank = Rank()
    with pytest.raises(LayoutError, match=r"local_state\[0\] is 0, must be left out: the memory has none"):
        PairPlan(rank.memory, rank.memory).check(Chunk(ids(), ids(), (), (ids(0), ids(0))))


def test_check_accepts_every_page_of_a_strided_view():
    plan = PairPlan(Rank(pages=12).memory, Rank(pages=17).memory)
    plan.check(Chunk(np.arange(12, dtype=np.int32)[::-1], np.arange(24, dtype=np.int32)[:24:2] // 2, ((2, 2),)))


def test_more_pieces_than_an_int32_can_number_are_refused():
    few = big(1 << 20, 8, 128 * 2, page_tokens=128, total_heads=2)
    with pytest.raises(LayoutError, match="would be moved in 2147483651 pieces, must be at most 2147483647"):
        PairPlan(few, big(1 << 20, 8, 128 * 4, page_tokens=128, kv_heads=2))
