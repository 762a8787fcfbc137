"""A connector whose turn was cut short by an exception that ends the program: it releases nothing, and still closes."""

import threading
import time

import numpy as np
import pytest
from pdpool_connector import PrefillConnector
from pdpool_connector.protocol.events import OpenRequest
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.status import Cause


def _open_many(prefill: PrefillConnector) -> None:
    """Some of them are taken by the connector's own thread, which nothing interrupts."""
    for room in range(2, 1000):
        prefill.open(room, "interrupted")
        time.sleep(0.001)


def test_interrupt_within_a_call_holds_all_pages(prefill, monkeypatch) -> None:
    first = prefill.open(1, "first")
    first.send(np.arange(2, dtype=np.int32), start=0)
    ours, handle = threading.current_thread(), PrefillMachine.handle

    def interrupted(machine, event, now):
        if threading.current_thread() is ours and isinstance(event, OpenRequest):
            raise KeyboardInterrupt
        return handle(machine, event, now)

    monkeypatch.setattr(PrefillMachine, "handle", interrupted)
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
