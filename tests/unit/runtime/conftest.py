"""Memories, connectors and workers, ended with the test."""

from collections.abc import Callable, Iterator

import pytest
from pdpool_connector import ConnectorConfig, DecodeConnector, HostArena, KVMemory, PrefillConnector
from pdpool_connector.backends.base import Poll

from tests.unit.runtime.scripted import Bench, ScriptedBackend
from tests.unit.runtime.small_memory import SMALL_BYTES, lay_out


@pytest.fixture
def memory() -> Iterator[KVMemory]:
    with HostArena(SMALL_BYTES) as arena:
        yield lay_out(arena)


@pytest.fixture
def prefill(memory: KVMemory) -> Iterator[PrefillConnector]:
    with PrefillConnector(ConnectorConfig("127.0.0.1"), memory) as connector:
        yield connector


@pytest.fixture
def decode(memory: KVMemory) -> Iterator[DecodeConnector]:
    with DecodeConnector(ConnectorConfig("127.0.0.1"), memory) as connector:
        yield connector


@pytest.fixture
def bench():
    made: list[Bench] = []

    def make(prepare: Callable[[ScriptedBackend], None] = lambda _: None, **memories) -> Bench:
        backend = ScriptedBackend()
        prepare(backend)
        made.append(Bench(backend, **memories))
        assert made[-1].connected.get(timeout=30) is backend.connect_error
        return made[-1]

    yield make
    for one in made:
        one.worker.close()
        while not one.worker.join(0.05):
            while not one.backend.submitted.empty():
                one.backend.submitted.get().outcome = Poll.DONE
        assert one.gone.is_set()
