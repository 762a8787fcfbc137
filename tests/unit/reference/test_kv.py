"""Pages are handed out once, taken back once, and lie where the registered memory says."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdpool_connector.layout.arena import HostArena
from pdpool_reference import weights
from pdpool_reference.kv import AUX_ROWS, PAGE_TOKENS, AuxRow, PageAllocator, PagedKV

CONFIG, _ = weights.tiny()


def bytes_at(address, count):
    return bytes((ctypes.c_char * count).from_address(address))


def test_buffers_have_one_row_for_each_page():
    kv = PagedKV(CONFIG, 10)
    shapes = {buffer.shape for buffer in (*kv.k, *kv.v)}
    assert shapes == {(10, PAGE_TOKENS, CONFIG.kv_heads, CONFIG.head_dim)}
    assert len(kv.k) == len(kv.v) == CONFIG.layers


def test_regions_are_k_then_v_of_each_layer():
    kv = PagedKV(CONFIG, 10)
    assert kv.memory.pages == 10
    assert kv.memory.page_tokens == PAGE_TOKENS
    assert kv.memory.model == CONFIG.name
    for layer in range(CONFIG.layers):
        for region, buffer in zip(kv.memory.kv[2 * layer : 2 * layer + 2], (kv.k[layer], kv.v[layer]), strict=True):
            buffer[7] = np.random.default_rng(layer).standard_normal(buffer[7].shape)
            assert bytes_at(region.address + 7 * region.item_bytes, region.item_bytes) == buffer[7].tobytes()


def test_a_given_arena_is_used():
    with HostArena(PagedKV.nbytes(CONFIG, 3)) as arena:
        kv = PagedKV(CONFIG, 3, arena)
        assert arena.address <= kv.memory.kv[0].address
        assert kv.memory.aux[0].end <= arena.address + arena.nbytes


def test_aux_row_is_read_until_cleared():
    kv = PagedKV(CONFIG, 1)
    assert kv.read_aux(4) is None
    kv.write_aux(4, AuxRow(first_token=48_000, prompt_tokens=8191))
    assert kv.read_aux(4) == AuxRow(first_token=48_000, prompt_tokens=8191)
    assert kv.read_aux(3) is None
    assert kv.read_aux(5) is None
    kv.clear_aux(4)
    assert kv.read_aux(4) is None


def test_aux_row_copied_as_bytes_is_whole():
    here, there = PagedKV(CONFIG, 1), PagedKV(CONFIG, 1)
    here.write_aux(0, AuxRow(first_token=1, prompt_tokens=2))
    source, target = here.memory.aux[0], there.memory.aux[0]
    last = AUX_ROWS - 1
    ctypes.memmove(target.address + last * target.item_bytes, source.address, source.item_bytes)
    assert there.read_aux(last) == AuxRow(first_token=1, prompt_tokens=2)


def test_ids_are_all_different_until_none_is_left():
    pages = PageAllocator(5)
    first, second = pages.alloc(2), pages.alloc(3)
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4]
    assert first.dtype == np.int32
    assert pages.available == 0
    assert pages.alloc(1) is None
    assert pages.alloc(0).size == 0


def test_a_request_for_too_many_takes_nothing():
    pages = PageAllocator(5)
    assert pages.alloc(6) is None
    assert pages.available == 5


@pytest.mark.parametrize(
    ("ids", "message"),
    [([1, 1], "each must be given once"), ([3], "free already"), ([5], "within 0..4"), ([-1], "within 0..4")],
)
def test_a_wrong_free_is_refused_whole(ids, message):
    pages = PageAllocator(5)
    taken = pages.alloc(2)
    with pytest.raises(ValueError, match=message):
        pages.free(np.array([int(taken[0]), *ids], np.int32))
    assert pages.available == 3
    pages.free(taken)
    assert pages.available == 5


def test_a_double_free_is_refused():
    pages = PageAllocator(5)
    taken = pages.alloc(2)
    pages.free(taken)
    with pytest.raises(ValueError, match="free already"):
        pages.free(taken)


@given(st.lists(st.integers(-3, 6), max_size=30))
def test_no_id_is_out_twice_or_lost(moves):
    """A positive move takes so many ids, another gives the oldest batch back."""
    pages, out = PageAllocator(8), []
    for move in moves:
        if move > 0:
            taken = pages.alloc(move)
            out += [] if taken is None else [taken]
        elif out:
            pages.free(out.pop(0))
        held = [int(page) for batch in out for page in batch]
        assert len(set(held)) == len(held)
        assert pages.available == 8 - len(held)
