"""Hellos take turns with all else that prefill does."""

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.runtime.hello_queue import MAX_WAITING, SHARE, HelloQueue
from pdpool_connector.transport.drops import Drops


def hello(size: int) -> f.Hello:
    return f.Hello(version=f.VERSION_MAX, oldest_version=1, sender="a" * 32, address="h:1", memory=b"m" * size)


class Prefill:
    """Judges Hellos, each of which takes it as many milliseconds as its memory has bytes."""

    def __init__(self) -> None:
        self.now, self.due = 100.0, None
        self.judged: list[tuple[int, float]] = []
        self.raises_at: int | None = None
        self.drops = Drops(lambda: self.now)
        self.hellos = HelloQueue(self.judge, self, self.drops, lambda: self.now)

    def judge(self, said: f.Hello, route: bytes, connection: int) -> None:
        assert route == b"%d" % connection
        self.judged.append((connection, self.now))
        self.now += len(said.memory) / 1000
        if connection == self.raises_at:
            raise ValueError("a fault")

    def at(self, key, when, call) -> None:
        assert key == "hellos"
        assert when >= self.now, "time to come"
        self.due = (when, call)

    def add(self, size: int, connection: int) -> None:
        self.hellos.add(hello(size), b"%d" % connection, connection)

    def run(self) -> list[int]:
        """Let time pass until nothing is due; who has been judged, in order."""
        while self.due is not None:
            (self.now, call), self.due = self.due, None
            call()
        return [connection for connection, _ in self.judged]


@pytest.fixture
def prefill() -> Prefill:
    return Prefill()


def test_first_hello_is_checked_at_once(prefill) -> None:
    prefill.add(10, 1)
    assert prefill.judged == [(1, 100.0)]


def test_flood_takes_its_share_of_time(prefill) -> None:
    for connection in range(50):
        prefill.add(16, connection)
    prefill.run()
    assert len(prefill.judged) == 50
    spent, passed = 50 * 0.016, prefill.judged[-1][1] + 0.016 - 100.0
    assert spent / passed == pytest.approx(SHARE, rel=0.02)


def test_small_hellos_go_first(prefill) -> None:
    for connection, size in enumerate((9, 16, 2, 16, 2), 1):
        prefill.add(size, connection)
    assert prefill.run() == [1, 3, 5, 2, 4]


def test_last_hello_of_a_connection_counts(prefill) -> None:
    for connection, size in ((1, 9), (2, 16), (3, 8), (2, 4)):
        prefill.add(size, connection)
    assert prefill.run() == [1, 2, 3]


def test_who_has_left_is_not_judged(prefill) -> None:
    for connection in (1, 2, 3):
        prefill.add(9, connection)
    prefill.hellos.ended(2)
    prefill.hellos.ended(7)
    assert prefill.run() == [1, 3]


def test_waiting_hellos_are_bounded(prefill) -> None:
    for connection in range(MAX_WAITING + 3):
        prefill.add(1, connection)
    assert prefill.drops.counts() == {"hello": 2}, "one has been judged, and the others wait"
    assert prefill.run() == list(range(MAX_WAITING + 1))


def test_small_hello_replaces_the_largest(prefill) -> None:
    for connection in range(MAX_WAITING + 1):
        prefill.add(16 + (connection == 100), connection)
    prefill.add(2, 1000)
    judged = prefill.run()
    assert judged[:2] == [0, 1000]
    assert set(range(MAX_WAITING + 1)) - set(judged) == {100}


def test_hello_after_a_fault_is_checked(prefill) -> None:
    prefill.raises_at = 1
    with pytest.raises(ValueError, match="a fault"):
        prefill.add(9, 1)
    prefill.add(9, 2)
    assert prefill.run() == [1, 2]
