"""Sends whose pages are not ready wait in order, outside the state machine."""

import threading
from collections.abc import Iterator
from queue import Queue

import pytest
from pdpool_connector.protocol.events import AbortTransfer, SendPages
from pdpool_connector.protocol.status import Cause
from pdpool_connector.runtime import ready_queue as module
from pdpool_connector.runtime.ready_queue import ReadyQueue


class Engine:
    """A queue, and the events that it has posted."""

    def __init__(self) -> None:
        self.posted: Queue = Queue()
        self.queue = ReadyQueue(self.posted.put, 0.0002)

    def next(self):
        return self.posted.get(timeout=30)


def send(handle: int, start: int) -> SendPages:
    return SendPages(handle, b"", start, False, None)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    assert made.queue.close(30)


def test_ready_sends_start_no_thread(engine: Engine) -> None:
    before = threading.active_count()
    engine.queue.add(send(1, 0), None)
    engine.queue.add(send(1, 1), lambda: True)
    assert [engine.next().start, engine.next().start] == [0, 1]
    assert threading.active_count() == before


def test_sends_of_one_handoff_keep_their_order(engine: Engine) -> None:
    first, third = threading.Event(), threading.Event()
    engine.queue.add(send(1, 0), first.is_set)
    engine.queue.add(send(1, 1), None)
    engine.queue.add(send(1, 2), third.is_set)
    engine.queue.add(send(2, 0), None)
    assert engine.next() == send(2, 0)
    third.set()
    engine.queue.add(send(2, 1), lambda: True)
    assert engine.next() == send(2, 1)
    assert engine.posted.empty()
    first.set()
    assert [engine.next().start for _ in range(3)] == [0, 1, 2]
    engine.queue.add(send(1, 3), None)
    assert engine.next().start == 3


def test_dropped_sends_are_never_posted(engine: Engine) -> None:
    ready = threading.Event()
    for start in range(3):
        engine.queue.add(send(1, start), ready.is_set)
    engine.queue.drop(1)
    engine.queue.drop(1)
    ready.set()
    engine.queue.add(send(2, 0), None)
    assert engine.next() == send(2, 0)
    assert engine.posted.empty()


@pytest.mark.parametrize("looks", [0, 1])
def test_ready_that_raises_ends_its_handoff_alone(engine: Engine, looks: int, caplog) -> None:
    left = iter(range(looks))

    def ready() -> bool:
        if next(left, None) is None:
            raise ValueError("no such event")
        return False

    engine.queue.add(send(1, 0), ready)
    abort = engine.next()
    message = "ready() of a send raised ValueError: no such event"
    assert abort == AbortTransfer(1, message, Cause.INTERNAL)
    engine.queue.add(send(2, 0), None)
    assert engine.next() == send(2, 0)
    assert "no such event" in caplog.text


def test_sends_beyond_the_limit_are_refused(engine: Engine, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    for start in range(2):
        engine.queue.add(send(1, start), lambda: False)
    with pytest.raises(RuntimeError, match="2 sends wait for their pages already"):
        engine.queue.add(send(1, 2), None)
    engine.queue.drop(1)
    engine.queue.add(send(2, 0), lambda: False)


def test_close_ends_the_thread_and_forgets() -> None:
    engine = Engine()
    engine.queue.add(send(1, 0), lambda: False)
    assert engine.queue.close(30)
    assert not [one for one in threading.enumerate() if one.name == "pdpool-ready"]
    engine.queue.add(send(1, 1), lambda: False)
    assert engine.posted.empty()
    assert not [one for one in threading.enumerate() if one.name == "pdpool-ready"]
