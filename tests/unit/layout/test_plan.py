"""Block plans against the slow obvious way to compute them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdpool_connector.layout.memory import KVMemory, LayoutError, Region
from pdpool_connector.layout.plan import MAX_CHUNK_BYTES, MAX_CHUNK_DESCRIPTORS, PairPlan, compatible, split

# On a busy machine a deadline would fail at random; derandomised, a run can be repeated.
steady = settings(deadline=None, derandomize=True)


def memory(base, pages, sizes=(64, 32), aux_rows=4, **changes):
    """K pages of sizes[0] bytes, V pages of sizes[1], with a hole behind each region."""
    regions, address = [], base
    for index in range(2 * changes.get("layers", 2)):
        regions.append(Region(address, sizes[index % 2], pages))
        address = regions[-1].end + 128
    fields = {"page_tokens": 16, "layers": 2, "kv_heads": 1, "head_dim": 1, "dtype": "float32", "model": "m"}
    return KVMemory(kv=tuple(regions), aux=Region(address, 48, aux_rows), **{**fields, **changes})


def ids(*values):
    return np.array(values, np.int32)


@st.composite
def transfers(draw, pages_local=12, pages_remote=17):
    local = draw(st.lists(st.integers(0, pages_local - 1), max_size=pages_local))
    remote = draw(st.permutations(range(pages_remote)))[: len(local)]
    aux = draw(st.none() | st.tuples(st.integers(0, 3), st.integers(0, 5)))
    return ids(*local), ids(*remote), aux


def bytes_moved_slowly(local, remote, chunk):
    """Every (source byte, target byte), one by one."""
    local_pages, remote_pages, aux = chunk
    moved = set()
    for ours, theirs in zip(local.kv, remote.kv, strict=True):
        for source, target in zip(local_pages.tolist(), remote_pages.tolist(), strict=True):
            for byte in range(ours.item_bytes):
                moved.add(
                    (ours.address + source * ours.item_bytes + byte, theirs.address + target * theirs.item_bytes + byte)
                )
    if aux is not None:
        for byte in range(local.aux.item_bytes):
            moved.add((local.aux.address + aux[0] * 48 + byte, remote.aux.address + aux[1] * 48 + byte))
    return moved


@steady
@given(transfers())
def test_runs_move_exactly_the_bytes_of_the_chunk_and_each_once(chunk):
    local, remote = memory(0x1000, 12), memory(0x90000, 17, aux_rows=6)
    plan = PairPlan(local, remote)
    plan.check(*chunk)
    moved = [
        (source + byte, target + byte)
        for source, target, count in zip(*(column.tolist() for column in plan.runs(*chunk)), strict=True)
        for byte in range(count)
    ]
    assert len(moved) == len(set(moved))
    assert set(moved) == bytes_moved_slowly(local, remote, chunk)


@steady
@given(transfers())
def test_indices_number_the_items_region_by_region_and_aux_last(chunk):
    local, remote = memory(0x1000, 12), memory(0x90000, 17, aux_rows=6)
    ours, theirs = PairPlan(local, remote).indices(*chunk)
    assert ours.dtype == theirs.dtype == np.int32
    expected = [
        (region * 12 + source, region * 17 + target)
        for region in range(4)
        for source, target in zip(chunk[0].tolist(), chunk[1].tolist(), strict=True)
    ]
    if chunk[2] is not None:
        expected.append((4 * 12 + chunk[2][0], 4 * 17 + chunk[2][1]))
    assert list(zip(ours.tolist(), theirs.tolist(), strict=True)) == expected


@steady
@given(transfers())
def test_no_run_continues_the_one_before_it(chunk):
    local, remote = memory(0x1000, 12), memory(0x90000, 17, aux_rows=6)
    ours, theirs, count = PairPlan(local, remote).runs(chunk[0], chunk[1], None)
    continues = ((ours + count)[:-1] == ours[1:]) & ((theirs + count)[:-1] == theirs[1:])
    assert not continues.any()


@steady
@given(st.lists(st.integers(0, 400), unique=True, max_size=300), st.randoms(use_true_random=False))
def test_split_keeps_every_pair_once_within_both_bounds(local, random):
    remote = list(local)
    if random.random() < 0.5:
        random.shuffle(remote)
    big = memory(0x1000, 401, sizes=(1 << 19, 1 << 19))
    pieces = list(split(big, ids(*local), ids(*remote)))
    pairs = [pair for piece in pieces for pair in zip(*(side.tolist() for side in piece), strict=True)]
    assert sorted(pairs) == sorted(zip(local, remote, strict=True))
    for ours, _ in pieces:
        assert 1 <= len(ours) <= (MAX_CHUNK_BYTES - 48) // (4 << 19)


@steady
@given(st.integers(0, 2**32))
def test_split_bounds_the_descriptors_of_scattered_pages(seed):
    remote = np.random.default_rng(seed).permutation(300)
    many = memory(0x1000, 300, sizes=(8, 8), layers=20)
    plan = PairPlan(many, many)
    local = np.arange(300, dtype=np.int32)
    for ours, theirs in split(many, local, ids(*remote)):
        assert len(plan.runs(ours, theirs, (0, 0)).nbytes) <= MAX_CHUNK_DESCRIPTORS


def test_split_cuts_no_more_than_it_must():
    many = memory(0x1000, 3000, sizes=(8, 8), layers=20)
    ascending = np.arange(3000, dtype=np.int32)
    assert [len(ours) for ours, _ in split(many, ascending, ascending)] == [3000]
    assert [len(ours) for ours, _ in split(many, ascending[::-1], ascending[::-1])] == [3000], "sorted, so they merge"
    scattered = ascending[::2]
    assert [len(ours) for ours, _ in split(many, scattered, scattered)] == [25] * 60, "1023 // 40 regions = 25 runs"


def test_split_gives_a_page_beyond_every_bound_a_chunk_of_its_own():
    huge = memory(0x1000, 5, sizes=(1 << 25, 1 << 25))
    assert [len(ours) for ours, _ in split(huge, ids(1, 2, 3), ids(1, 2, 3))] == [1, 1, 1]
    assert list(split(huge, ids(), ids())) == []


def test_split_refuses_lists_that_do_not_pair_up():
    with pytest.raises(LayoutError, match="local_pages has 2 ids and remote_pages 1"):
        list(split(memory(0x1000, 5), ids(1, 2), ids(1)))


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ((ids(12), ids(0), None), "local_pages[0] is 12, must be 0..11"),
        ((ids(0, -1), ids(0, 1), None), "local_pages[1] is -1, must be 0..11"),
        ((ids(0), ids(17), None), "remote_pages[0] is 17, must be 0..16"),
        ((ids(0, 1), ids(0), None), "local_pages has 2 ids and remote_pages 1, must be as many"),
        ((ids(0, 1, 2), ids(5, 9, 5), None), "remote_pages has page 5 twice"),
        ((np.array([0]), ids(0), None), "local_pages is a 1-dimensional array of int64, must be 1-dimensional int32"),
        ((ids(0), np.zeros((1, 1), np.int32), None), "remote_pages is a 2-dimensional array of int32"),
        ((ids(), ids(), (4, 0)), "local aux slot is 4, must be 0..3"),
        ((ids(), ids(), (0, -1)), "remote aux slot is -1, must be 0..5"),
    ],
)
def test_check_names_value_and_range_of_what_is_wrong(chunk, message):
    plan = PairPlan(memory(0x1000, 12), memory(0x90000, 17, aux_rows=6))
    with pytest.raises(LayoutError) as caught:
        plan.check(*chunk)
    assert message in str(caught.value)


def test_check_accepts_every_page_of_a_strided_view():
    plan = PairPlan(memory(0x1000, 12), memory(0x90000, 17))
    plan.check(np.arange(12, dtype=np.int32)[::-1], np.arange(24, dtype=np.int32)[:24:2] // 2, (3, 3))


def test_equal_shapes_of_different_size_are_compatible():
    assert compatible(memory(0x1000, 12), memory(0x90000, 999, aux_rows=77)) == []


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"model": "other"}, ["model is 'm' here and 'other' at the peer"]),
        ({"dtype": "float16"}, ["dtype is 'float32' here and 'float16' at the peer"]),
        (
            {"page_tokens": 32, "head_dim": 2},
            ["page_tokens is 16 here and 32 at", "head_dim is 1 here and 2 at the peer"],
        ),
        (
            {"total_heads": 8, "first_head": 3},
            ["total_heads is 1 here and 8 at the peer", "first_head is 0 here and 3 at the peer"],
        ),
        (
            {"total_layers": 6, "first_layer": 4},
            ["total_layers is 2 here and 6 at the peer", "first_layer is 0 here and 4 at the peer"],
        ),
        (
            {"sizes": (64, 16)},
            ["kv region 1 is 32 here and 16 at the peer", "kv region 3 is 32 here and 16 at the peer"],
        ),
    ],
)
def test_every_mismatch_is_named_with_both_values(changes, lines):
    found = compatible(memory(0x1000, 12), memory(0x90000, 12, **changes))
    assert len(found) == len(lines)
    assert all(line in entry for line, entry in zip(lines, found, strict=True))
    with pytest.raises(LayoutError, match="memories cannot be paired"):
        PairPlan(memory(0x1000, 12), memory(0x90000, 12, **changes))
