"""What may be registered, and what a peer's description of its memory may say."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdpool_connector.layout.memory import (
    MAX_DESCRIPTOR_BYTES,
    MAX_ENCODED_BYTES,
    KVMemory,
    LayerHeads,
    LayoutError,
    Region,
    RemoteMemory,
    StateCut,
    StatePool,
    decode_remote,
    encode_remote,
)
from pdpool_connector.layout.regions import MAX_ADDRESS, MAX_ITEMS, Block


def mamba(*regions, **fields):
    return StatePool("mamba", regions, **fields)


def memory(**changes):
    fields = {
        "kv": tuple(Region(0x1000 + index * 0x1000, 64, 8) for index in range(4)),
        "aux": (Region(0x100000, 32, 4),),
        "page_tokens": 16,
        "layers": 2,
        "kv_heads": 1,
        "head_dim": 1,
        "dtype": "float32",
        "model": "m",
    }
    return KVMemory(**{**fields, **changes})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0, 1, 1), "region.address is 0, must be 1.."),
        ((-4096, 1, 1), "region.address is -4096"),
        ((4096, 0, 1), "region.item_bytes is 0"),
        ((4096, -1, 1), "region.item_bytes is -1"),
        ((4096, 2**32 + 1, 1), "region.item_bytes is 4294967297"),
        ((4096, 1, 0), "region.items is 0"),
        ((4096, 1, MAX_ITEMS + 1), "region.items is 2147483648"),
        ((MAX_ADDRESS, 1, 1), "region end"),
        ((MAX_ADDRESS - 10, 4, 3), "region end"),
        ((4096, 2.0, 1), "region.item_bytes is 2.0 (float), must be a plain int"),
        ((True, 1, 1), "must be a plain int"),
        ((4096, 1, 1, -1), "region.device is -1, must be 0..1023"),
        ((4096, 1, 1, "cuda:0"), "region.device is 'cuda:0' (str), must be a plain int"),
    ],
)
def test_an_impossible_region_is_refused_by_field_and_value(fields, message):
    with pytest.raises(LayoutError) as caught:
        Region(*fields)
    assert message in str(caught.value)


def test_a_region_knows_its_bytes_and_end():
    region = Region(4096, 100, 7)
    assert (region.nbytes, region.end) == (700, 4796)
    assert Region(MAX_ADDRESS - 12, 4, 3).end == MAX_ADDRESS


POOL = mamba(Region(0x200000, 32, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, "kv has 4 regions for 3 layers, must have 2 * layers = 6, or one for each layer"),
        ({"layers": 0}, "layers is 0, must be 1..2048"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"kv_heads": -1}, "kv_heads is -1"),
        ({"head_dim": 2**40}, "head_dim is"),
        ({"dtype": ""}, "dtype has 0 characters"),
        ({"dtype": np.dtype("float32")}, "dtype is dtype('float32') (Float32DType), must be a str"),
        ({"model": None}, "model is None (NoneType), must be a str"),
        ({"kv": Region(0x1000, 64, 8)}, "(Region), must be a tuple of Region"),
        ({"kv": ((0x1000, 64, 8),) * 4}, "kv[0] is (4096, 64, 8) (tuple), must be a Region"),
        ({"aux": None}, "aux is None (NoneType), must be a tuple of Region"),
        ({"aux": Region(0x100000, 32, 4)}, "(Region), must be a tuple of Region"),
        ({"aux": (Region(0x100000, 32, 4), Region(0x200000, 32, 5))}, "aux regions hold [4, 5] rows, must all hold"),
        ({"aux": tuple(Region(0x200000 + index, 1, 1) for index in range(65))}, "aux regions is 65, must be 0..64"),
        ({"aux": (Region(0x200000, 5 << 20, 1),)}, "bytes of an aux row is 5242880, must be 0..4194304"),
        ({"state": None}, "state is None (NoneType), must be a tuple of StatePool"),
        ({"state": (Region(0x100000, 32, 4),)}, "(Region), must be a StatePool"),
        ({"state": (POOL, POOL)}, "state has pools named ['mamba', 'mamba'], must have each name once"),
        ({"layout": "NDH"}, "layout is 'NDH', must be one of NHD, HND"),
        ({"kv_order": "KV"}, "kv_order is 'KV', must be one of separate, interleaved, packed"),
        ({"kv_order": "interleaved"}, "kv has 4 regions for 2 layers, must have one for each layer"),
        ({"kv_order": "packed"}, "kv has 4 regions for 2 layers, must have one for each layer"),
        (
            {"kv_order": "interleaved", "kv": (Region(0x1000, 65, 8), Region(0x2000, 65, 8))},
            "item_bytes of kv region 0 is 65, must be even",
        ),
        (
            {"layers": 4, "total_heads": 8},
            "total_heads is 8, must be 1 (a latent) in separate order; where a page holds K and V, set kv_order=",
        ),
        (
            {"kv": tuple(Region(0x1000 + index * 0x1000, 64, 8, index % 2 or None) for index in range(4))},
            "kv regions lie in host memory and device 1, must all lie in the same memory",
        ),
        ({"heads": (LayerHeads(1, 1, 0, 1),)}, "heads has 1 entries for 2 layers, must be as many"),
        (
            {"heads": (LayerHeads(1, 1, 0, 1), LayerHeads(1, 1, 0, 4))},
            "heads[1] holds 1 heads from 0 of 4, must hold 4 from 0: those that meet heads 0..0 of 1",
        ),
        ({"model": "m" * 257}, "model has 257 characters, must have 1..256"),
        ({"kv": (Region(0x1000, 64, 8), Region(0x2000, 64, 9)), "layers": 1}, "kv regions hold [8, 9] pages"),
        (
            {"kv": tuple(Region(0x1000 + index * 0x100, 64, 8) for index in range(4))},
            "kv region at 0x1000 with 512 bytes overlaps the kv region at 0x1100",
        ),
        ({"kv": tuple(Region(0x1000 + index * 2**31, 1, 2**30) for index in range(4))}, "items of all regions"),
    ],
)
def test_regions_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(LayoutError) as caught:
        memory(**changes)
    assert message in str(caught.value)


def test_a_memory_is_of_the_whole_model_unless_it_says_otherwise():
    whole = memory()
    assert (whole.first_layer, whole.total_layers, whole.first_head, whole.total_heads) == (0, 2, 0, 1)
    assert whole == memory(total_layers=2, total_heads=1)


def test_a_memory_may_be_any_part_of_the_model():
    part = memory(kv_heads=2, first_layer=3, total_layers=5, first_head=7, total_heads=9)
    assert (part.first_layer, part.total_layers, part.first_head, part.total_heads) == (3, 5, 7, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_layers": 1}, "total_layers is 1, must be at least the 2 layers held"),
        ({"total_heads": 3, "kv_heads": 4}, "total_heads is 3, must be at least the 4 heads held"),
        ({"first_layer": 1}, "first_layer (with 2 of 2 layers held) is 1, must be 0..0"),
        ({"first_layer": -1}, "first_layer (with 2 of 2 layers held) is -1"),
        ({"first_layer": 9, "total_layers": 10}, "first_layer (with 2 of 10 layers held) is 9, must be 0..8"),
        ({"first_head": 6, "total_heads": 6}, "first_head (with 1 of 6 heads held) is 6, must be 0..5"),
        ({"total_layers": -4}, "total_layers is -4, must be 1..2048"),
        ({"total_layers": False}, "total_layers is False (bool), must be a plain int"),
        ({"total_layers": 2**62}, "total_layers is"),
        ({"total_heads": 2**62}, "total_heads is"),
        (
            {"kv_heads": 3, "total_heads": 6},
            "item_bytes of kv region 0 is 64, must be a multiple of 48: 16 strips of a page * kv_heads",
        ),
    ],
)
def test_an_impossible_part_of_a_model_is_refused(changes, message):
    with pytest.raises(LayoutError) as caught:
        memory(**changes)
    assert message in str(caught.value)


def test_a_peer_that_says_nothing_of_its_part_holds_the_whole_model():
    fields = msgspec.msgpack.decode(
        encode_remote(RemoteMemory(backend="local", memory=memory(), descriptor=b"x")), type=dict
    )
    for field in ("first_layer", "total_layers", "first_head", "total_heads"):
        del fields["memory"][field]
    assert decode_remote(msgspec.msgpack.encode(fields)).memory == memory()


def test_a_latent_cache_has_one_region_for_each_layer():
    latent = memory(layers=4)
    assert (latent.regions_per_layer, memory().regions_per_layer) == (1, 2)
    assert [latent.region_of(layer, 0) for layer in range(4)] == [0, 1, 2, 3]


def test_regions_are_found_by_the_number_of_the_layer_in_the_model():
    part = memory(first_layer=3, total_layers=9)
    assert [part.region_of(layer, kind) for layer in (3, 4) for kind in (0, 1)] == [0, 1, 2, 3]


TWO = Region(0x200000, 48, 5), Region(0x300000, 64, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "name of a state pool has 0 characters"),
        ({"regions": ()}, "number of regions of state pool 'mamba' is 0, must be 1..4096"),
        ({"regions": Region(0x1000, 8, 8)}, "must be a tuple of Region"),
        ({"regions": (TWO[0], Region(0x300000, 64, 6))}, "state pool 'mamba' regions hold [5, 6] items, must all hold"),
        ({"regions": (TWO[0], Region(0x200010, 64, 5))}, "overlaps the state pool 'mamba' region at 0x200010"),
        ({"layers": 1}, "layers of state pool 'mamba' is 1 (int), must be a tuple of int"),
        ({"layers": (2,)}, "layers of state pool 'mamba' has 1 numbers for 2 regions, must be as many"),
        ({"layers": (3, 2)}, "layers[1] of state pool 'mamba' is 2, must be 3..2047"),
        ({"layers": (2, True)}, "layers[1] of state pool 'mamba' is True (bool)"),
        ({"cuts": (1, None)}, "cuts of state pool 'mamba'[0] is 1 (int), must be a StateCut"),
        ({"cuts": (None,)}, "cuts of state pool 'mamba' has 1 cuts for 2 regions, must be as many"),
        ({"cuts": (None, StateCut(1, (4,)))}, "ranks of state pool 'mamba' (region 1 is cut) is 0, must be 1..512"),
        ({"ranks": 513}, "state_ranks is 513, must be 0..512"),
        ({"ranks": 2.0}, "state_ranks is 2.0 (float), must be a plain int"),
        ({"ranks": 4, "rank": 4}, "state_rank (of 4 state_ranks) is 4, must be 0..3"),
        ({"rank": 1}, "state_rank (of 0 state_ranks) is 1, must be 0..0"),
        (
            {"cuts": (StateCut(3, (2, 3)), None), "ranks": 1},
            "must be a multiple of the 15 units of its cut (outer 3 * groups (2, 3))",
        ),
        (
            {"cuts": (StateCut(1, (49,)), None), "ranks": 1},
            "item_bytes of region 0 of state pool 'mamba' is 48, must be a multiple of the 49 units",
        ),
    ],
)
def test_an_impossible_state_pool_is_refused(fields, message):
    with pytest.raises(LayoutError) as caught:
        StatePool(**{"name": "mamba", "regions": TWO, **fields})
    assert message in str(caught.value)


def test_pools_keep_their_own_ids_and_may_share_memory():
    swa = StatePool("swa", (Region(0x200020, 16, 7),))
    described = memory(state=(mamba(*TWO, cuts=(StateCut(3, (2, 2, 4)), None), rank=3, ranks=4), swa))
    assert [(pool.name, pool.items, pool.item_bytes) for pool in described.state] == [("mamba", 5, 112), ("swa", 7, 16)]
    assert (described.state_rank, described.state_ranks) == (3, 4)
    assert described.regions == (*described.kv, *TWO, *swa.regions, *described.aux)
    remote = RemoteMemory(backend="local", memory=described, descriptor=b"")
    assert decode_remote(encode_remote(remote)) == remote


def test_regions_that_overlap_are_registered_as_one_block():
    pools = StatePool("swa", (Region(0x1010, 8, 4),)), StatePool("dsa", (Region(0x11F0, 64, 1),))
    on_device = StatePool("gpu", (Region(0x1000, 64, 8, 2),))
    blocks = memory(state=(*pools, on_device)).blocks
    assert blocks[0] == Block(0x1000, 0x230, None)
    assert blocks[-1] == Block(0x1000, 512, 2)
    assert len(blocks) == 4 + 1 + 1


def test_blocks_that_only_touch_stay_apart():
    touching = memory(kv=tuple(Region(0x1000 + index * 512, 64, 8) for index in range(4)))
    assert [block.address for block in touching.blocks] == [0x1000, 0x1200, 0x1400, 0x1600, 0x100000]


def test_layers_of_a_pool_must_be_held():
    with pytest.raises(LayoutError, match=r"layers\[0\] of state pool 'mamba' is 1, must be 2\.\.3"):
        memory(first_layer=2, total_layers=8, state=(mamba(TWO[0], layers=(1,)),))


def test_cut_pools_must_hold_the_same_share():
    cuts = (StateCut(1, (4,)),)
    pools = (
        StatePool("mamba", TWO[:1], cuts=cuts, rank=1, ranks=4),
        StatePool("swa", TWO[1:], cuts=cuts, rank=0, ranks=2),
    )
    with pytest.raises(LayoutError, match=r"hold shares \(rank, ranks\) \[\(0, 2\), \(1, 4\)\], must all"):
        memory(state=pools)


def test_regions_of_a_pool_are_found_by_layer():
    regions = tuple(Region(0x200000 + 0x1000 * index, 32, 5) for index in range(3))
    pool = mamba(*regions, layers=(2, 2, 3))
    assert [pool.regions_in(*held) for held in ((2, 2), (2, 1), (3, 5), (0, 2))] == [[0, 1, 2], [0, 1], [2], []]
    assert mamba(*regions).regions_in(7, 1) == [0, 1, 2]


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ((0, (1,)), "outer of a state cut is 0, must be 1..16384"),
        ((2**62, (1,)), "outer of a state cut is 4611686018427387904, must be 1..16384"),
        ((True, (1,)), "outer of a state cut is True (bool), must be a plain int"),
        ((1, 8), "groups of a state cut is 8 (int), must be a tuple of int"),
        ((1, ()), "number of groups of a state cut is 0, must be 1..8"),
        ((1, (1,) * 9), "number of groups of a state cut is 9, must be 1..8"),
        ((1, (4, 0)), "groups[1] of a state cut is 0, must be 1..4294967296"),
        ((1, (2**62,)), "groups[0] of a state cut is"),
    ],
)
def test_an_impossible_cut_is_refused(cut, message):
    with pytest.raises(LayoutError) as caught:
        StateCut(*cut)
    assert message in str(caught.value)


def test_state_in_too_many_segments_is_refused():
    many = tuple(Region(0x200000 + index * 0x10000, 1 << 14, 1) for index in range(2))
    pools = [
        StatePool(name, (one,), cuts=(StateCut(1 << 13, (1, 1)),), ranks=1)
        for name, one in zip("ab", many, strict=True)
    ]
    assert memory(state=pools[:1])
    with pytest.raises(LayoutError, match=r"segments of all state pools is 32768, must be 0\.\.16384"):
        memory(state=pools)


def test_a_layer_may_have_heads_of_its_own():
    kv = tuple(Region(0x1000 + index * 0x1000, size, 8) for index, size in enumerate((128, 128, 64, 64)))
    described = memory(
        kv=kv, kv_heads=2, first_head=2, total_heads=8, heads=(LayerHeads(2, 1, 2, 8), LayerHeads(1, 2, 0, 2))
    )
    assert described.heads_of(1) == LayerHeads(1, 2, 0, 2)
    assert memory(kv_heads=4, first_head=4, total_heads=8).heads_of(0) == LayerHeads(4, 1, 4, 8)
    remote = RemoteMemory(backend="local", memory=described, descriptor=b"")
    assert decode_remote(encode_remote(remote)) == remote


@pytest.mark.parametrize(
    ("layout", "kv_order", "strips"),
    [
        ("NHD", "separate", 16),
        ("HND", "separate", 1),
        ("NHD", "interleaved", 32),
        ("HND", "interleaved", 2),
        ("NHD", "packed", 16),
        ("HND", "packed", 1),
    ],
)
def test_strips_of_a_page_follow_from_its_order(layout, kv_order, strips):
    layers = 2 if kv_order == "separate" else 4
    assert memory(layout=layout, kv_order=kv_order, layers=layers).strips == strips


def test_memory_without_aux_has_no_rows():
    assert (memory(aux=()).aux_rows, memory(aux=()).aux_bytes) == (0, 0)


def test_several_aux_regions_have_rows_in_common():
    described = memory(aux=(Region(0x100000, 32, 4), Region(0x200000, 8, 4)))
    assert (described.aux_rows, described.aux_bytes) == (4, 40)


def test_memory_on_a_device_is_known_as_such():
    kv = tuple(Region(0x1000 + index * 0x1000, 64, 8, 3) for index in range(4))
    assert (memory(kv=kv).on_device, memory().on_device) == (True, False)


def test_regions_that_touch_are_accepted():
    assert memory(kv=tuple(Region(0x1000 + index * 512, 64, 8) for index in range(4))).pages == 8


def test_a_memory_knows_its_pages():
    described = memory()
    assert (described.pages, described.aux_rows, described.page_bytes) == (8, 4, 256)


def test_encoding_a_remote_memory_keeps_every_field():
    remote = RemoteMemory(backend="local", memory=memory(), descriptor=b"\0\xff" * 100)
    assert decode_remote(encode_remote(remote)) == remote


def test_an_unknown_field_of_a_newer_peer_is_ignored():
    remote = RemoteMemory(backend="local", memory=memory(), descriptor=b"x")
    fields = msgspec.msgpack.decode(encode_remote(remote))
    fields["memory"]["tensor_parallel"] = 2
    assert decode_remote(msgspec.msgpack.encode({**fields, "later": [1]})) == remote


NESTED = msgspec.Raw(b"\x91" * 1_000_000 + b"\xc0")
"""A million lists, each in the one before."""


def change(path, value):
    fields = msgspec.msgpack.decode(
        encode_remote(RemoteMemory(backend="local", memory=memory(), descriptor=b"x")), type=dict
    )
    inner = fields
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"not msgpack",
        change(["backend"], ""),
        change(["backend"], 7),
        change(["descriptor"], "text that is not bytes"),
        change(["descriptor"], b"x" * (MAX_DESCRIPTOR_BYTES + 1)),
        change(["memory", "layers"], 2**62),
        change(["memory", "layers"], "2"),
        change(["memory", "first_layer"], 1),
        change(["memory", "total_layers"], 2**63),
        change(["memory", "total_heads"], -1),
        change(["memory", "first_head"], None),
        change(["memory", "kv"], []),
        change(["memory", "kv", 1], [0x2000, 64]),
        change(["memory", "kv", 1], [0x2000, 64, -8]),
        change(["memory", "kv", 1], [2**64 - 1, 2**32, 2**31]),
        change(["memory", "kv"], [[0x1000 + index, 1, 1] for index in range(5000)]),
        change(["memory", "aux"], None),
        change(["memory", "aux"], [0x1000, 1, 1]),
        change(["memory", "aux"], [[0x1000, 1, 1, -1]]),
        change(["memory", "layout"], "DNH"),
        change(["memory", "kv_order"], None),
        change(["memory", "heads"], [[1, 1, 0, 2**62]] * 2),
        change(["memory", "state"], [[0x1000, 1, 1]]),
        change(["memory", "state"], [{"name": "mamba", "regions": []}]),
        change(["memory", "state"], [{"name": str(index), "regions": [[0x1000, 1, 1]]} for index in range(9)]),
        change(["memory", "state"], 7),
        b"\0" * (MAX_ENCODED_BYTES + 1),
        pytest.param(change(["later"], NESTED), id="lists within lists in an unknown field"),
    ],
)
def test_what_is_no_remote_memory_is_refused(data):
    with pytest.raises(LayoutError):
        decode_remote(data)


@settings(deadline=None, derandomize=True, max_examples=500)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_damaged_bytes_are_refused_or_valid_but_never_anything_else(junk, at):
    whole = encode_remote(RemoteMemory(backend="local", memory=memory(), descriptor=b"x" * 20))
    damaged = whole[:at] + junk + whole[at + len(junk) :]
    try:
        remote = decode_remote(damaged)
    except LayoutError:
        return
    assert decode_remote(encode_remote(remote)) == remote
