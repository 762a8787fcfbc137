"""Timers, census, graveyard: the small parts of the machines."""

from hypothesis import given
from hypothesis import strategies as st
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.queue_counts import QueueCounts
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timers import Timers
from pdpool_connector.protocol.tombstones import Tombstone, TombstoneTable

WHENS = st.one_of(st.floats(0, 100), st.integers(0, 12).map(lambda eighths: eighths / 8), st.just(float("inf")))


@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), WHENS), st.booleans())))
def test_timers_agree_with_a_plain_dictionary(steps: list[tuple[int, float | None, bool]]) -> None:
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


def test_a_timer_that_is_moved_for_ever_takes_no_more_room() -> None:
    timers: Timers[str] = Timers()
    for step in range(10_000):
        timers.set("a", step)
        if step % 2:
            timers.cancel("a")
    kept = vars(timers)
    assert all(len(held) < 100 for held in kept.values() if not isinstance(held, int)), kept


def test_what_is_cancelled_beside_the_next_deadline_takes_no_more_room() -> None:
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


def test_no_call_takes_longer_for_the_thousands_of_timers_that_wait() -> None:
    timers: Timers[tuple[str, int]] = Timers()
    for waiting in range(5_000):
        timers.set(("grave", waiting), Counted(1_000 + waiting / 300))
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


def test_census_keeps_the_age_of_a_queue_across_its_states() -> None:
    census: QueueCounts[str] = QueueCounts(
        {"waiting": ("waiting", "queue"), "ready": ("ready", "queue"), "sending": ("sending",)}
    )
    census.move(1, None, "waiting", 10.0, progress=True)
    census.move(2, None, "waiting", 11.0, progress=True)
    census.move(1, "waiting", "ready", 15.0, progress=True)
    assert (census.count("queue"), census.oldest("queue"), census.oldest("ready")) == (2, 10.0, 15.0)
    assert (census.went_on("queue"), census.went_on("waiting")) == (0, 1)
    census.move(1, "ready", "sending", 16.0, progress=True)
    assert (census.count("queue"), census.oldest("queue"), census.went_on("queue")) == (1, 11.0, 1)
    census.move(1, "sending", "done", 17.0, progress=True)
    assert (census.count("sending"), census.oldest("sending"), census.went_on("sending")) == (0, None, 1)
    census.move(2, "waiting", "failed", 18.0, progress=False)
    assert (census.count("queue"), census.went_on("queue")) == (0, 1), (
        "a queue in which requests only fail does not move"
    )


def test_a_graveyard_forgets_by_deadline_and_raises_nobody() -> None:
    graves = TombstoneTable(4)
    peer = "d" * 32
    attempts = [AttemptId(peer, number) for number in range(5)]
    assert [graves.bury(Tombstone(a, 1, 0, Cause.ABORTED, "")) for a in attempts[:3]] == [True, True, False]
    assert graves.stale(attempts[2])
    assert not graves.stale(attempts[3])
    graves.forget((peer, attempts[0]))
    assert graves.get(attempts[0]) is None
    assert graves.stale(attempts[0])
    other = AttemptId("e" * 32, 0)
    assert graves.bury(Tombstone(other, 1, 0, None, ""))
    assert not graves.forget_peer("e" * 32)
    graves.forget(("e" * 32, other))
    assert graves.stale(other)
    assert graves.forget_peer("e" * 32)
    assert not graves.stale(other)
