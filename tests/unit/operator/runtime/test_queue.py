"""The work queue: each requested key is worked on, once, never twice at the same time, never too early."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdpool_operator.runtime.queue import BACKOFF_FIRST_S, BACKOFF_JITTER, BACKOFF_LIMIT_S, WorkQueue

from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue[str]:
    return WorkQueue(clock, rng=random.Random(1))


def test_a_key_added_many_times_is_handed_out_once(queue):
    for _ in range(5):
        queue.add("a")
    assert queue.take() == "a"
    assert queue.take() is None


def test_keys_come_in_the_order_in_which_they_were_added(queue):
    for key in "abca":
        queue.add(key)
    assert [queue.take() for _ in range(4)] == ["a", "b", "c", None]


def test_a_key_added_while_it_is_worked_on_runs_again_afterwards_and_not_before(queue):
    queue.add("a")
    assert queue.take() == "a"
    queue.add("a")
    queue.add("a")
    assert queue.take() is None
    queue.done("a")
    assert queue.take() == "a"
    queue.done("a")
    assert queue.take() is None


def test_a_delayed_key_is_due_at_the_earliest_time_asked_for(queue, clock):
    queue.add_after("a", 10)
    queue.add_after("a", 3)
    queue.add_after("a", 20)
    clock.now += 2.9
    assert queue.take() is None
    clock.now += 0.2
    assert queue.take() == "a"
    queue.done("a")
    clock.now += 100
    assert queue.take() is None
    assert queue.delayed == 0


def test_back_off_doubles_to_its_limit_and_starts_anew_after_forget(queue):
    delays = [queue.retry("a") for _ in range(40)]
    for n, delay in enumerate(delays):
        base = min(BACKOFF_LIMIT_S, BACKOFF_FIRST_S * 2**n)
        assert base <= delay <= base * (1 + BACKOFF_JITTER)
    queue.forget("a")
    assert queue.retry("a") <= BACKOFF_FIRST_S * (1 + BACKOFF_JITTER)


def test_a_full_queue_refuses_new_keys_and_still_knows_the_old_ones(clock):
    queue: WorkQueue[int] = WorkQueue(clock, limit=3)
    assert queue.add(1)
    assert queue.add_after(2, 5)
    assert queue.add(3)
    assert not queue.add(4)
    assert not queue.add_after(5, 1)
    assert queue.add(1)
    assert queue.add(2)
    assert queue.refused == 2


async def test_get_wakes_for_an_added_key_and_for_a_delayed_one():
    queue: WorkQueue[str] = WorkQueue(asyncio.get_running_loop().time)
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add_after("late", 0.05)
    assert await asyncio.wait_for(waiting, 30) == "late"
    queue.done("late")
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("now")
    assert await asyncio.wait_for(waiting, 30) == "now"


async def test_all_waiting_workers_get_a_key_when_several_are_added_at_once():
    queue: WorkQueue[int] = WorkQueue(asyncio.get_running_loop().time)
    workers = [asyncio.create_task(queue.get()) for _ in range(4)]
    await asyncio.sleep(0)
    for key in range(4):
        queue.add(key)
    assert sorted(await asyncio.wait_for(asyncio.gather(*workers), 5)) == [0, 1, 2, 3]


def test_it_is_stalled_while_a_key_is_worked_on_or_waits_unattended_and_not_when_idle(queue, clock):
    clock.now += 1000
    assert queue.stalled_s() == 0
    queue.add_after("later", 5000)
    assert queue.stalled_s() == 0
    queue.add("a")
    queue.take()
    clock.now += 7
    assert queue.stalled_s() == 7
    queue.add("b")
    queue.done("a")
    clock.now += 4
    assert queue.stalled_s() == 4
    queue.take()
    assert queue.stalled_s() == 0
    queue.done("b")
    clock.now += 50
    assert queue.stalled_s() == 0


def test_a_key_that_arrives_after_long_idleness_is_not_a_stall(queue, clock):
    clock.now += 1000
    queue.add("a")
    assert queue.stalled_s() == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "after", "take", "done", "retry", "sleep"]), st.integers(0, 3)), max_size=60
)


class Promises:
    """A queue without workers, and its obligations: a later take serves every request."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.queue: WorkQueue[int] = WorkQueue(self.clock, rng=random.Random(0))
        self.asked: set[int] = set()
        self.due: dict[int, float] = {}  # the earliest delayed request
        self.working: set[int] = set()

    def add(self, key: int) -> None:
        self.queue.add(key)
        self.asked.add(key)

    def after(self, key: int) -> None:
        self.queue.add_after(key, key + 1)
        self._delayed(key, key + 1)

    def retry(self, key: int) -> None:
        self._delayed(key, self.queue.retry(key))

    def _delayed(self, key: int, seconds: float) -> None:
        self.due[key] = min(self.due.get(key, float("inf")), self.clock.now + seconds)

    def take(self, _: int = 0) -> bool:
        key = self.queue.take()
        # A delayed request becomes ready when its time has come and a worker asks.
        ripe = {key for key, when in self.due.items() if when <= self.clock.now}
        self.asked |= ripe
        for ripe_key in ripe:
            del self.due[ripe_key]
        if key is None:
            return False
        assert key not in self.working
        assert key in self.asked
        self.asked.discard(key)
        self.working.add(key)
        return True

    def done(self, _: int = 0) -> None:
        if self.working:
            self.queue.done(self.working.pop())

    def sleep(self, _: int = 0) -> None:
        self.clock.now += 1.0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(STEPS)
def test_no_request_is_lost_and_no_key_is_worked_on_twice_at_once(steps):
    promises = Promises()
    for step, key in steps:
        getattr(promises, step)(key)
    promises.clock.now += 2 * BACKOFF_LIMIT_S
    for _ in range(20):
        while promises.take():
            pass
        while promises.working:
            promises.done()
    assert not promises.asked
    assert not promises.due
    assert len(promises.queue) == promises.queue.delayed == 0
