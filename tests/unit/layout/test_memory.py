"""What may be registered, and what a peer's description of its memory may say."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdpool_connector.layout.memory import (
    MAX_ADDRESS,
    MAX_DESCRIPTOR_BYTES,
    MAX_ENCODED_BYTES,
    MAX_ITEMS,
    KVMemory,
    LayoutError,
    Region,
    RemoteMemory,
    StateCut,
    decode_remote,
    encode_remote,
)


def memory(**changes):
    fields = {
        "kv": tuple(Region(0x1000 + index * 0x1000, 64, 8) for index in range(4)),
        "aux": Region(0x100000, 32, 4),
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, "kv has 4 regions, must have 2 * layers = 6, or one for each layer"),
        (
            {"state": (Region(0x200000, 32, 4), Region(0x300000, 32, 5))},
            "state regions hold [4, 5] items, must all hold the same number",
        ),
        ({"state": (Region(0x100040, 32, 4),)}, "overlaps the region at 0x100040"),
        ({"state": tuple(Region(0x200000 + index, 1, 1) for index in range(4097))}, "state regions is 4097, must be 0"),
        ({"layers": 0}, "layers is 0, must be 1..2048"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"kv_heads": -1}, "kv_heads is -1"),
        ({"head_dim": 2**40}, "head_dim is"),
        ({"dtype": ""}, "dtype has 0 characters"),
        ({"dtype": np.dtype("float32")}, "dtype is dtype('float32') (Float32DType), must be a str"),
        ({"model": None}, "model is None (NoneType), must be a str"),
        ({"kv": Region(0x1000, 64, 8)}, "(Region), must be a tuple of Region"),
        ({"kv": ((0x1000, 64, 8),) * 4}, "kv[0] is (4096, 64, 8) (tuple), must be a Region"),
        ({"aux": None}, "aux is None (NoneType), must be a Region"),
        ({"state": None}, "state is None (NoneType), must be a tuple of Region"),
        ({"state_layers": 1}, "state_layers is 1 (int), must be a tuple of int"),
        ({"state_cuts": (1,)}, "state_cuts[0] is 1 (int), must be a StateCut"),
        ({"model": "m" * 257}, "model has 257 characters, must have 1..256"),
        ({"kv": (Region(0x1000, 64, 8), Region(0x2000, 64, 9)), "layers": 1}, "kv regions hold [8, 9] pages"),
        ({"aux": Region(0x4010, 32, 4)}, "region at 0x4000 with 512 bytes overlaps the region at 0x4010"),
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
            "item_bytes of kv region 0 is 64, must be a multiple of page_tokens * kv_heads = 48",
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


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((2,), "state_layers has 1 layers for 2 state regions"),
        ((1, 2), "state_layers[0] is 1, must be 2..3"),
        ((2, 4), "state_layers[1] is 4, must be 2..3"),
        ((3, 2), "state_layers[1] is 2, must be 3..3"),
        ((2, True), "state_layers[1] is True (bool)"),
    ],
)
def test_layers_of_state_that_are_not_held_are_refused(layers, message):
    state = (Region(0x200000, 32, 5), Region(0x300000, 64, 5))
    with pytest.raises(LayoutError) as caught:
        memory(first_layer=2, total_layers=8, state=state, state_layers=layers)
    assert message in str(caught.value)


def test_state_is_found_by_the_layer_in_the_model():
    state = tuple(Region(0x200000 + 0x1000 * index, 32, 5) for index in range(3))
    part = memory(first_layer=2, total_layers=8, state=state, state_layers=(2, 2, 3))
    assert [part.state_in(first, count) for first, count in ((2, 2), (2, 1), (3, 5), (0, 2))] == [
        [0, 1, 2],
        [0, 1],
        [2],
        [],
    ]
    assert memory(state=state).state_in(7, 1) == [0, 1, 2]


STATE = (Region(0x200000, 48, 5), Region(0x300000, 64, 5))


def test_a_memory_may_tell_how_its_state_is_cut():
    cuts = (StateCut(3, (2, 2, 4)), None)
    described = memory(state=STATE, state_cuts=cuts, state_rank=3, state_ranks=4)
    assert [described.cut_of(index) for index in (0, 1)] == [*cuts]
    assert [memory(state=STATE).cut_of(index) for index in (0, 1)] == [None, None]
    remote = RemoteMemory(backend="local", memory=described, descriptor=b"")
    assert decode_remote(encode_remote(remote)) == remote


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_ranks": 513}, "state_ranks is 513, must be 0..512"),
        ({"state_ranks": -1}, "state_ranks is -1, must be 0..512"),
        ({"state_ranks": 2.0}, "state_ranks is 2.0 (float), must be a plain int"),
        ({"state_ranks": 4, "state_rank": 4}, "state_rank (of 4 state_ranks) is 4, must be 0..3"),
        ({"state_ranks": 4, "state_rank": -1}, "state_rank (of 4 state_ranks) is -1, must be 0..3"),
        ({"state_rank": 1}, "state_rank (of 0 state_ranks) is 1, must be 0..0"),
        ({"state_cuts": (None,)}, "state_cuts has 1 cuts for 2 state regions, must be as many"),
        ({"state_cuts": (None, StateCut(1, (4,)))}, "state_ranks (state region 1 is cut) is 0, must be 1..512"),
        (
            {"state_cuts": (StateCut(3, (2, 3)), None), "state_ranks": 1},
            "must be a multiple of the 15 units that state_cuts tells (outer 3 * groups (2, 3))",
        ),
        (
            {"state_cuts": (StateCut(1, (49,)), None), "state_ranks": 1},
            "item_bytes of state region 0 is 48, must be a multiple of the 49 units",
        ),
    ],
)
def test_cuts_of_state_that_cannot_be_are_refused(changes, message):
    with pytest.raises(LayoutError) as caught:
        memory(state=STATE, **changes)
    assert message in str(caught.value)


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
    cut = StateCut(1 << 13, (1, 1))
    assert memory(state=many, state_cuts=(cut, None), state_ranks=1)
    with pytest.raises(LayoutError, match=r"segments of all state regions together is 32768, must be 0\.\.16384"):
        memory(state=many, state_cuts=(cut, cut), state_ranks=1)


def test_state_has_ids_of_its_own():
    described = memory(state=(Region(0x200000, 32, 5), Region(0x300000, 64, 5)))
    assert (described.state_items, described.pages, memory().state_items) == (5, 8, 0)
    assert described.regions == (*described.kv, *described.state, described.aux)
    remote = RemoteMemory(backend="local", memory=described, descriptor=b"")
    assert decode_remote(encode_remote(remote)) == remote


def test_regions_that_touch_are_accepted():
    assert memory(aux=Region(0x4200, 32, 4)).aux_rows == 4


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
        change(["memory", "state"], [[0x1000, 1, 1]]),
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
