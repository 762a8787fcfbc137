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
        self.drops = Drops(lambda: self.now)
        self.greetings = HelloQueue(self.judge, self, self.drops, lambda: self.now)

    def judge(self, said: f.Hello, route: bytes, connection: int) -> None:
        assert route == b"%d" % connection
        self.judged.append((connection, self.now))
        self.now += len(said.memory) / 1000

    def at(self, key, when, call) -> None:
        assert key == "hellos"
        assert when >= self.now, "time to come"
        self.due = (when, call)

    def come(self, size: int, connection: int) -> None:
        self.greetings.come(hello(size), b"%d" % connection, connection)

    def run(self) -> list[int]:
        """Let time pass until nothing is due; who has been judged, in order."""
        while self.due is not None:
            (self.now, call), self.due = self.due, None
            call()
        return [connection for connection, _ in self.judged]


@pytest.fixture
def prefill() -> Prefill:
    return Prefill()


def test_the_first_is_judged_at_once(prefill) -> None:
    prefill.come(10, 1)
    assert prefill.judged == [(1, 100.0)]


def test_a_flood_takes_no_more_than_its_share_of_the_time(prefill) -> None:
    for connection in range(50):
        prefill.come(16, connection)
    prefill.run()
    assert len(prefill.judged) == 50
    spent, passed = 50 * 0.016, prefill.judged[-1][1] + 0.016 - 100.0
    assert spent / passed == pytest.approx(SHARE, rel=0.02)


def test_small_ones_are_judged_before_large_ones_and_equals_in_turn(prefill) -> None:
    for connection, size in enumerate((9, 16, 2, 16, 2), 1):
        prefill.come(size, connection)
    assert prefill.run() == [1, 3, 5, 2, 4]


def test_one_waits_for_each_connection_and_the_last_that_it_said_counts(prefill) -> None:
    for connection, size in ((1, 9), (2, 16), (3, 8), (2, 4)):
        prefill.come(size, connection)
    assert prefill.run() == [1, 2, 3]


def test_who_has_left_is_not_judged(prefill) -> None:
    for connection in (1, 2, 3):
        prefill.come(9, connection)
    prefill.greetings.ended(2)
    prefill.greetings.ended(7)
    assert prefill.run() == [1, 3]


def test_no_more_than_so_many_wait_and_the_rest_is_counted(prefill) -> None:
    for connection in range(MAX_WAITING + 3):
        prefill.come(1, connection)
    assert prefill.drops.counts() == {"hello": 2}, "one has been judged, and the others wait"
    assert prefill.run() == list(range(MAX_WAITING + 1))


def test_where_too_many_wait_a_small_one_takes_the_place_of_the_largest(prefill) -> None:
    for connection in range(MAX_WAITING + 1):
        prefill.come(16 + (connection == 100), connection)
    prefill.come(2, 1000)
    judged = prefill.run()
    assert judged[:2] == [0, 1000]
    assert set(range(MAX_WAITING + 1)) - set(judged) == {100}


def test_after_one_that_raised_the_next_has_its_turn(prefill) -> None:
    judged = prefill.greetings._judge

    def raising(said, route, connection) -> None:
        judged(said, route, connection)
        if connection == 1:
            raise ValueError("a fault")

    prefill.greetings._judge = raising
    with pytest.raises(ValueError, match="a fault"):
        prefill.come(9, 1)
    prefill.come(9, 2)
    assert prefill.run() == [1, 2]
