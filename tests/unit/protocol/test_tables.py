"""Timers, queue counts, bounded tables and tombstones: the small parts of the machines."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdpool_connector.protocol.bounded_table import BoundedTable
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.queue_counts import QueueCounts
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.timers import Timers
from pdpool_connector.protocol.tombstones import Tombstone, TombstoneTable

from tests.unit.protocol.sides import DECODE, DECODE_2, TIMEOUTS

WHENS = st.one_of(st.floats(0, 100), st.integers(0, 12).map(lambda eighths: eighths / 8), st.just(float("inf")))


@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), WHENS), st.booleans())))
def test_timers_equal_plain_dictionary(steps: list[tuple[int, float | None, bool]]) -> None:
    timers: Timers[int] = Timers()
    plain: dict[int, tuple[float, int]] = {}
    for number, (key, when, take) in enumerate(steps):
        if when is None:
            timers.cancel(key)
            plain.pop(key, None)
        else:
            timers.set(key, when)
            plain[key] = (when, number)
        first = min(plain, key=plain.__getitem__, default=None)
        assert timers.next() == (None if first is None else plain[first][0])
        if take and first is not None:
            assert timers.pop_due(plain.pop(first)[0]) == first, "equal times in the order in which they were set"
    order = []
    while (key := timers.pop_due(50.0)) is not None:
        order.append(plain.pop(key))
    assert order == sorted(order)
    assert all(when > 50.0 for when, _ in plain.values())
    assert len(timers) == len(plain)


def test_moved_timer_takes_no_more_room() -> None:
    timers: Timers[str] = Timers()
    for step in range(10_000):
        timers.set("a", step)
        if step % 2:
            timers.cancel("a")
    kept = vars(timers)
    assert all(len(held) < 100 for held in kept.values() if not isinstance(held, int)), kept


def test_cancelled_timer_takes_no_more_room() -> None:
    timers: Timers[int] = Timers()
    timers.set(0, 300.0)
    for _ in range(1_000):
        timers.set(1, 300.01)
        assert timers.next() == 300.0
        timers.cancel(1)
    assert len(timers._heap) < 100


class Counted(float):
    """A time that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) < other

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return float(self) == other

    __hash__ = float.__hash__


def test_waiting_timers_slow_no_call() -> None:
    timers: Timers[tuple[str, int]] = Timers()
    for waiting in range(5_000):
        timers.set(("tombstone", waiting), Counted(1_000 + waiting / 300))
    most = 0
    for step in range(20_000):
        Counted.compared = 0
        timers.set(("life", step), Counted(step / 3_000 + 300))
        timers.set(("nudge", step), Counted(step / 3_000 + 0.1))
        timers.next()
        timers.cancel(("nudge", step - 10))
        timers.cancel(("life", step - 10))
        while timers.pop_due(step / 3_000) is not None:
            pass
        most = max(most, Counted.compared)
    assert most < 1_000


def test_age_in_queue_spans_its_states() -> None:
    queues: QueueCounts[str] = QueueCounts(
        {"waiting": ("waiting", "queue"), "ready": ("ready", "queue"), "sending": ("sending",)}
    )
    queues.move(1, None, "waiting", 10.0, progress=True)
    queues.move(2, None, "waiting", 11.0, progress=True)
    queues.move(1, "waiting", "ready", 15.0, progress=True)
    assert (queues.count("queue"), queues.oldest("queue"), queues.oldest("ready")) == (2, 10.0, 15.0)
    assert (queues.moved_total("queue"), queues.moved_total("waiting")) == (0, 1)
    queues.move(1, "ready", "sending", 16.0, progress=True)
    assert (queues.count("queue"), queues.oldest("queue"), queues.moved_total("queue")) == (1, 11.0, 1)
    queues.move(1, "sending", "done", 17.0, progress=True)
    assert (queues.count("sending"), queues.oldest("sending"), queues.moved_total("sending")) == (0, None, 1)
    queues.move(2, "waiting", "failed", 18.0, progress=False)
    assert (queues.count("queue"), queues.moved_total("queue")) == (0, 1)


class TestBoundedTable:
    def table(self) -> tuple[BoundedTable[int, str], Timers]:
        timers: Timers = Timers()
        return BoundedTable(4, timers, "row"), timers

    def test_one_peer_has_half(self) -> None:
        table, _ = self.table()
        table.put(1, "a", DECODE, 10.0)
        assert not table.full(DECODE)
        assert table.full(DECODE, reserved_of_peer=1)
        table.put(2, "b", DECODE, 10.0)
        assert (table.full(DECODE), table.full(DECODE_2), table.full("")) == (True, False, False)
        assert table.full("", reserved=2)

    def test_row_without_peer_counts_in_all_only(self) -> None:
        table, _ = self.table()
        for key in range(4):
            assert not table.full("")
            table.put(key, "x", "", 10.0)
        assert table.full("")

    def test_popped_row_frees_its_share_and_timer(self) -> None:
        table, timers = self.table()
        table.put(1, "a", DECODE, 10.0)
        table.keep_until(1, 5.0)
        assert (timers.next(), table.get(1), len(table)) == (5.0, "a", 1)
        assert (table.pop(1), table.pop(1), table.count(DECODE), len(table)) == ("a", None, 0, 0)
        assert timers.next() is None


class TestTombstones:
    def table(self, limit: int = 4) -> TombstoneTable:
        return TombstoneTable(replace(TIMEOUTS, max_tombstones=limit), Timers())

    def add(self, table: TombstoneTable, attempt: AttemptId, cause: Cause | None = Cause.ABORTED) -> None:
        table.add(Tombstone(attempt, 1, cause, ""), 0.0, reserved=0, reserved_of_peer=0)

    def test_no_room_raises_floor_instead(self) -> None:
        table = self.table()
        attempts = [AttemptId(DECODE, number) for number in range(4)]
        for attempt in attempts[:3]:
            self.add(table, attempt)
        assert [table.get(attempt) is not None for attempt in attempts] == [True, True, False, False]
        assert [table.forgotten(attempt) for attempt in attempts[2:]] == [True, False]

    def test_expired_end_becomes_floor(self) -> None:
        table = self.table()
        self.add(table, AttemptId(DECODE, 3))
        assert not table.forgotten(AttemptId(DECODE, 3))
        table.expire(AttemptId(DECODE, 3))
        assert table.forgotten(AttemptId(DECODE, 3))
        assert table.forgotten(AttemptId(DECODE, 2))
        assert not table.forgotten(AttemptId(DECODE, 4))
        assert not table.forgotten(AttemptId(DECODE_2, 1))

    def test_floor_goes_with_last_end_of_peer(self) -> None:
        table = self.table()
        for number in (1, 2):
            self.add(table, AttemptId(DECODE, number))
        table.expire(AttemptId(DECODE, 1))
        assert not table.forget_peer(DECODE)
        table.expire(AttemptId(DECODE, 2))
        assert table.forget_peer(DECODE)
        assert not table.forgotten(AttemptId(DECODE, 2))

    def test_unacknowledged_ends_are_counted_by_peer(self) -> None:
        table = self.table(8)
        for number in (1, 2):
            self.add(table, AttemptId(DECODE, number))
        self.add(table, AttemptId(DECODE_2, 1))
        assert (table.unacknowledged([DECODE]), table.unacknowledged([DECODE, DECODE_2])) == (2, 3)
        for _ in range(2):
            assert table.acknowledge(AttemptId(DECODE, 1), 0.0)
        assert not table.acknowledge(AttemptId(DECODE, 9), 0.0)
        table.expire(AttemptId(DECODE, 2))
        assert (table.unacknowledged([DECODE]), table.unacknowledged([DECODE_2])) == (0, 1)


class TestTimeouts:
    @pytest.mark.parametrize(
        ("field", "value", "why"),
        [
            ("match_s", 0, "match_s is 0, must be above 0"),
            ("quiesce_s", -1.0, "quiesce_s is -1.0"),
            ("query_s", float("nan"), "query_s is nan"),
            ("result_s", "5", "result_s='5' is of type str: give a number"),
            ("max_attempts", 2.5, "max_attempts=2.5 is of type float: give an int"),
            ("max_tombstones", True, "max_tombstones=True is of type bool"),
            ("match_s", None, "match_s=None is of type NoneType: give a number"),
            ("max_attempts", None, "max_attempts=None is of type NoneType: give an int"),
        ],
    )
    def test_wrong_value_is_named(self, field: str, value: object, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            Timeouts(**{field: value})
