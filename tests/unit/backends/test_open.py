"""Choosing a data plane."""

import contextlib

import pytest
from pdpool_connector.backends import open_backend
from pdpool_connector.backends.base import BackendError
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.memory import KVMemory, Region


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(
        ValueError, match="backend is 'carrier pigeon', must be one of nixl, mooncake, mori, ascend, local"
    ):
        open_backend("carrier pigeon", "me", target=True)


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_memory_that_is_not_mapped_is_not_registered(backend: str) -> None:
    backend = open_backend(backend, "a" * 32, target=True)
    with contextlib.closing(backend), HostArena(2048) as arena:
        memory = KVMemory(
            kv=(arena.region(0, 64, 16), Region(0x1000, 64, 16)),
            aux=(arena.region(1024, 64, 16),),
            page_tokens=16,
            layers=1,
            kv_heads=1,
            head_dim=1,
            dtype="float32",
            model="m",
        )
        with pytest.raises(BackendError, match="region at 0x1000 with 1024 bytes is not memory that this process can"):
            backend.register(memory)
