"""Pairing of instances: who writes what to whom, for every shape that engines use, and for random ones."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from pdpool_connector.layout.memory import LayoutError
from pdpool_connector.layout.pairing import ModelShard, Writer, check_instance, pair, shard_model


def kv_writers(prefill, decode) -> list[list[int]]:
    return [[writer.rank for writer in writers if writer.kv] for writers in pair(prefill, decode)]


def aux_writers(prefill, decode) -> list[int]:
    found = [[writer.rank for writer in writers if writer.aux] for writers in pair(prefill, decode)]
    assert all(len(ranks) == 1 for ranks in found)
    return [ranks[0] for ranks in found]


def test_one_rank_serves_one_rank() -> None:
    assert pair(shard_model([4], 2), shard_model([4], 2)) == ((Writer(0, 0, 1, kv=True, aux=True),),)


def test_equal_tensor_parallel_instances_pair_rank_by_rank() -> None:
    assert pair(shard_model([4], 8, tp=2), shard_model([4], 8, tp=2)) == (
        (Writer(0, 0, 1, kv=True, aux=True),),
        (Writer(1, 0, 1, kv=True, aux=True),),
    )


def test_a_prefill_rank_serves_all_decode_ranks_that_share_its_heads() -> None:
    assert pair(shard_model([4], 8, tp=2), shard_model([4], 8, tp=4)) == (
        (Writer(0, 0, 2, kv=True, aux=True),),
        (Writer(0, 1, 2, kv=True, aux=True),),
        (Writer(1, 0, 2, kv=True, aux=True),),
        (Writer(1, 1, 2, kv=True, aux=True),),
    )


def test_a_decode_rank_gathers_its_heads_from_several_prefill_ranks_and_aux_from_one() -> None:
    assert pair(shard_model([4], 8, tp=4), shard_model([4], 8, tp=2)) == (
        (Writer(0, 0, 1, kv=True, aux=True), Writer(1, 0, 1, kv=True, aux=False)),
        (Writer(2, 0, 1, kv=True, aux=False), Writer(3, 0, 1, kv=True, aux=True)),
    )


def test_heads_that_do_not_align_come_from_both_neighbours() -> None:
    assert kv_writers(shard_model([4], 6, tp=2), shard_model([4], 6, tp=3)) == [[0], [0, 1], [1]]


def test_aux_of_a_first_stage_comes_from_a_prefill_rank_that_writes_nothing_else_there() -> None:
    prefill = decode = shard_model([3, 2], 2)
    assert pair(prefill, decode) == (
        (Writer(0, 0, 1, kv=True, aux=False), Writer(1, 0, 2, kv=False, aux=True)),
        (Writer(1, 1, 2, kv=True, aux=True),),
    )


def test_unequal_layer_splits_pair_by_layers() -> None:
    assert kv_writers(shard_model([3, 2, 3], 2), shard_model([4, 4], 2)) == [[0, 1], [1, 2]]


def test_stages_on_one_side_only() -> None:
    assert kv_writers(shard_model([3, 5], 2), shard_model([8], 2)) == [[0, 1]]
    assert aux_writers(shard_model([3, 5], 2), shard_model([8], 2)) == [1]
    assert kv_writers(shard_model([8], 2), shard_model([3, 5], 2)) == [[0], [0]]


def test_a_mix_of_stages_and_tensor_ranks() -> None:
    prefill, decode = shard_model([4, 4], 8, tp=2), shard_model([8], 8, tp=4)
    assert kv_writers(prefill, decode) == [[0, 2], [0, 2], [1, 3], [1, 3]]
    assert aux_writers(prefill, decode) == [2, 2, 3, 3]


def test_replicas_of_one_head_take_the_decode_ranks_in_turn() -> None:
    assert kv_writers(shard_model([4], 1, tp=2), shard_model([4], 1, tp=4)) == [[0], [1], [0], [1]]


def test_a_replica_that_nobody_needs_serves_one_decode_rank_with_nothing() -> None:
    assert pair(shard_model([4], 1, tp=4), shard_model([4], 1, tp=2)) == (
        (Writer(0, 0, 1, kv=True, aux=True), Writer(2, 0, 1, kv=False, aux=False)),
        (Writer(1, 0, 1, kv=True, aux=True), Writer(3, 0, 1, kv=False, aux=False)),
    )


def test_fewer_heads_than_tensor_ranks_are_replicated_in_neighbours() -> None:
    assert [part.first_head for part in shard_model([4], 2, tp=4)] == [0, 0, 1, 1]
    assert kv_writers(shard_model([4], 2, tp=4), shard_model([4], 2, tp=4)) == [[0], [1], [2], [3]]
    assert kv_writers(shard_model([4], 2, tp=4), shard_model([4], 2, tp=1)) == [[0, 2]]


def test_replicas_are_spread_however_the_decode_ranks_are_numbered() -> None:
    stage0, _, stage1, _ = shard_model([2, 2], 1, tp=2)
    assert kv_writers(shard_model([2, 2], 1, tp=2), [stage0, stage1, stage0, stage1]) == [[0], [2], [1], [3]]


@st.composite
def models(draw) -> tuple[tuple[ModelShard, ...], tuple[ModelShard, ...]]:
    """Two instances of one model, their ranks in any order."""
    layers, heads = draw(st.integers(1, 8)), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    return tuple(draw(instances(layers, heads)) for _ in range(2))  # type: ignore[return-value]


@st.composite
def instances(draw, layers: int, heads: int) -> tuple[ModelShard, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=3))) if layers > 1 else []
    stages = [end - first for first, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    tp = draw(st.sampled_from([tp for tp in (1, 2, 3, 4, 6, 8) if not (heads % tp and tp % heads)]))
    return tuple(draw(st.permutations(shard_model(stages, heads, tp=tp))))


def cells(part: ModelShard) -> set[tuple[int, int]]:
    return {
        (layer, head)
        for layer in range(part.first_layer, part.layer_end)
        for head in range(part.first_head, part.head_end)
    }


@given(models())
def test_every_cell_has_one_writer_every_decode_rank_one_for_aux_and_no_prefill_rank_is_left_out(both) -> None:
    prefill, decode = both
    pairs = pair(prefill, decode)
    served: dict[int, list[int]] = {}
    for held, writers in zip(decode, pairs, strict=True):
        written = Counter(cell for writer in writers if writer.kv for cell in cells(prefill[writer.rank]) & cells(held))
        assert written == Counter(cells(held))
        assert all(cells(prefill[writer.rank]) & cells(held) for writer in writers if writer.kv)
        (aux,) = [writer for writer in writers if writer.aux]
        assert prefill[aux.rank].layer_end == prefill[aux.rank].total_layers
        for writer in writers:
            served.setdefault(writer.rank, []).append(writer.rank_index)
            assert writer.rank_count == sum(writer.rank == other.rank for row in pairs for other in row)
    assert set(served) == set(range(len(prefill)))
    assert all(parts == list(range(len(parts))) for parts in served.values())


@given(models())
def test_replicas_share_the_work(both) -> None:
    prefill, decode = both
    load = Counter(rank for ranks in kv_writers(prefill, decode) for rank in ranks)
    for part in set(prefill):
        loads = [load[rank] for rank, other in enumerate(prefill) if other == part]
        assert max(loads) - min(loads) <= 1


def test_instances_of_different_models_do_not_pair() -> None:
    with pytest.raises(LayoutError, match="total_layers is 4 at prefill and 5 at decode"):
        pair(shard_model([4], 2), shard_model([5], 2))
    with pytest.raises(LayoutError, match="total_heads is 2 at prefill and 4 at decode"):
        pair(shard_model([4], 2), shard_model([4], 4))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([], "decode has 0 ranks"),
        (shard_model([2, 2], 2)[:1], "layers of decode: from 2 to 3 no rank"),
        (shard_model([2, 2], 2)[1:], "layers of decode: from 0 to 1 no rank"),
        (shard_model([4], 4, tp=2)[1:], "heads of decode in layers 0..3: from 0 to 1 no rank"),
        ([*shard_model([4], 2), *shard_model([2, 2], 2)], "layers of decode: 0 is held by ranks that are no"),
        ([*shard_model([4], 2), *shard_model([4], 2, tp=2)], "heads of decode in layers 0..3: 0 is held by"),
        ([*shard_model([4], 2), *shard_model([5], 2)], "disagree"),
    ],
)
def test_an_instance_that_is_not_whole_is_refused(parts, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        check_instance("decode", parts)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"first_layer": 3}, r"first_layer is 3, must be 0\.\.2 for 2 of 4 layers"),
        ({"first_layer": -1}, "first_layer is -1"),
        ({"kv_heads": 3}, r"kv_heads is 3, must be 1\.\.total_heads = 2"),
        ({"first_head": 2}, "first_head is 2"),
        ({"total_layers": 1 << 20}, "total_layers is 1048576"),
        ({"total_heads": 0}, "total_heads is 0"),
    ],
)
def test_a_part_outside_its_model_is_refused(change, why: str) -> None:
    right = {"first_layer": 0, "layers": 2, "total_layers": 4, "first_head": 0, "kv_heads": 2, "total_heads": 2}
    with pytest.raises(LayoutError, match=why):
        ModelShard(**right | change)


def test_heads_that_cannot_be_spread_evenly_are_refused() -> None:
    with pytest.raises(LayoutError, match="heads is 9, must be a multiple or a divisor of tp = 2"):
        shard_model([4], 9, tp=2)


def flags(prefill, decode) -> list[list[tuple[int, bool, bool]]]:
    return [[(writer.rank, writer.kv, writer.state) for writer in writers] for writers in pair(prefill, decode)]


def stateful(heads: int, tp: int, layers=(4,)) -> tuple[ModelShard, ...]:
    return shard_model(layers, heads, tp=tp, split_state=True)


def test_state_is_shared_out_by_ranks_where_heads_are_replicated() -> None:
    assert flags(stateful(2, 4), stateful(2, 2)) == [
        [(0, True, True), (1, False, True)],
        [(2, True, True), (3, False, True)],
    ]
    assert flags(stateful(2, 2), stateful(2, 4)) == [
        [(0, True, True)],
        [(0, True, True)],
        [(1, True, True)],
        [(1, True, True)],
    ]


def test_of_replicated_cells_each_decode_rank_gets_those_of_a_rank_that_writes_its_state() -> None:
    assert flags(stateful(1, 4), stateful(1, 2)) == [
        [(0, True, True), (1, False, True)],
        [(2, False, True), (3, True, True)],
    ]
    assert flags(stateful(1, 4), stateful(1, 4)) == [[(rank, True, True)] for rank in range(4)]


def test_shares_that_do_not_align_come_from_both_neighbours() -> None:
    assert flags(stateful(1, 2), stateful(1, 3)) == [
        [(0, True, True)],
        [(0, False, True), (1, True, True)],
        [(1, True, True)],
    ]


def test_shares_pair_by_their_number_however_the_ranks_are_ordered() -> None:
    assert flags(stateful(1, 2)[::-1], stateful(1, 2)) == [[(1, True, True)], [(0, True, True)]]


def test_state_that_every_rank_has_comes_from_one_rank_that_writes_cells_too() -> None:
    prefill, decode = ([structs.replace(part, state_ranks=1) for part in shard_model([4], 4, tp=tp)] for tp in (4, 2))
    assert flags(prefill, decode) == [[(0, True, True), (1, True, False)], [(2, True, False), (3, True, True)]]


def test_state_in_stages_comes_from_those_that_hold_the_layers() -> None:
    assert flags(stateful(1, 2, [2, 2]), stateful(1, 1, [3, 1])) == [
        [(0, True, True), (1, False, True), (2, True, True), (3, False, True)],
        [(2, False, True), (3, True, True)],
    ]


def test_no_rank_writes_shares_where_no_state_is_cut() -> None:
    assert not any(
        writer.state for writers in pair(shard_model([4], 2, tp=4), shard_model([4], 2)) for writer in writers
    )


def test_an_instance_that_says_nothing_of_cut_state_is_not_paired_with_one_that_does() -> None:
    with pytest.raises(LayoutError, match="state_ranks is 2 at prefill and 0 at decode, must be 0 on both sides or on"):
        pair(stateful(2, 2), shard_model([4], 2, tp=2))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (stateful(1, 4)[:3], r"shares of the state of decode in layers 0\.\.3: from 3 to 3 no rank holds them"),
        ([*stateful(1, 4), *stateful(1, 2)], "disagree on .*state_ranks"),
        ([*stateful(1, 2, [2, 2])[:3]], r"shares of the state of decode in layers 2\.\.3: from 1 to 1 no rank"),
    ],
)
def test_an_instance_that_lacks_a_share_is_refused(parts, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        check_instance("decode", parts)


def test_a_share_beyond_the_ranks_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"state_rank \(of 2 state_ranks\) is 2, must be 0\.\.1"):
        structs.replace(stateful(1, 2)[0], state_rank=2).__post_init__()
