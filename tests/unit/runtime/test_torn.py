"""A connector whose work was cut short by what ends the program: it releases nothing, and still closes."""

import threading
import time

import numpy as np
import pytest
from pdpool_connector import ConnectorConfig, HostArena, KVMemory, PrefillConnector
from pdpool_connector.protocol.events import OpenRequest
from pdpool_connector.protocol.status import Cause


@pytest.fixture
def prefill():
    arena = HostArena(1 << 16)
    memory = KVMemory(
        kv=(arena.region(0, 512, 8), arena.region(8192, 512, 8)),
        aux=arena.region(32768, 64, 4),
        page_tokens=16,
        layers=1,
        kv_heads=1,
        head_dim=16,
        dtype="float16",
        model="m",
    )
    connector = PrefillConnector(ConnectorConfig("127.0.0.1", backend="local"), memory, lambda: None)
    connector.start()
    yield connector
    connector.close()


def _open_many(prefill: PrefillConnector) -> None:
    """Some of them are taken by the connector's own thread, which nothing interrupts."""
    for room in range(2, 1000):
        prefill.open(room, "interrupted")
        time.sleep(0.001)


def test_a_keyboard_interrupt_within_a_call_fails_what_is_open_and_holds_its_pages(prefill, monkeypatch) -> None:
    first = prefill.open(1, "first")
    first.send(np.arange(2, dtype=np.int32), start=0)
    ours, handle = threading.current_thread(), prefill._machine.handle

    def interrupted(event, now):
        if threading.current_thread() is ours and isinstance(event, OpenRequest):
            raise KeyboardInterrupt
        return handle(event, now)

    monkeypatch.setattr(prefill._machine, "handle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _open_many(prefill)
    deadline = time.monotonic() + 30
    while not first.status.ended:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert (first.status.cause, first.status.releasable) == (Cause.INTERNAL, False)
    first.abort()
    late = prefill.open(5000, "late")
    assert (late.status.cause, late.status.releasable) == (Cause.INTERNAL, True)
    begun = time.monotonic()
    prefill.close(timeout_s=120.0)
    assert time.monotonic() - begun < 30, "as long as it takes, and no longer because of what is open"
    assert not first.status.releasable
