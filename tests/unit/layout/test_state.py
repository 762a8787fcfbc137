"""State that is cut over tensor ranks: each decode rank's share arrives whole and once, whoever holds which heads."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs
from pdpool_connector.layout import pool
from pdpool_connector.layout.chunk import Chunk, StateItems
from pdpool_connector.layout.memory import LayoutError, Region, StateCut
from pdpool_connector.layout.overlap import compatible
from pdpool_connector.layout.pairing import pair, shard_model
from pdpool_connector.layout.plan import PairPlan
from pdpool_connector.layout.pool import Runs

from tests.state_kinds import Kind
from tests.unit.layout.model import Rank, apply_runs

steady = settings(deadline=None, derandomize=True, max_examples=100)
ITEMS = 4
NONE, FROM, TO = np.empty(0, np.int32), np.array([2, 0], np.int32), np.array([1, 3], np.int32)


@dataclass(frozen=True)
class Model:
    """Layers, and of each the kinds of its state regions; heads of the cache."""

    kinds: tuple[tuple[Kind, ...], ...]
    heads: int

    def rank(self, part, seed: int) -> Rank:
        held = range(part.first_layer, part.layer_end)
        kinds = [kind for layer in held for kind in self.kinds[layer]]
        fields = {field: getattr(part, field) for field in part.__struct_fields__}
        assert kinds
        return Rank(
            state=[kind.item_bytes(part.state_ranks) for kind in kinds],
            state_cuts=tuple(kind.cut(part.state_ranks) for kind in kinds),
            state_layers=tuple(layer for layer in held for _ in self.kinds[layer]),
            state_items=ITEMS,
            seed=seed,
            **fields,
        )

    def shares(self, part) -> list[np.ndarray]:
        """What the regions of a rank hold; the same for the same model."""
        return [
            kind.share(ITEMS, (layer, at), part.state_rank, part.state_ranks)
            for layer in range(part.first_layer, part.layer_end)
            for at, kind in enumerate(self.kinds[layer])
        ]


@st.composite
def instances(draw, layers: int, heads: int, tp: int):
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=2))) if layers > 1 else []
    stages = [end - first for first, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    parts = shard_model(stages, heads, tp=tp, split_state=True)
    replicas = draw(st.integers(1, 2)) * parts
    return tuple(draw(st.permutations(replicas)))


@st.composite
def models(draw):
    """A model, and the parts of two instances of it: any numbers of ranks, stages and heads, replicas, any order."""
    layers, heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 6]))
    tps = [tp for tp in (1, 2, 3, 4, 6) if not (heads % tp and tp % heads)]
    tp, other = draw(st.sampled_from(tps)), draw(st.sampled_from(tps))
    groups = st.tuples(st.integers(1, 2), st.booleans()).map(
        lambda drawn: (drawn[0] * (1 if drawn[1] else math.lcm(tp, other)), drawn[1])
    )
    cut = st.builds(
        lambda outer, drawn, unit: Kind(outer, *zip(*drawn, strict=True), unit),
        st.integers(1, 3),
        st.lists(groups, min_size=1, max_size=3),
        st.integers(1, 3),
    )
    kinds = cut | st.just(Kind()) if heads == 1 or tp == other else cut
    model = Model(tuple(tuple(draw(st.lists(kinds, max_size=2))) for _ in range(layers)), heads)
    sides = draw(instances(layers, heads, tp)), draw(instances(layers, heads, other))
    # A rank without any region of a pool cannot describe the pool.
    for part in (*sides[0], *sides[1]):
        assume(any(model.kinds[layer] for layer in range(part.first_layer, part.layer_end)))
    return model, *sides


def hand_over(source: Rank, target: Rank, writer) -> list[Runs]:
    """The byte ranges from source to target of what this writer moves, as its plan has them."""
    plan = PairPlan(source.memory, target.memory)
    moved = []
    spans = plan.state_spans(kv=writer.kv, shares=writer.state)
    for chunk in plan.cut(NONE, NONE, None, [(FROM, TO)], state_within=spans):
        plan.check(chunk)
        runs = plan.runs(chunk)
        assert int(runs.nbytes.sum()) == plan.nbytes(chunk)
        assert by_index(plan, chunk) == ranges(runs)
        moved.append(runs)
    return moved


def ranges(runs: Runs) -> set[tuple[int, int]]:
    """Every byte that moves: where from and where to."""
    return {
        (ours + at, theirs + at)
        for ours, theirs, nbytes in zip(*(column.tolist() for column in runs), strict=True)
        for at in range(nbytes)
    }


def by_index(plan: PairPlan, chunk: Chunk) -> set[tuple[int, int]]:
    """The same by the numbers of pieces, as an engine with a prepared list takes them."""
    pieces = [
        [(row.address + piece * row.stride, row.nbytes) for row in rows for piece in range(row.pieces)]
        for rows in (plan.groups[0].local_rows, plan.groups[0].remote_rows)
    ]
    moved = [(pieces[0][ours], pieces[1][theirs]) for ours, theirs in zip(*plan.indices(chunk), strict=True)]
    assert all(ours[1] == theirs[1] for ours, theirs in moved)
    return {(ours[0] + at, theirs[0] + at) for ours, theirs in moved for at in range(ours[1])}


@steady
@given(models(), st.sampled_from([(1 << 24, 1024), (16, 4)]))
def test_every_byte_of_every_decode_ranks_state_comes_from_exactly_one_writer(drawn, bounds):
    model, prefill, decode = drawn
    sources = [model.rank(part, seed) for seed, part in enumerate(prefill)]
    for source, part in zip(sources, prefill, strict=True):
        for region, share in zip(source.memory.state[0].regions, model.shares(part), strict=True):
            source.items(region)[:] = share
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "MAX_CHUNK_BYTES", bounds[0])
        patch.setattr(pool, "MAX_CHUNK_DESCRIPTORS", bounds[1])
        for part, writers in zip(decode, pair(prefill, decode), strict=True):
            target = model.rank(part, 1000)
            wanted, written = target.space.copy(), np.zeros(len(target.space), np.int64)
            asked = np.zeros(len(target.space), np.int64)
            for region, share in zip(target.memory.state[0].regions, model.shares(part), strict=True):
                for item, to in zip(FROM, TO, strict=True):
                    start = region.address - target.base + to * region.item_bytes
                    wanted[start : start + region.item_bytes] = share[item]
                    asked[start : start + region.item_bytes] = 1
            for writer in writers:
                for runs in hand_over(sources[writer.rank], target, writer):
                    target.space[:] = apply_runs(sources[writer.rank], target, runs)
                    for start, count in zip(runs.remote.tolist(), runs.nbytes.tolist(), strict=True):
                        written[start - target.base : start - target.base + count] += 1
            assert np.array_equal(written, asked)
            assert np.array_equal(target.space, wanted)


def rank_of(cuts, item_bytes, rank=0, ranks=1, **fields) -> Rank:
    """A rank that holds such a share of such regions, and the whole of the cache."""
    return Rank(state=item_bytes, state_cuts=cuts, state_rank=rank, state_ranks=ranks, **fields)


def segments(source: Rank, target: Rank) -> list[tuple[int, int, int]]:
    """For item 0 of region 0: (offset there, offset here, bytes) of what moves, in order."""
    plan = PairPlan(source.memory, target.memory)
    runs = plan.runs(Chunk(NONE, NONE, (), (StateItems(0, np.zeros(1, np.int32), np.zeros(1, np.int32)),)))
    ours, theirs = source.memory.state[0].regions[0].address, target.memory.state[0].regions[0].address
    columns = (runs.local - ours, runs.remote - theirs, runs.nbytes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_convolutions_groups_are_cut_each_on_its_own() -> None:
    # conv [channels, kernel - 1] of q, k, v with 8, 8 and 16 channels in the model, 6 bytes each: TP 4 to 2
    source = rank_of((StateCut(1, (2, 2, 4)),), (48,), 3, 4)
    target = rank_of((StateCut(1, (4, 4, 8)),), (96,), 1, 2)
    assert segments(source, target) == [(0, 12, 12), (12, 36, 12), (24, 72, 24)]
    assert segments(target, source) == [(12, 0, 12), (36, 12, 12), (72, 24, 24)]


def test_an_axis_behind_another_is_cut_at_each_place_of_that() -> None:
    # conv [kernel - 1 = 2, channels = 4] of one group, 2 bytes each: TP 1 to 2
    source, target = rank_of((StateCut(2, (4,)),), (16,)), rank_of((StateCut(2, (2,)),), (8,), 1, 2)
    assert segments(source, target) == [(4, 0, 4), (12, 4, 4)]


def test_the_same_share_moves_whole_and_another_not_at_all() -> None:
    mine, same, other = (rank_of((StateCut(3, (2, 1)),), (18,), rank, 2) for rank in (1, 1, 0))
    assert segments(mine, same) == [(0, 0, 18)]
    assert segments(mine, other) == []


def test_a_group_that_all_ranks_have_comes_from_one() -> None:
    sources = [rank_of((StateCut(1, (2, 3)),), (5,), rank, 4) for rank in range(4)]
    target = rank_of((StateCut(1, (4, 3)),), (7,), 1, 2)
    spans = [PairPlan(source.memory, target.memory).state_spans(kv=True, shares=True) for source in sources]
    assert spans == [(None,), (None,), (None,), ((0, 1),)]
    back = PairPlan(target.memory, sources[3].memory)
    assert back.state_spans(kv=True, shares=True) == (None,)


def test_state_is_cut_whether_or_not_the_two_have_heads_in_common() -> None:
    halves = {"total_heads": 2, "kv_heads": 1}
    source = rank_of((StateCut(1, (2,)),), (2,), 1, 2, first_head=1, **halves)
    target = rank_of((StateCut(1, (4,)),), (4,), first_head=0, **halves)
    assert segments(source, target) == [(0, 2, 2)]


def test_a_bounded_chunk_is_never_larger_for_many_segments() -> None:
    shape = StateCut(700, (1, 1))
    source = rank_of((shape,), (1400,))
    target = rank_of((StateCut(700, (2, 1)),), (2100,))
    why = "groups[0] of region 0 of state pool 'mamba' is 1 on each of 1 ranks at prefill and 2 on each of 1"
    assert why in difference(source, target)
    target = rank_of((shape,), (1400,), 0, 2)
    plan = PairPlan(source.memory, target.memory)
    chunks = plan.cut(NONE, NONE, (0, 0), [(FROM, TO)])
    assert [len(plan.runs(chunk).nbytes) for chunk in chunks] == [700, 700, 700, 701]


def difference(source: Rank, target: Rank) -> str:
    (found,) = compatible(source.memory, target.memory)
    with pytest.raises(LayoutError, match="memories cannot be paired"):
        PairPlan(source.memory, target.memory)
    return found


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        (
            ((StateCut(1, (4,)),), (8,), 0, 2),
            ((None,), (8,), 0, 2),
            "region 0 of state pool 'mamba' is cut at prefill and moves whole at decode (`cuts`), must be the same",
        ),
        (
            ((None, StateCut(1, (4,))), (3, 8), 0, 2),
            ((None, None), (3, 8), 0, 0),
            "region 1 of state pool 'mamba' is cut at prefill and moves whole at decode",
        ),
        (
            ((StateCut(2, (4,)),), (8,), 0, 2),
            ((StateCut(1, (8,)),), (8,), 0, 1),
            "(outer, number of groups) of region 0 of state pool 'mamba' is (2, 1) at prefill and (1, 1) at decode",
        ),
        (
            ((StateCut(1, (2, 2)),), (8,), 0, 2),
            ((StateCut(1, (8,)),), (16,), 0, 1),
            "(outer, number of groups) of region 0 of state pool 'mamba' is (1, 2) at prefill and (1, 1) at decode",
        ),
        (
            ((StateCut(1, (4,)),), (8,), 0, 2),
            ((StateCut(1, (8,)),), (32,), 0, 1),
            "bytes of a unit of region 0 of state pool 'mamba' is 2 at prefill and 4 at decode",
        ),
        (
            ((StateCut(1, (4, 3)),), (7,), 1, 4),
            ((StateCut(1, (8, 4)),), (12,), 0, 2),
            "groups[1] of region 0 of state pool 'mamba' is 3 on each of 4 ranks at prefill and 4 on each of 2",
        ),
    ],
)
def test_shares_of_different_shape_are_refused_by_name(ours, theirs, why: str) -> None:
    assert why in difference(rank_of(*ours), rank_of(*theirs))


def test_state_that_is_cut_and_not_told_by_layer_must_be_of_the_same_layers() -> None:
    cuts = ((StateCut(1, (4,)),), (8,))
    found = difference(rank_of(*cuts, layers=3), rank_of(*cuts, layers=2, first_layer=1, total_layers=3))
    assert "must be of the same layers unless its `layers` are given" in found


def test_more_pieces_of_state_than_an_int32_can_number_are_refused() -> None:
    source, target = (rank_of((StateCut(1 << 14, (1,)),), (1 << 14,), 0, ranks) for ranks in (1, 2))
    many = Region(1 << 44, 1 << 14, 1 << 18)
    memories = [
        structs.replace(rank.memory, state=(structs.replace(rank.memory.state[0], regions=(many,)),))
        for rank in (source, target)
    ]
    with pytest.raises(LayoutError, match=r"would be moved in 4294967319 pieces, must be at most 2147483647"):
        PairPlan(*memories)


@st.composite
def claims(draw) -> Rank:
    """A rank whose state is cut in any way that a memory may claim; often so that two of them fit."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6]))
    outer, units = draw(st.integers(1, 2)), st.sampled_from([12 // ranks, 12 // ranks, 3])
    groups = tuple(draw(st.lists(units, min_size=1, max_size=2)))
    item_bytes = outer * sum(groups) * draw(st.sampled_from([2, 2, 1]))
    return rank_of((StateCut(outer, groups),), (item_bytes,), draw(st.integers(0, ranks - 1)), ranks)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(claims(), claims())
def test_whatever_a_peer_claims_of_its_share_nothing_outside_of_an_item_is_touched(ours, theirs):
    if compatible(ours.memory, theirs.memory):
        return
    plan = PairPlan(ours.memory, theirs.memory)
    for rank, rows in ((ours, plan.groups[0].local_rows[:-1]), (theirs, plan.groups[0].remote_rows[:-1])):
        (region,) = rank.memory.state[0].regions
        for row in rows[len(rank.memory.kv) :]:
            assert row.nbytes > 0
            assert region.address <= row.address
            assert row.address + row.nbytes <= region.address + region.item_bytes
            assert (row.stride, row.pieces) == (region.item_bytes, region.items)
