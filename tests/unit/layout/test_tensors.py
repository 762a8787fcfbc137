"""Memories read from arrays of numpy and from tensors with torch's attributes."""

from dataclasses import dataclass, field
from math import prod

import numpy as np
import pytest
from pdpool_connector import kv_split
from pdpool_connector.layout.memory import KVMemory, LayerHeads, LayoutError, Region, StatePool


@dataclass
class Device:
    type: str
    index: int | None = None


@dataclass
class Tensor:
    """The attributes of a torch tensor that are read."""

    address: int
    shape: tuple[int, ...]
    dtype: str = "torch.bfloat16"
    device: Device = field(default_factory=lambda: Device("cuda", 1))
    contiguous: bool = True

    def data_ptr(self):
        return self.address

    def element_size(self):
        return 2

    def is_contiguous(self):
        return self.contiguous

    def stride(self):
        return tuple(prod(self.shape[at + 1 :]) for at in range(len(self.shape)))


def layers_of(count, *shape, **fields):
    size = 2 * prod(shape)
    return [Tensor(0x10000 + index * size, shape, **fields) for index in range(count)]


def test_pairs_of_tensors_give_regions_heads_and_device():
    k, v = layers_of(2, 8, 16, 4, 128), layers_of(2, 8, 16, 4, 128)
    for one in v:
        one.address += 1 << 30
    memory = KVMemory.from_tensors(kv_split(k, v), model="m", first_head=4, total_heads=8)
    assert [region.address for region in memory.kv] == [k[0].address, v[0].address, k[1].address, v[1].address]
    assert set(memory.kv[1:]) >= {Region(v[0].address, 16 * 4 * 128 * 2, 8, 1)}
    assert (memory.page_tokens, memory.layers, memory.kv_heads, memory.head_dim) == (16, 2, 4, 128)
    assert (memory.dtype, memory.on_device, memory.layout, memory.kv_order) == ("bfloat16", True, "NHD", "separate")


def test_heads_before_tokens_are_declared_by_the_layout():
    memory = KVMemory.from_tensors([(one, two) for one, two in [layers_of(2, 8, 4, 16, 128)]], model="m", layout="HND")
    assert (memory.page_tokens, memory.kv_heads, memory.head_dim) == (16, 4, 128)


def test_tokens_first_need_the_tokens_of_a_page():
    pair = tuple(layers_of(2, 96, 4, 128))
    memory = KVMemory.from_tensors([pair], model="m", page_tokens=16)
    assert (memory.pages, memory.page_tokens, memory.kv_heads) == (6, 16, 4)
    with pytest.raises(LayoutError, match=r"kv\[0\]\[0\] has shape \(96, 4, 128\), must be \[pages, page_to"):
        KVMemory.from_tensors([pair], model="m")
    with pytest.raises(LayoutError, match=r"must be \[tokens, heads, head_dim\] with whole pages"):
        KVMemory.from_tensors([pair], model="m", page_tokens=36)


def test_one_tensor_of_k_and_v_gives_two_regions():
    (both,) = layers_of(1, 2, 8, 16, 4, 128)
    memory = KVMemory.from_tensors([both], model="m")
    half = 8 * 16 * 4 * 128 * 2
    assert [(one.address - both.address, one.nbytes) for one in memory.kv] == [(0, half), (half, half)]


def test_interleaved_pages_give_one_region():
    memory = KVMemory.from_tensors(layers_of(3, 8, 2, 16, 4, 128), model="m", kv_order="interleaved")
    assert (len(memory.kv), memory.kv[0].item_bytes, memory.kv_heads) == (3, 2 * 16 * 4 * 128 * 2, 4)


def test_packed_pages_give_one_region_with_heads_of_both():
    memory = KVMemory.from_tensors(layers_of(3, 8, 4, 16, 256), model="m", kv_order="packed", layout="HND")
    assert (len(memory.kv), memory.kv[0].item_bytes, memory.kv_heads, memory.head_dim) == (3, 16 * 4 * 256 * 2, 4, 256)


def test_a_latent_cache_has_one_region_and_one_head():
    for tensors, given in ((layers_of(2, 8, 64, 576), {}), (layers_of(2, 512, 1, 576), {"page_tokens": 64})):
        memory = KVMemory.from_tensors(tensors, model="m", **given)
        assert (len(memory.kv), memory.pages, memory.page_tokens, memory.kv_heads) == (2, 8, 64, 1)


def test_numpy_arrays_lie_on_the_host():
    cache, aux = np.zeros((2, 2, 8, 16, 4, 32), np.float32), [np.zeros((5, 7), np.int64), np.zeros(5, np.int32)]
    memory = KVMemory.from_tensors([tuple(layer) for layer in cache], model="m", aux=aux)
    assert memory.kv[0] == Region(cache.ctypes.data, 16 * 4 * 32 * 4, 8)
    assert memory.aux == (Region(aux[0].ctypes.data, 56, 5), Region(aux[1].ctypes.data, 4, 5))
    assert (memory.dtype, memory.on_device, memory.aux_bytes) == ("float32", False, 60)


def test_state_pools_are_read_from_tensors():
    pool = StatePool.from_tensors("mamba", layers_of(2, 6, 3, 40), layers=(0, 2))
    assert pool == StatePool("mamba", (Region(0x10000, 240, 6, 1), Region(0x10000 + 1440, 240, 6, 1)), layers=(0, 2))


def test_layers_of_other_heads_must_be_described():
    kv = [tuple(layers_of(2, 8, 16, 4, 128)), tuple(layers_of(2, 8, 16, 2, 64))]
    for one in kv[1]:
        one.address += 1 << 30
    with pytest.raises(LayoutError, match=r"layers of \(heads, head_dim\) \[\(2, 64\), \(4, 128\)\]: give `heads`"):
        KVMemory.from_tensors(kv, model="m")
    heads = LayerHeads(4, 128, 0, 4), LayerHeads(2, 64, 0, 2)
    assert KVMemory.from_tensors(kv, model="m", heads=heads).heads_of(1) == heads[1]
    with pytest.raises(LayoutError, match=r"heads\[1\] has \(kv_heads, head_dim\) \(2, 32\) and kv\[1\] \(2, 64\)"):
        KVMemory.from_tensors(kv, model="m", heads=(heads[0], LayerHeads(2, 32, 0, 2)))


@pytest.mark.parametrize(
    ("kv", "fields", "message"),
    [
        ([], {}, "kv is empty, must have one entry for each layer"),
        ([7], {}, "kv[0] is a int, must be a tensor or a numpy array"),
        ([tuple(layers_of(3, 8, 16, 4, 128))], {}, "kv[0] has 3 tensors, must be a pair (K, V)"),
        (
            [tuple(layers_of(2, 8, 16, 4, 128))],
            {"kv_order": "interleaved"},
            "kv[0] has 2 tensors, must be a pair (K, V) in separate order (it is 'interleaved')",
        ),
        (layers_of(1, 8, 16, 4, 128), {"kv_order": "interleaved"}, "must be [pages, 2, ...] of 5 dimensions"),
        (layers_of(1, 8, 2, 16, 4, 128), {"kv_order": "packed"}, "must have 4 dimensions, K and V in the last: packed"),
        (
            layers_of(1, 8, 16, 4, 128, contiguous=False),
            {},
            "kv[0] has shape (8, 16, 4, 128) and strides (8192, ",
        ),
        (
            layers_of(2, 8, 64, 576),
            {"aux": [np.zeros((4, 4))[:, :2]]},
            "aux[0] has shape (4, 2) and strides (32,",
        ),
        (layers_of(2, 8, 64, 576), {"aux": [np.zeros(())]}, "aux[0] has shape (), must hold one or more equal items"),
        (
            [(layers_of(1, 8, 16, 4, 128)[0], Tensor(1 << 30, (8, 32, 4, 128)))],
            {},
            "page_tokens of the kv tensors is [16, 32], must be the same for all",
        ),
        (
            [(layers_of(1, 8, 16, 4, 128)[0], Tensor(1 << 30, (8, 16, 4, 128), "torch.float16"))],
            {},
            "dtype of the kv tensors is ['bfloat16', 'float16'], must be the same for all",
        ),
        (
            [(layers_of(1, 8, 16, 4, 128)[0], Tensor(1 << 30, (8, 16, 2, 128)))],
            {},
            "kv[0] has K of 4 heads and V of 2, must be as many",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(kv, fields, message):
    with pytest.raises(LayoutError) as caught:
        KVMemory.from_tensors(kv, model="m", **fields)
    assert message in str(caught.value)


def test_lists_of_k_and_v_must_be_as_long():
    with pytest.raises(LayoutError, match="k has 2 tensors and v 1, must be one of each for every layer"):
        kv_split(layers_of(2, 8, 16, 4, 128), layers_of(1, 8, 16, 4, 128))
