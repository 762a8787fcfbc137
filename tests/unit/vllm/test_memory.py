"""vLLM's tensors, described to the connector."""

from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace

import pytest
from pdpool_connector import LayoutError
from pdpool_vllm.memory import Place, describe, instance_of

BLOCKS, HEADS, TOKENS, CONTENT = 8, 4, 16, 64
ORDERS = {"LBHNC": (0, 1, 2, 3), "LBNHC": (0, 2, 1, 3)}


@dataclass
class View:
    """A view of vLLM's: [blocks, heads, tokens, content], in some order of memory."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str = "torch.bfloat16"

    @property
    def device(self):
        return SimpleNamespace(type="cuda", index=3)

    def data_ptr(self):
        return self.address

    def element_size(self):
        return 2

    def stride(self, at=None):
        return self.strides if at is None else self.strides[at]

    def is_contiguous(self):
        return self.strides == dense(self.shape)

    def permute(self, *order):
        return replace(
            self, shape=tuple(self.shape[at] for at in order), strides=tuple(self.strides[at] for at in order)
        )


def dense(shape):
    return tuple(prod(shape[at + 1 :]) for at in range(len(shape)))


def layer(number, layout="LBHNC", shape=(BLOCKS, HEADS, TOKENS, CONTENT)):
    order = ORDERS[layout]
    address = 0x10000000 * (number + 1)
    lies = tuple(shape[at] for at in order)
    return View(address, lies, dense(lies)).permute(*(order.index(at) for at in range(4)))


def caches(count=2, **fields):
    return {f"model.layers.{number}.self_attn.attn": layer(number, **fields) for number in range(count)}


PLACE = Place(tp_rank=0, tp_size=1, total_heads=HEADS)


@pytest.mark.parametrize(("layout", "found"), [("LBHNC", "HND"), ("LBNHC", "NHD")])
def test_layout_is_that_of_the_memory(layout, found):
    memory = describe(caches(layout=layout), blocks=BLOCKS, model="m", place=PLACE)
    assert (memory.layout, memory.kv_order, memory.page_tokens) == (found, "packed", TOKENS)
    assert (memory.kv_heads, memory.head_dim, memory.pages, memory.on_device) == (HEADS, CONTENT, BLOCKS, True)
    assert memory.kv[0].item_bytes == 2 * HEADS * TOKENS * CONTENT


def test_layers_follow_their_numbers():
    given = caches(12)
    memory = describe(dict(sorted(given.items())), blocks=BLOCKS, model="m", place=PLACE)
    assert [region.address for region in memory.kv] == [one.address for one in given.values()]


def test_layers_that_share_a_tensor_are_described_once():
    given = caches(2)
    given["model.layers.2.self_attn.attn"] = given["model.layers.1.self_attn.attn"]
    assert describe(given, blocks=BLOCKS, model="m", place=PLACE).layers == 2


def test_rank_holds_its_heads():
    place = Place(tp_rank=1, tp_size=2, total_heads=2 * HEADS)
    memory = describe(caches(), blocks=BLOCKS, model="m", place=place)
    assert (memory.first_head, memory.kv_heads, memory.total_heads) == (HEADS, HEADS, 2 * HEADS)
    assert [shard.first_head for shard in instance_of(place, 2)] == [0, HEADS]


def test_latent_is_the_same_on_all_ranks():
    place = Place(tp_rank=1, tp_size=2, total_heads=1, latent=True)
    memory = describe(caches(shape=(BLOCKS, 1, TOKENS, 576)), blocks=BLOCKS, model="m", place=place)
    assert (memory.kv_order, memory.first_head, memory.total_heads, memory.head_dim) == ("separate", 0, 1, 576)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (caches(shape=(2 * BLOCKS, HEADS, TOKENS // 2, CONTENT)), "set --block-size to the kernel's"),
        ({"a": [1, 2]}, "cache of a has shape (), must be [8 blocks"),
        ({"a": replace(layer(0), strides=(2 * HEADS * TOKENS * CONTENT, TOKENS * CONTENT, CONTENT, 1))}, "LBHNC"),
        ({"a": layer(0), "b": layer(1, layout="LBNHC")}, "layouts of the layers are ['HND', 'NHD']"),
    ],
)
def test_other_caches_are_refused(given, message):
    with pytest.raises(LayoutError) as caught:
        describe(given, blocks=BLOCKS, model="m", place=PLACE)
    assert message in str(caught.value)
