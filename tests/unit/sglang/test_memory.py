"""SGLang's KVArgs, as plain numbers, described to the connector."""

from types import SimpleNamespace

import numpy as np
import pytest
from pdpool_connector import LayoutError, StateCut
from pdpool_sglang.memory import (
    Heads,
    Placement,
    describe,
    instance_of,
    pages_of,
    state_ids,
    state_names,
)

PAGE, PAGES, BASE = 16, 8, 0x10000000


def kv_args(entries, item, *, drafts=0, draft_item=0, state=()):
    """KVArgs with buffers one behind the other."""
    items = [item] * entries + [draft_item] * drafts
    spans = np.cumsum([0, *(PAGES * one for one in items)])
    names = (
        "types",
        "data_ptrs",
        "data_lens",
        "item_lens",
        "dim_per_tensor",
        "slice_outer_counts",
        "conv_shard_groups",
    )
    columns = {f"state_{name}": [one[index] for one in state] for index, name in enumerate(names)}
    return SimpleNamespace(
        kv_data_ptrs=[BASE + int(span) for span in spans[:-1]],
        kv_data_lens=[PAGES * one for one in items],
        kv_item_lens=items,
        num_draft_entries=drafts,
        aux_data_ptrs=[0x1000, 0x9000],
        aux_data_lens=[64 * 4, 128 * 4],
        aux_item_lens=[64, 128],
        page_size=PAGE,
        kv_cache_dtype_str="bfloat16",
        **columns,
    )


def window(kind, regions=2, item=512, address=0x40000000, dims=(), outers=(), groups=()):
    """One kind of state."""
    return (
        kind,
        [address + index * item * 4 for index in range(regions)],
        [item * 4] * regions,
        [item] * regions,
        list(dims),
        list(outers),
        list(groups),
    )


def mha(tp=1, rank=0, total=4, layers=3, **named):
    """Memory of a model with K and V."""
    held = max(total // tp, 1)
    args = kv_args(2 * layers, PAGE * held * 8 * 2, **named)
    place = Placement(tp_rank=rank, tp_size=tp)
    return args, describe(args, model="m", place=place, target=Heads(held, total), window_heads=held)


class TestKeysAndValues:
    def test_layers_alternate_k_and_v(self):
        args, memory = mha()
        order = [region.address for region in memory.kv]
        k, v = args.kv_data_ptrs[:3], args.kv_data_ptrs[3:]
        assert order == [k[0], v[0], k[1], v[1], k[2], v[2]]
        assert (memory.layers, memory.kv_heads, memory.head_dim, memory.pages) == (3, 4, 8, PAGES)

    def test_odd_buffers_are_refused(self):
        args = kv_args(3, 1024)
        with pytest.raises(LayoutError, match="as many of K as of V"):
            describe(args, model="m", place=Placement(), target=Heads(4, 4))

    def test_tensor_ranks_hold_their_heads(self):
        _, memory = mha(tp=2, rank=1)
        assert (memory.kv_heads, memory.first_head, memory.total_heads) == (2, 2, 4)

    def test_replicated_heads_are_shared(self):
        firsts = [mha(tp=4, rank=rank, total=2)[1].first_head for rank in range(4)]
        assert firsts == [0, 0, 1, 1]

    def test_latent_has_one_region_each_layer(self):
        args = kv_args(3, PAGE * 576 * 2)
        target = Heads(1, 1, latent=True)
        memory = describe(args, model="m", place=Placement(), target=target)
        assert (len(memory.kv), memory.head_dim, memory.total_heads) == (3, 576, 1)

    def test_device_is_that_of_the_cache(self):
        args = kv_args(2, 1024)
        memory = describe(args, model="m", place=Placement(), target=Heads(4, 4), device=1)
        assert {region.device for region in memory.kv} == {1}
        assert {region.device for region in memory.aux} == {None}

    def test_aux_buffers_are_rows(self):
        _, memory = mha()
        assert [(region.item_bytes, region.items) for region in memory.aux] == [(64, 4), (128, 4)]


class TestDrafts:
    def test_draft_layers_follow_with_own_heads(self):
        args = kv_args(4, PAGE * 4 * 8 * 2, drafts=2, draft_item=PAGE * 2 * 16 * 2)
        draft = Heads(2, 2)
        memory = describe(args, model="m", place=Placement(), target=Heads(4, 4), draft=draft)
        assert [one.kv_heads for one in memory.heads] == [4, 4, 2]
        assert [one.head_dim for one in memory.heads] == [8, 8, 16]
        assert memory.kv[4].address == args.kv_data_ptrs[4]

    def test_draft_of_another_kind_is_refused(self):
        args = kv_args(4, 1024, drafts=1, draft_item=512)
        with pytest.raises(LayoutError, match="draft"):
            describe(args, model="m", place=Placement(), target=Heads(4, 4), draft=Heads(1, 1, latent=True))

    def test_shards_count_the_pool_with_most_heads(self):
        args = kv_args(4, PAGE * 8 * 2, drafts=2, draft_item=PAGE * 8 * 2)
        place = Placement(tp_rank=3, tp_size=4)
        memory = describe(args, model="m", place=place, target=Heads(1, 2), draft=Heads(1, 4))
        assert (memory.first_head, memory.total_heads) == (3, 4)
        assert [one.first_head for one in memory.heads] == [1, 1, 3]


class TestState:
    def test_pools_have_names_of_kinds(self):
        args = kv_args(2, 1024, state=[window("swa"), window("swa", address=0x50000000), window("dsa")])
        assert state_names(args) == ["swa", "swa#2", "dsa"]

    def test_window_is_cut_by_heads(self):
        _, memory = mha(tp=2, rank=1, state=[window("swa")])
        (pool,) = memory.state
        assert pool.cuts == (StateCut(PAGE, (2,)),) * 2
        assert (pool.rank, pool.ranks) == (1, 2)

    def test_mamba_groups_are_those_of_the_rank(self):
        dims, outers, groups = (32, 4, 0), (1, 1, 1), ([16, 16, 32], None, None)
        state = [window("mamba", 3, 32 * 6, dims=dims, outers=outers, groups=groups)]
        _, memory = mha(tp=2, rank=0, state=state)
        assert memory.state[0].cuts == (StateCut(1, (8, 8, 16)), StateCut(1, (4,)), StateCut(1, (1,)))

    def test_whole_items_have_no_share(self):
        _, memory = mha(tp=2, rank=1, state=[window("dsa")])
        assert (memory.state[0].cuts, memory.state[0].ranks) == ((), 0)

    def test_partial_rows_are_refused(self):
        with pytest.raises(LayoutError, match="dsa_tail"):
            mha(state=[window("dsa_tail")])

    @pytest.mark.parametrize(
        ("given", "ids"),
        [([np.array([3])], [3]), (np.array([1, 2]), [1, 2]), ([4, 5], [4, 5]), (None, []), ([], [])],
    )
    def test_ids_of_every_form_are_flat(self, given, ids):
        args = kv_args(2, 1024, state=[window("dsa")])
        assert state_ids(args, [given])["dsa"].tolist() == ids

    def test_model_without_state_gives_none(self):
        assert state_ids(kv_args(2, 1024), []) is None


class TestInstance:
    def test_context_ranks_are_replicas(self):
        args = kv_args(2, PAGE * 2 * 8 * 2)
        place = Placement(tp_rank=1, tp_size=2, cp_rank=1, cp_size=2)
        memory = describe(args, model="m", place=place, target=Heads(2, 4))
        instance = instance_of(place, memory)
        assert (len(instance), place.rank) == (4, 3)
        assert instance[1] == instance[3]
        assert instance[3].first_head == memory.first_head == 2

    def test_cut_state_is_shared(self):
        _, memory = mha(tp=2, rank=1, state=[window("swa")])
        instance = instance_of(Placement(tp_rank=1, tp_size=2), memory)
        assert [(one.state_rank, one.state_ranks) for one in instance] == [(0, 2), (1, 2)]


class TestPrefix:
    def test_tokens_become_pages(self):
        assert pages_of(144, 16, "decode_prefix_len") == 9

    def test_partial_page_is_refused(self):
        with pytest.raises(ValueError, match="decode_prefix_len is 145"):
            pages_of(145, 16, "decode_prefix_len")
