"""The leader lease: never two leaders, under all clocks, delays and failures. A lost leader is soon replaced."""

import asyncio
import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pdpool_operator.runtime.lease import (
    LEASE_DURATION_S,
    RENEW_DEADLINE_S,
    RETRY_S,
    UNACTED_S,
    Acquire,
    Elector,
    LeaseConflictError,
    LeaseUnavailableError,
    Lost,
    Record,
    Renew,
    View,
    Wait,
    decide,
)

from tests.cluster.hands import eventually

OTHERS = Record(holder="other", duration_s=15, version="7", transitions=3)
MINE = replace(OTHERS, holder="me")


@pytest.mark.parametrize(
    ("view", "now", "expected"),
    [
        pytest.param(View(), 0.0, Acquire(transitions=0), id="no lease yet"),
        pytest.param(View(OTHERS, since=10.0), 11.0, Wait(RETRY_S), id="held by another"),
        pytest.param(View(OTHERS, since=10.0), 24.5, Wait(0.5), id="held by another, nearly expired"),
        pytest.param(View(OTHERS, since=10.0), 25.0, Acquire(transitions=4), id="unchanged for its duration"),
        pytest.param(View(replace(OTHERS, holder=""), since=10.0), 10.0, Acquire(transitions=4), id="released"),
        pytest.param(View(MINE, since=10.0), 10.1, Acquire(transitions=3), id="our own write, answer never seen"),
        pytest.param(View(MINE, since=10.0, renewed_at=10.0), 19.9, Renew(), id="ours"),
        pytest.param(View(None, since=12.0, renewed_at=10.0), 12.0, Renew(), id="ours, but deleted"),
        pytest.param(View(MINE, since=10.0, lapsed=True), 99.0, Renew(), id="lapsed, still ours"),
    ],
)
def test_decision(view, now, expected):
    assert decide(view, now, "me") == expected


def test_a_leader_that_could_not_renew_in_time_or_finds_another_holder_has_lost():
    late, taken = View(MINE, 10.0, renewed_at=10.0), View(OTHERS, 12.0, renewed_at=10.0)
    assert decide(late, 20.0, "me") == Lost("the lease was not renewed for 10.0 s")
    assert decide(taken, 12.0, "me") == Lost("the lease is held by other", taken=True)
    for record in (OTHERS, replace(MINE, version=""), replace(MINE, holder=""), None):
        lapsed = View(record, 12.0, lapsed=True)
        assert decide(lapsed, 99.0, "me") == Lost(
            "the lease was released or deleted, or another process holds it", True
        )


def test_a_record_counts_as_unchanged_from_when_this_process_first_saw_it():
    view = View().seen(OTHERS, 100.0).seen(OTHERS, 110.0)
    assert isinstance(decide(view, 114.9, "me"), Wait)
    view = view.seen(replace(OTHERS, version="8"), 114.9)
    assert isinstance(decide(view, 115.5, "me"), Wait)
    assert isinstance(decide(view, 130.0, "me"), Acquire)


def test_a_deleted_lease_is_not_up_for_grabs_before_its_holder_must_have_noticed():
    view = View().seen(OTHERS, 100.0).seen(None, 101.0).seen(None, 102.0)
    assert isinstance(decide(view, 115.9, "me"), Wait)
    assert isinstance(decide(view, 116.0, "me"), Acquire)


class Store:
    """One Lease with resourceVersion preconditions, as the API server keeps it."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.down = False
        self.hang, self.resumed = False, asyncio.Event()

    async def read(self) -> Mapping[str, Any] | None:
        if self.hang:
            await self.resumed.wait()
        if self.down:
            raise LeaseUnavailableError("down")
        return copy.deepcopy(self.lease)

    async def write(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.down:
            raise LeaseUnavailableError("down")
        current = self.lease["metadata"]["resourceVersion"] if self.lease else None
        if body["metadata"].get("resourceVersion") != current:
            raise LeaseConflictError("conflict")
        self.version += 1
        self.lease = copy.deepcopy(dict(body))
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)


class Clock:
    def __init__(self, rate: float = 1.0, offset: float = 0.0) -> None:
        self.rate, self.offset, self.true = rate, offset, 0.0

    def __call__(self) -> float:
        return self.offset + self.true * self.rate


def elector(
    store: Store, me: str, clock: Clock, lost: list[str], pods_version: Callable[[], str] = lambda: ""
) -> Elector:
    async def sleep(seconds: float) -> None:
        clock.true += seconds
        await asyncio.sleep(0)

    return Elector(store, me, "pdpool-operator", "pdpool-system", clock, lost.append, pods_version, sleep=sleep)


async def test_it_acquires_renews_and_releases():
    store, clock, lost = Store(), Clock(), []
    leader = elector(store, "a", clock, lost)
    await leader.acquire(asyncio.Event())
    assert leader.leading
    holding = asyncio.create_task(leader.hold())
    for _ in range(100):
        await asyncio.sleep(0)
    assert clock.true > 2 * LEASE_DURATION_S
    assert leader.leading
    assert store.lease["spec"]["leaseTransitions"] == 0
    holding.cancel()
    await leader.release()
    assert not leader.leading
    assert store.lease["spec"]["holderIdentity"] == ""
    assert store.lease["spec"]["leaseDurationSeconds"] == 1
    assert not lost


async def test_a_released_lease_is_taken_at_once_and_a_held_one_only_after_it_ran_out():
    store, lost = Store(), []
    first = elector(store, "a", Clock(), lost)
    await first.acquire(asyncio.Event())
    clock = Clock(offset=5000)
    second = elector(store, "b", clock, lost)
    await second.acquire(asyncio.Event())
    assert clock.true >= LEASE_DURATION_S
    await second.release()
    clock = Clock()
    third = elector(store, "c", clock, lost)
    await third.acquire(asyncio.Event())
    assert clock.true <= RETRY_S
    assert store.lease["spec"]["leaseTransitions"] == 2


async def test_lease_taken_by_another_is_lost_once():
    store, clock, lost = Store(), Clock(), []
    leader = elector(store, "a", clock, lost)
    await leader.acquire(asyncio.Event())
    await store.write({**store.lease, "spec": {"holderIdentity": "b", "leaseDurationSeconds": 15}})
    await asyncio.wait_for(leader.hold(), 30)
    assert len(lost) == 1
    assert not leader.leading
    assert leader.write_budget_s() == 0


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("never")


class TestLapsedLease:
    """A leader that cannot renew in time stops writing. Whether it leads again depends on the Lease's holder."""

    @pytest.fixture
    async def lapsed(self):
        store, clock, lost = Store(), Clock(), []
        leader = elector(store, "a", clock, lost)
        await leader.acquire(asyncio.Event())
        start = clock()
        holding = asyncio.create_task(leader.hold())
        store.down = True
        await until(lambda: not leader.leading)
        assert leader.write_budget_s() == 0
        assert clock() - start <= RENEW_DEADLINE_S + RETRY_S < LEASE_DURATION_S
        clock.true += 75
        assert not lost
        yield store, leader, lost, holding
        holding.cancel()

    async def test_leads_again_when_nobody_led(self, lapsed):
        store, leader, lost, _ = lapsed
        store.down = False
        await until(lambda: leader.leading)
        assert store.lease["spec"]["holderIdentity"] == "a"
        assert store.lease["spec"]["leaseTransitions"] == 0
        assert not lost

    @pytest.mark.parametrize("holder", ["b", ""])
    async def test_is_lost_when_another_led(self, lapsed, holder):
        store, leader, lost, holding = lapsed
        store.down = False
        await store.write({**store.lease, "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15}})
        await asyncio.wait_for(holding, 30)
        assert len(lost) == 1
        assert not leader.leading

    async def test_is_lost_when_the_lease_was_deleted(self, lapsed):
        store, _, lost, holding = lapsed
        store.lease, store.down = None, False
        await asyncio.wait_for(holding, 30)
        assert len(lost) == 1


async def test_renewal_that_hangs_stops_writes(monkeypatch):
    monkeypatch.setattr("pdpool_operator.runtime.lease.RENEW_DEADLINE_S", 0.2)
    store, lost = Store(), []
    loop = asyncio.get_running_loop()

    async def sleep(_: float) -> None:
        await asyncio.sleep(0.01)

    leader = Elector(store, "a", "n", "ns", loop.time, lost.append, lambda: "", sleep=sleep)
    await leader.acquire(asyncio.Event())
    store.hang = True
    holding = asyncio.create_task(leader.hold())

    async def leads() -> bool:
        return leader.leading

    async def lapsed() -> bool:
        return leader.view.lapsed and leader.write_budget_s() == 0

    await eventually(lapsed, within_s=30, every_s=0.01)
    store.hang = False
    store.resumed.set()
    await eventually(leads, within_s=30, every_s=0.01)
    holding.cancel()
    assert not lost


async def test_a_write_may_not_outlast_the_lease():
    clock = Clock()
    leader = elector(Store(), "a", clock, [])
    await leader.acquire(asyncio.Event())
    assert leader.write_budget_s() == LEASE_DURATION_S - 1
    clock.true += 9.9
    assert leader.write_budget_s() == pytest.approx(LEASE_DURATION_S - 1 - 9.9)
    clock.true += 0.2
    assert leader.write_budget_s() == 0


# Each candidate takes one small step at a time. Between any two steps anything may happen to the others.
CANDIDATES = 3
STEP = st.tuples(
    st.integers(0, CANDIDATES - 1),
    st.sampled_from(["renew", "renew", "renew", "read", "write", "lose_answer", "restart", "release", "delete_lease"]),
    st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 9.9, 14.6, 15.2]),
)


class Candidate:
    """An elector in separate steps: reads and writes are apart, and its clock runs at its own rate."""

    def __init__(self, name: str, rate: float) -> None:
        self.name, self.rate, self.life = name, rate, 0
        self.restart()

    def restart(self) -> None:
        self.life += 1
        self.view = View()
        self.pending: tuple[float, str] | None = None

    @property
    def me(self) -> str:
        return f"{self.name}-{self.life}"

    def now(self, true: float) -> float:
        return 1000.0 * self.life + true * self.rate


class World:
    """The Lease, the true time, and candidates that take their steps in any order."""

    def __init__(self, rates: list[float]) -> None:
        self.candidates = [Candidate(str(i), rate) for i, rate in enumerate(rates)]
        self.stored: Record | None = None
        self.version = 0
        self.true = 0.0
        self.deleted_at = -1e9

    def leaders(self) -> list[str]:
        return [c.me for c in self.candidates if c.view.leads(c.now(self.true))]

    def store(self, holder: str, duration_s: int) -> None:
        self.version += 1
        self.stored = Record(holder, duration_s, str(self.version))

    def read(self, one: Candidate) -> None:
        now = one.now(self.true)
        one.pending = None  # a step that writes has ended before the next one reads
        one.view = one.view.seen(self.stored, now)
        action = decide(one.view, now, one.me)
        if isinstance(action, Lost):
            one.view = replace(one.view, renewed_at=None, lapsed=True)
            if action.taken:
                self.restart(one)
        elif isinstance(action, Acquire | Renew):
            one.pending = now, one.view.record.version if one.view.record else ""

    def write(self, one: Candidate, *, answered: bool = True) -> None:
        if one.pending is None:
            return
        (started, base), one.pending = one.pending, None
        if base == (self.stored.version if self.stored else ""):
            self.store(one.me, LEASE_DURATION_S)
            if answered:
                one.view = View(self.stored, one.now(self.true), started)

    def lose_answer(self, one: Candidate) -> None:
        self.write(one, answered=False)

    def renew(self, one: Candidate) -> None:
        self.read(one)
        self.write(one)

    def restart(self, one: Candidate) -> None:
        if self.true - self.deleted_at > LEASE_DURATION_S:
            one.restart()

    def release(self, one: Candidate) -> None:
        if one.view.leads(one.now(self.true)) and self.stored is not None and self.stored == one.view.record:
            self.store("", 1)
            one.restart()

    def delete_lease(self, _: Candidate) -> None:
        # Not claimed: a candidate that never saw the deleted Lease cannot know its holder. Neither can one that slept
        # while the Lease was deleted, created and deleted again.
        if all(c.view.record and c.view.record.version for c in self.candidates):
            self.stored, self.deleted_at = None, self.true


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    rates=st.lists(st.floats(0.97, 1.03), min_size=CANDIDATES, max_size=CANDIDATES),
    steps=st.lists(STEP, min_size=20, max_size=150),
)
@example(rates=[0.97, 1.03, 1.0], steps=[(0, "renew", 0.0), (1, "renew", 0.0), (1, "renew", 14.6)])
@example(rates=[1.0, 1.0, 1.0], steps=[(0, "renew", 0.0), (1, "renew", 0.0), (1, "renew", 15.2), (0, "renew", 0.0)])
def test_two_never_lead_at_once_under_any_interleaving(rates, steps):
    world = World(rates)
    for index, what, wait in steps:
        world.true += wait
        getattr(world, what)(world.candidates[index])
        assert len(world.leaders()) <= 1


class TestHistoryOfPods:
    """Versions of pods and of Leases are not comparable: here pods count in milliseconds, the Lease in writes."""

    async def lead(self, store: Store, me: str, clock: Clock, seconds: float) -> Elector:
        one = elector(store, me, clock, [], lambda: str(int(clock.true * 1000)))
        await one.acquire(asyncio.Event())
        holding = asyncio.create_task(one.hold())
        until = clock.true + seconds
        for _ in range(10_000):
            await asyncio.sleep(0)
            if clock.true >= until:
                break
        holding.cancel()
        return one

    async def test_first_leader_inherits_nothing(self):
        assert (await self.lead(Store(), "a", Clock(), 1)).inherited == ""

    async def test_successor_reads_from_a_version_of_pods(self):
        store, clock = Store(), Clock()
        await self.lead(store, "a", clock, 100)
        ended = clock.true
        second = await self.lead(store, "b", clock, 0)
        assert UNACTED_S <= ended - int(second.inherited) / 1000 <= UNACTED_S + 3 * RETRY_S

    async def test_unread_history_passes_to_the_third_leader(self):
        store, clock = Store(), Clock()
        await self.lead(store, "a", clock, 100)
        second = await self.lead(store, "b", clock, 0)
        third = await self.lead(store, "c", clock, 0)
        assert third.inherited == second.inherited

    async def test_lease_version_is_never_a_version_of_pods(self):
        store = Store()
        store.version = 7
        store.lease = {"metadata": {"resourceVersion": "7"}, "spec": {"holderIdentity": "", "leaseDurationSeconds": 1}}
        one = elector(store, "a", Clock(), [])
        await one.acquire(asyncio.Event())
        assert one.inherited == ""
        await one.release()
        assert "annotations" not in store.lease["metadata"]
