"""Pair plans against moving each cell by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs
from pdpool_connector.layout import pool
from pdpool_connector.layout.checksum import MASK, PageSums
from pdpool_connector.layout.chunk import Chunk, StateItems, joined
from pdpool_connector.layout.memory import LayerHeads, LayoutError, Region, share_of_heads
from pdpool_connector.layout.pairing import pair, shard_model
from pdpool_connector.layout.plan import PairPlan
from pdpool_connector.layout.pool import MAX_CHUNK_BYTES, MAX_CHUNK_DESCRIPTORS

from tests.unit.layout.model import AUX_BYTES, Rank, apply_runs, moved_by_hand

# On a busy machine a deadline would fail at random; derandomised, a run can be repeated.
steady = settings(deadline=None, derandomize=True)
parts = settings(deadline=None, derandomize=True, max_examples=300)


def ids(*values):
    return np.array(values, np.int32)


def state(local, remote, span=None, pool=0):
    return (StateItems(pool, local, remote, span),)


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


def draft_heads(heads, first_head, kv_heads, layers):
    """Heads of layers with fewer heads of their own: those that meet the reference heads held."""
    found = []
    for total in layers:
        first, count = share_of_heads(first_head, kv_heads, heads, total)
        found.append(LayerHeads(count, 1 + total % 2, first, total))
    return tuple(found)


@st.composite
def pairs(draw):
    """Two memories with any parts of one model in any order of bytes, and a chunk between them."""
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    order = draw(st.sampled_from(["separate", "interleaved", "packed"]))
    sizes = {"separate": [(2, 2), (3, 1)] + [(5,)] * (heads == 1), "interleaved": [(2, 2), (3, 3)], "packed": [(3, 1)]}
    head_bytes = draw(st.sampled_from(sizes[order]))
    common = {
        "page_tokens": draw(st.integers(1, 3)),
        "kv_order": order,
        "layout": draw(st.sampled_from(["NHD", "HND"])),
    }
    same_part = draw(st.booleans())
    by_layer = draw(st.booleans())  # state is given by layer: 2 regions of even layers, none of odd ones
    aux = draw(st.sampled_from([(), (AUX_BYTES,), (3, AUX_BYTES, 5)]))
    own = draw(st.none() | st.lists(st.integers(1, heads), min_size=layers, max_size=layers))
    own = own if len(head_bytes) > 1 else None
    first_layer, held = draw(ranges(layers))
    first_head, kv_heads = draw(ranges(heads))
    ranks = []
    for seed, pages in enumerate((5, 7)):
        if seed and not same_part:
            first_layer, held = draw(ranges(layers))
            if not by_layer:
                first_head, kv_heads = draw(ranges(heads))
        whole_layers = range(first_layer, first_layer + held)
        state_layers = [layer for layer in whole_layers if not layer % 2 for _ in (0, 1)]
        if by_layer:
            sizes = [(6, 9)[at % 2] for at in range(len(state_layers))]
        else:
            sizes, state_layers = (6, 9) if same_part else (), ()
        heads_of = draft_heads(heads, first_head, kv_heads, own[first_layer:][:held]) if own else ()
        ranks.append(
            Rank(
                pages=pages,
                layers=held,
                kv_heads=kv_heads,
                first_layer=first_layer,
                total_layers=layers,
                first_head=first_head,
                total_heads=heads,
                heads=heads_of,
                head_bytes=head_bytes,
                state=sizes,
                state_layers=tuple(state_layers),
                more_state={"swa": (4,)} if same_part else None,
                state_items=3 + seed,
                aux=aux,
                seed=seed,
                **common,
            )
        )
    names = [[pool.name for pool in rank.memory.state] for rank in ranks]
    assume(names[0] == names[1])
    local, remote = draw(id_lists(5, 7))
    sources, targets = st.integers(0, 2), st.permutations(range(3))
    rows = tuple((draw(sources), slot) for slot in draw(targets)[: draw(st.integers(0, 3))]) if aux else ()
    moved = []
    for number in range(len(names[0])):
        if draw(st.booleans()):
            moved += state(*draw(id_lists(3, 4)), pool=number)
    return *ranks, Chunk(local, remote, rows, tuple(moved))


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
    chunk = replace(chunk, state=())
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
    assume(local.memory.aux)
    plan = PairPlan(local.memory, remote.memory)
    for page in range(5):
        chunk = Chunk(ids(page), ids(6 - page), ((ours, theirs),))
        for short, long in zip(plan.runs(chunk), plan._runs(chunk), strict=True):
            assert short.tolist() == long.tolist()
        for short, long in zip(plan.indices(chunk), plan._indices(chunk), strict=True):
            assert (short.tolist(), short.dtype) == (long.tolist(), np.int32)


@parts
@given(pairs())
def test_pieces_move_the_same_bytes_as_runs(pair):
    source, target, chunk = pair
    plan = PairPlan(source.memory, target.memory)
    local, remote = plan.indices(chunk)
    assert local.dtype == remote.dtype == np.int32
    pieces = [
        [(row.address + piece * row.stride, row.nbytes) for row in rows for piece in range(row.pieces)]
        for rows in (plan.groups[0].local_rows, plan.groups[0].remote_rows)
    ]
    moved = [(pieces[0][ours], pieces[1][theirs]) for ours, theirs in zip(local, remote, strict=True)]
    assert all(ours[1] == theirs[1] for ours, theirs in moved)
    columns = [(ours[0], theirs[0], ours[1]) for ours, theirs in moved]
    runs = pool.Runs(*(np.array(column, np.int64) for column in zip(*columns, strict=True))) if columns else None
    after = target.space if runs is None else apply_runs(source, target, runs)
    assert np.array_equal(after, moved_by_hand(source, target, chunk))
    assert plan.nbytes(chunk) == sum(nbytes for _, _, nbytes in columns)


def by_pool(rank, chunk):
    """The state of a chunk as `cut` takes it: ids of every pool, or nothing."""
    found = {items.pool: (items.local, items.remote) for items in chunk.state}
    return [found.get(pool, (ids(), ids())) for pool in range(len(rank.memory.state))] if found else ()


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
        chunks = plan.cut(
            chunk.local_pages, chunk.remote_pages, chunk.aux[0] if chunk.aux else None, by_pool(source, chunk)
        )
        for piece in chunks:
            plan.check(piece)
            target.space = apply_runs(source, target, plan.runs(piece))
            few = plan.nbytes(piece) <= 40 and len(plan.runs(piece).nbytes) <= 6
            spans = [piece.span, *(one.span for one in piece.state)]
            items = len(piece.local_pages) + sum(len(one.local) for one in piece.state)
            assert few or (items == 1 and 1 in [span[1] - span[0] for span in spans if span is not None])
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


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("draft", [1, 2, 4, 8])
@pytest.mark.parametrize("tps", [(1, 4), (4, 1), (2, 8), (8, 2), (8, 8), (4, 2)])
def test_each_head_of_a_draft_model_comes_from_exactly_one_rank(tps, draft, layout):
    prefill, decode = (shard_model([2], 8, tp=tp) for tp in tps)
    chunk = Chunk(ids(4, 0), ids(1, 2))
    sources, targets = (
        [rank_with_draft(shard, draft, layout, seed) for seed, shard in enumerate(side)] for side in (prefill, decode)
    )
    for target, writers in zip(targets, pair(prefill, decode), strict=True):
        written, sums = np.zeros(len(target.space), np.int64), 0
        for writer in writers:
            if not writer.kv:
                continue
            source = sources[writer.rank]
            plan = PairPlan(source.memory, target.memory)
            runs = plan.runs(chunk)
            target.space[:] = apply_runs(source, target, runs)
            sums += PageSums(source.memory).of_chunk(target.memory)(chunk)
            for start, count in zip(runs.remote.tolist(), runs.nbytes.tolist(), strict=True):
                written[start - target.base : start - target.base + count] += 1
        for region in target.memory.kv:
            start = region.address - target.base + region.item_bytes
            assert (written[start : start + 2 * region.item_bytes] == 1).all()
        assert written.sum() == 2 * target.memory.page_bytes
        assert sums & MASK == PageSums(target.memory).whole([1, 2])


def rank_with_draft(shard, draft, layout, seed):
    """A rank of a model whose second layer is a draft model's, with `draft` heads of another size."""
    first, count = shard.heads_of(draft)
    own = LayerHeads(shard.kv_heads, 1, shard.first_head, shard.total_heads), LayerHeads(count, 3, first, draft)
    fields = ("first_layer", "layers", "total_layers", "first_head", "kv_heads", "total_heads")
    share = {field: getattr(shard, field) for field in fields}
    return Rank(heads=own, layout=layout, head_bytes=(4, 4), seed=seed, **share)


def test_memories_with_nothing_in_common_exchange_aux_rows_only():
    first, second = instance(1, [3], heads=1, seed=1, state=(8,))
    plan = PairPlan(first.memory, second.memory)
    assert plan.cut(ids(1, 2), ids(3, 4)) == []
    (only,) = plan.cut(ids(1, 2), ids(3, 4), (0, 1), [(ids(1), ids(2))])
    plan.check(only)
    assert plan.runs(only).nbytes.tolist() == [AUX_BYTES]
    whole = Chunk(ids(1, 2), ids(3, 4), ((0, 1),), state(ids(1), ids(2)))
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
    state = [region for pool in memory.state for region in pool.regions]
    regions = tuple(Region((index + 1) << 44, item_bytes, pages) for index, region in enumerate((*memory.kv, *state)))
    count = len(memory.kv)
    pools = tuple(structs.replace(pool, regions=regions[count:]) for pool in memory.state)
    return structs.replace(memory, kv=regions[:count], state=pools)


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
    (only,) = plan.cut(pages, pages, (1, 1), [(ids(3), ids(5))])
    assert (len(only.local_pages), only.state[0].local.tolist(), only.aux) == (10, [3], ((1, 1),))
    memory = big(40, 2, 1 << 20, state=(1, 1))
    plan = PairPlan(memory, memory)
    chunks = plan.cut(pages, pages, (1, 1), [(pages, pages)])
    assert [(len(chunk.local_pages), sum(len(items.local) for items in chunk.state)) for chunk in chunks] == [
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
        ((ids(), ids(), None, [(ids(1, 2), ids(1))]), "local_state 'mamba' has 2 ids and remote_state 'mamba' 1"),
        ((ids(), ids(), None, [(ids(), ids())] * 2), "state has ids of 2 pools, must have them of all 1"),
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
        (Chunk(ids(), ids(), (), state(ids(4), ids(0))), "local_state 'mamba'[0] is 4, must be 0..3"),
        (Chunk(ids(), ids(), (), state(ids(0), ids(-1))), "remote_state 'mamba'[0] is -1, must be 0..5"),
        (Chunk(ids(), ids(), (), state(ids(0, 1), ids(5, 5))), "remote_state 'mamba' has item 5 twice"),
        (Chunk(ids(), ids(), (), state(ids(0, 1), ids(5))), "local_state 'mamba' has 2 ids and remote_state 'mamba' 1"),
        (Chunk(ids(1), ids(1), span=(0, 5)), "span is (0, 5), must be within 0..4"),
        (Chunk(ids(1), ids(1), span=(-1, 2)), "span is (-1, 2), must be within 0..4"),
        (
            Chunk(ids(), ids(), (), state(ids(0), ids(0), (0, 2))),
            "span of state 'mamba' is (0, 2), must be within 0..1",
        ),
        (Chunk(ids(), ids(), (), state(ids(0), ids(0), pool=1)), "state names pool 1, must be one of the memory's 1"),
        (Chunk(ids(), ids(), (), state(ids(0), ids(0)) * 2), "state names a pool twice, must name each pool once"),
        (Chunk(ids(1), ids(1), group=1), "chunk is of group 1 and names pages of group 0, must name one group only"),
    ],
)
def test_check_names_value_and_range_of_what_is_wrong(chunk, message):
    plan = PairPlan(Rank(pages=12, state=(8,)).memory, Rank(pages=17, state=(8,), state_items=6).memory)
    with pytest.raises(LayoutError) as caught:
        plan.check(chunk)
    assert message in str(caught.value)


def test_state_for_a_memory_without_any_is_refused():
    rank = Rank()
    with pytest.raises(LayoutError, match=r"state names pool 0, must be one of the memory's 0"):
        PairPlan(rank.memory, rank.memory).check(Chunk(ids(), ids(), (), state(ids(0), ids(0))))


def test_an_aux_slot_for_a_memory_without_aux_is_refused():
    rank = Rank(aux=())
    plan = PairPlan(rank.memory, rank.memory)
    (only,) = plan.cut(ids(1), ids(2), (0, 0))
    with pytest.raises(LayoutError, match="local aux slot is 0, must be left out: the memory has no aux rows"):
        plan.check(only)


def test_check_accepts_every_page_of_a_strided_view():
    plan = PairPlan(Rank(pages=12).memory, Rank(pages=17).memory)
    plan.check(Chunk(np.arange(12, dtype=np.int32)[::-1], np.arange(24, dtype=np.int32)[:24:2] // 2, ((2, 2),)))


def test_more_pieces_than_an_int32_can_number_are_refused():
    few = big(1 << 20, 8, 128 * 2, page_tokens=128, total_heads=2)
    with pytest.raises(LayoutError, match="would be moved in 2147483651 pieces, must be at most 2147483647"):
        PairPlan(few, big(1 << 20, 8, 128 * 4, page_tokens=128, kv_heads=2))
