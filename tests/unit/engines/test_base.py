"""Cutting page lists into chunks."""

import numpy as np
import pytest
from pdpool_connector.engines import open_engine
from pdpool_connector.engines.base import cut
from pdpool_connector.layout.memory import KVMemory, Region

MEMORY = KVMemory(
    kv=(Region(0x1000, 1 << 20, 64), Region(0x1000 + (64 << 20), 1 << 20, 64)),
    aux=Region(0x1000 + (128 << 20), 64, 4),
    page_tokens=16,
    layers=1,
    kv_heads=1,
    head_dim=1,
    dtype="float32",
    model="m",
)
NONE = np.empty(0, np.int32)


def test_the_aux_row_goes_with_the_last_chunk_only():
    pages = np.arange(20, dtype=np.int32)
    chunks = cut(MEMORY, pages, pages, (1, 2))
    assert [len(chunk.local_pages) for chunk in chunks] == [7, 7, 6], "7 pages of 2 MiB and an aux row fit in 16 MiB"
    assert [chunk.aux for chunk in chunks] == [None, None, (1, 2)]


def test_aux_alone_is_a_chunk_and_nothing_is_none():
    (only,) = cut(MEMORY, NONE, NONE, (0, 3))
    assert (len(only.local_pages), len(only.remote_pages), only.aux) == (0, 0, (0, 3))
    assert cut(MEMORY, NONE, NONE) == []


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match="backend is 'carrier pigeon', must be one of nixl, mooncake, local"):
        open_engine("carrier pigeon", "me", target=True)
