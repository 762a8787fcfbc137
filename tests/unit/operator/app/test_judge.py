"""Continuous judging: a pool is reconciled when its status is out of date, and otherwise not."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.api.pools import DecodePool, PrefillPool
from pdpool_operator.controller.judge import Judge
from pdpool_operator.controller.readings import Readings
from pdpool_operator.diagnose.ejection import RETURN_AFTER
from pdpool_operator.diagnose.evidence import STALE_S
from pdpool_operator.diagnose.standing import Phase, Standing
from pdpool_operator.observe.keys import Bindings, Key
from pdpool_operator.observe.model import ObservedInstance, ObservedPod, ObservedPool
from pdpool_operator.observe.router_outcomes import RouterSample
from pdpool_operator.observe.samples import ConnectorSample, EngineSample, PeerSample, QueueSample, RankSample, Tally
from pdpool_operator.observe.targets import Target
from pdpool_operator.runtime.steady_clock import SteadyClock
from pdpool_operator.status.transition import REFRESH

START = datetime(2026, 1, 2, tzinfo=UTC)
SERVICE = Key("DisaggregatedService", "llm", "svc")
PREFILL, DECODE = Key("PrefillPool", "llm", "chat"), Key("DecodePool", "llm", "chat")


class World:
    def __init__(self, clock: Callable[[], datetime] | None = None) -> None:
        self.now = START
        self.clock = clock or (lambda: self.now)
        self.asked: list[Key] = []
        bindings = Bindings()
        bindings.bind(SERVICE, "chat", "chat")
        self.judge = Judge(bindings, self.clock, self.asked.append)
        self.readings = Readings(self.judge, self.clock)

    def observe(self, key: Key, *more: str) -> None:
        """Observe the pool's first instance, and one more for each further pod's UID. An empty UID: it has no pod."""
        kind = PrefillPool if key is PREFILL else DecodePool
        meta = {"name": "chat", "namespace": "llm", "uid": key.kind}
        instances = []
        for index, uid in enumerate((f"pod-{kind.role}", *more)):
            name = f"chat-{kind.role}-{index}"
            pod = ObservedPod(f"{name}-0", uid, "127.0.0.1", "Running", True, False, "h", "b", START) if uid else None
            instances.append(
                ObservedInstance(index, name, "sts", key.kind, False, "h", "b", 1, None, "", pod, listed_by=())
            )
        self.judge.observed(
            key, ObservedPool(kind.parse({"metadata": meta, "spec": {"model": {"path": "tiny"}}}), tuple(instances), ())
        )

    def reconcile(self, key: Key) -> None:
        self.observe(key)
        self.judge.shown(key, self.judge.judge(key))

    def sample(self, role: Role, queues: dict[str, tuple[int, float | None, int]] | None, uid: str = "") -> None:
        uid = uid or f"pod-{role}"
        connector = (
            queues if queues is None else ConnectorSample("life", 0.0, {n: QueueSample(*q) for n, q in queues.items()})
        )
        engine = None if queues is None else EngineSample(0, 0, {})
        sample = RankSample(0, uid, self.now, self.now, connector, engine, "" if queues is not None else "timeout")
        self.judge.on_samples(Target("llm", "chat", role, 0, uid, "127.0.0.1"), [sample])

    def verdict(self, key: Key) -> str:
        return str(self.judge.judge(key)[0].verdict)


@pytest.fixture
def world() -> World:
    one = World()
    one.sample(Role.PREFILL, {"prefill_bootstrap": (0, None, 5)})
    one.sample(Role.DECODE, {"decode_transfer": (0, None, 5)})
    one.observe(PREFILL)
    one.sample(Role.PREFILL, {"prefill_bootstrap": (0, None, 5)})
    one.reconcile(PREFILL)
    one.observe(DECODE)
    one.sample(Role.DECODE, {"decode_transfer": (0, None, 5)})
    one.reconcile(DECODE)
    one.judge.tick()
    one.asked.clear()
    return one


def test_nothing_is_asked_for_while_nothing_changes(world):
    for _ in range(100):
        world.now += timedelta(seconds=1)
        world.sample(Role.PREFILL, {"prefill_bootstrap": (0, None, 5)})
        world.sample(Role.DECODE, {"decode_transfer": (0, None, 5)})
        world.judge.tick()
    assert world.asked == []


def test_a_verdict_that_changes_asks_for_the_pool_and_its_services(world):
    before = world.verdict(PREFILL)
    for _ in range(40):
        world.now += timedelta(seconds=1)
        world.sample(Role.PREFILL, {"prefill_bootstrap": (3, (world.now - START).total_seconds(), 5)})
        world.sample(Role.DECODE, {"decode_transfer": (0, None, 5)})
        world.judge.tick()
    assert world.verdict(PREFILL) != before
    assert {PREFILL, SERVICE} <= set(world.asked)


def test_instance_is_not_stuck_in_the_moment_its_peer_is_gone(world):
    world.observe(DECODE, "second")
    for _ in range(40):
        world.now += timedelta(seconds=1)
        world.sample(Role.PREFILL, {"prefill_bootstrap": (3, (world.now - START).total_seconds(), 5)})
        world.sample(Role.DECODE, {"decode_transfer": (0, None, 5)})
        world.sample(Role.DECODE, {"decode_transfer": (0, None, 5)}, uid="second")
        world.judge.tick()
    assert world.verdict(PREFILL) == "Stuck"
    world.observe(DECODE, "")
    # A reconcile need not wait for the next tick.
    assert world.verdict(PREFILL) == "Blocked"


def test_silence_alone_asks_too(world):
    for _ in range(60):
        world.now += timedelta(seconds=1)
        world.sample(Role.PREFILL, None)
        world.judge.tick()
    assert PREFILL in world.asked
    assert world.verdict(PREFILL) == "Unknown"


def test_verdicts_that_alternate_are_shown_every_half_minute(world):
    asked_at = []
    for second in range(1, 91):
        world.now += timedelta(seconds=1)
        world.sample(Role.PREFILL, {"prefill_bootstrap": (second // 7 % 2, 0.5, 5 + second)})
        world.sample(Role.DECODE, {"decode_transfer": (0, None, 5)})
        world.asked.clear()
        world.judge.tick()
        if PREFILL in world.asked:
            asked_at.append(second)
            world.reconcile(PREFILL)
    assert 2 <= len(asked_at) <= 5
    gaps = [after - before for before, after in itertools.pairwise(asked_at[1:])]
    assert all(gap >= REFRESH.total_seconds() for gap in gaps)


def test_a_pool_whose_reconciles_fail_is_asked_for_less_and_less_often(world):
    """While the API server is overloaded, a request every second would bypass the back-off of the key."""
    asked_at = []
    for second in range(300):
        world.now += timedelta(seconds=1)
        world.sample(Role.PREFILL, None)
        world.asked.clear()
        world.judge.tick()
        asked_at += [second] * world.asked.count(PREFILL)
    assert 8 <= len(asked_at) <= 16
    assert max(after - before for before, after in itertools.pairwise(asked_at)) <= 31
    world.reconcile(PREFILL)
    world.sample(Role.PREFILL, {"prefill_bootstrap": (0, None, 5)})
    world.asked.clear()
    world.judge.tick()
    assert PREFILL in world.asked, "a change after a success causes a reconcile at once"


def test_requests_that_come_and_go_are_no_news(world):
    """Idle at one sample and Flowing at the next: under light traffic, each pool would be written every few seconds."""
    asked = 0
    for second in range(90):
        world.now += timedelta(seconds=1)
        world.sample(Role.PREFILL, {"prefill_bootstrap": (second % 2, 0.5 if second % 2 else None, 5 + second)})
        world.sample(Role.DECODE, {"decode_transfer": (0, None, 5)})
        world.asked.clear()
        world.judge.tick()
        if PREFILL in world.asked:
            asked += 1
            world.reconcile(PREFILL)
    assert asked <= 3


def test_readings_are_of_what_answers_and_vanish_with_the_pool(world):
    (reading,) = [r for r in world.readings.queues() if r.labels[2] == "prefill"]
    assert reading.labels == ("llm", "chat", "prefill", "0", "0", "prefill_bootstrap")
    assert (reading.reqs, reading.oldest_s, reading.moved_total) == (0, None, 5)
    world.sample(Role.PREFILL, None)
    assert [r for r in world.readings.queues() if r.labels[2] == "prefill"] == []
    assert ("llm", "chat", "prefill", "0") in world.readings.verdicts()
    world.judge.gone(PREFILL)
    assert ("llm", "chat", "prefill", "0") not in world.readings.verdicts()
    world.judge.gone(DECODE)
    assert list(world.readings.queues()) == []
    assert list(world.readings.holds()) == []
    assert world.judge._tracks == {}


def test_readings_of_a_pod_that_is_no_longer_looked_at_vanish(world):
    """The last report of a pod that has Failed and stays is out of date."""
    world.now += timedelta(seconds=STALE_S)
    assert len(list(world.readings.queues())) == len(list(world.readings.holds())) == 2
    world.now += timedelta(milliseconds=1)
    assert list(world.readings.queues()) == []
    assert list(world.readings.holds()) == []


@pytest.mark.parametrize("ends", ["replaced", "gone with its pool"])
def test_a_pod_that_was_looked_at_by_a_reconcile_that_failed_is_forgotten_when_it_is(world, ends):
    """The sampler sees new pods during a reconcile. A reconcile that fails never reports them."""
    look = RankSample(0, "another", world.now, world.now, None, None, "timeout")
    world.judge.on_samples(Target("llm", "chat", Role.PREFILL, 1, "another", "127.0.0.2"), [look])
    world.observe(PREFILL) if ends == "replaced" else world.judge.gone(PREFILL)
    left = {uid for tracks in world.judge._tracks.values() for uid in tracks}
    assert left == {"pod-decode", *(["pod-prefill"] if ends == "replaced" else [])}


def test_what_each_rank_keeps_back_is_told_and_a_rank_that_is_no_more_is_forgotten(world):
    def look(rank: int, **held) -> RankSample:
        connector = ConnectorSample("life", 0.0, {}, ranks=2, **held)
        return RankSample(rank, "pod-decode", world.now, world.now, connector, None)

    target = Target("llm", "chat", Role.DECODE, 0, "pod-decode", "127.0.0.1")
    world.judge.on_samples(target, [look(0), look(1, holds=1, held_bytes=4096, held_oldest_s=7.0)])
    shown = {r.labels[4]: (r.held_bytes, r.oldest_s) for r in world.readings.holds() if r.labels[2] == "decode"}
    assert shown == {"0": (0, 0.0), "1": (4096, 7.0)}
    world.judge.on_samples(target, [look(0)])
    assert [r.labels[4] for r in world.readings.holds() if r.labels[2] == "decode"] == ["0"]


def test_pools_of_which_something_is_to_be_told_about_lost_peers_are_asked_for(world):
    world.asked.clear()
    world.judge.fences_due = lambda pools: [key for key in pools if key == DECODE]
    world.judge.tick()
    assert world.asked == [DECODE]


def count_at_router(world: World, done: int, failed: int) -> None:
    url = "http://127.0.0.1:30000"
    world.judge.on_router(SERVICE, RouterSample("router", world.now, {url: Tally(done, failed)}))


def test_requests_that_all_fail_reach_pool_and_service(world: World) -> None:
    count_at_router(world, 0, 0)
    world.now += timedelta(seconds=3)
    count_at_router(world, 0, 5)
    world.judge.tick()
    assert world.verdict(DECODE) == "NothingFinishes"
    assert {PREFILL, DECODE, SERVICE} <= set(world.asked)


def test_counters_of_a_router_that_is_gone_are_forgotten(world: World) -> None:
    count_at_router(world, 0, 0)
    count_at_router(world, 0, 5)
    world.judge.observed_routers(SERVICE, ())
    world.judge.tick()
    assert world.verdict(DECODE) == "Idle"


def test_instance_that_is_out_is_marked_in_the_observation(world: World) -> None:
    pool = world.judge._pools[DECODE]
    uid = "pod-decode"
    world.judge._standings[DECODE] = {uid: Standing("life", Phase.OUT, world.now, 1)}
    assert [i.out for i in world.judge.marked(DECODE, pool).instances] == [True]
    assert [i.out for i in world.judge.marked(PREFILL, world.judge._pools[PREFILL]).instances] == [False]


def test_return_from_out_asks_for_a_new_list(world: World) -> None:
    world.judge._standings[DECODE] = {"pod-decode": Standing("life", Phase.OUT, world.now, 1)}
    world.reconcile(DECODE)
    world.asked.clear()
    world.now += timedelta(seconds=31)
    world.sample(Role.DECODE, {"decode_transfer": (0, None, 5)})
    world.judge.tick()
    assert world.verdict(DECODE) == "Failing"
    assert {DECODE, SERVICE} <= set(world.asked)


@pytest.mark.parametrize(("transport", "asked"), [("tcp", True), ("rdma", True), ("", False)])
def test_a_pair_that_becomes_known_asks_for_the_pool(world, transport, asked):
    world.reconcile(PREFILL)
    world.reconcile(DECODE)
    before = world.judge.judge(PREFILL)
    assert all(diagnosis.pairs == () for diagnosis in before)
    peers = (PeerSample("stranger", "nixl", transport),) if transport else ()
    connector = ConnectorSample("life", 0.0, {}, peers=peers)
    look = RankSample(0, "pod-prefill", world.now, world.now, connector, EngineSample(0, 0, {}))
    world.asked.clear()
    world.judge.on_samples(Target("llm", "chat", Role.PREFILL, 0, "pod-prefill", "127.0.0.1"), [look])
    world.judge.tick()
    assert (PREFILL in world.asked) is asked


def test_stuck_instance_is_out_until_it_has_worked_for_a_while(world):
    def look(beat_age_s: float) -> list[bool]:
        connector = ConnectorSample("life", beat_age_s, {})
        sample = RankSample(0, "pod-decode", world.now, world.now, connector, EngineSample(0, 0, {}))
        world.judge.on_samples(Target("llm", "chat", Role.DECODE, 0, "pod-decode", "127.0.0.1"), [sample])
        world.asked.clear()
        world.judge.tick()
        return [instance.out for instance in world.judge.marked(DECODE, world.judge._pools[DECODE]).instances]

    assert look(beat_age_s=60) == [True]
    assert {DECODE, SERVICE} <= set(world.asked)
    world.reconcile(DECODE)
    world.now += timedelta(seconds=1)
    assert look(beat_age_s=0) == [True]
    world.reconcile(DECODE)
    world.now += RETURN_AFTER
    assert look(beat_age_s=0) == [False]
    assert {DECODE, SERVICE} <= set(world.asked), "the routers must list it again"


@pytest.mark.parametrize("jump_s", [60, -600])
def test_clock_that_is_set_changes_no_verdict(jump_s: float) -> None:
    """Requests wait long here, and one goes on every 12 s."""
    wall, uptime = START.timestamp(), 0.0
    world = World(SteadyClock(lambda: wall, lambda: uptime))
    world.observe(PREFILL)
    world.observe(DECODE)
    found = set()
    for look in range(60):
        world.now = world.clock()
        world.sample(Role.PREFILL, {"prefill_bootstrap": (9, 40.0, look // 4)})
        world.sample(Role.DECODE, {"decode_transfer": (0, None, look // 4)})
        if look > 20:
            found.add(world.verdict(PREFILL))
        wall, uptime = wall + 3 + (jump_s if look == 41 else 0), uptime + 3
    assert found == {"Saturated"}


def restarted(verdict: str) -> tuple[World, ObservedPool]:
    """A new operator, and the pool with the verdict that its predecessor wrote into the status."""
    world = World()
    world.observe(DECODE)
    seen = world.judge._pools[DECODE]
    written = {"index": 0, "ready": True, "updated": True, "pod": "chat-decode-0-0", "podUID": "pod-decode"}
    status = seen.pool.status.model_validate({"instances": [written | {"verdict": verdict, "message": "d: 3 failed"}]})
    world = World()
    return world, replace(seen, pool=seen.pool.model_copy(update={"status": status}))


@pytest.mark.parametrize(("verdict", "out"), [("Stuck", True), ("Failing", True), ("Blocked", False), ("", False)])
def test_instance_at_fault_stays_out_when_the_operator_restarts(verdict: str, out: bool) -> None:
    world, pool = restarted(verdict)
    assert world.judge.marked(DECODE, pool).instances[0].out is out, "a service may be reconciled before its pools"
    for _ in range(9):
        world.judge.observed(DECODE, pool)
        world.sample(Role.DECODE, {"decode_transfer": (3, 60.0, 5)})
        world.judge.tick()
        assert world.judge.marked(DECODE, pool).instances[0].out is out
        world.now += timedelta(seconds=3)


def test_instance_that_works_returns_after_the_operator_restarts() -> None:
    world, pool = restarted("Stuck")
    for _ in range(6):
        world.judge.observed(DECODE, pool)
        world.sample(Role.DECODE, {"decode_transfer": (0, None, 5)})
        world.judge.tick()
        world.now += timedelta(seconds=3)
    assert not world.judge.marked(DECODE, pool).instances[0].out


def test_pool_has_numbers_to_scale_by_until_it_is_blocked(world):
    def readings() -> dict[str, tuple[int, float | None]]:
        return {one.labels[2]: (one.reqs, one.oldest_s) for one in world.readings.demands()}

    assert readings() == {"prefill": (0, 0.0), "decode": (0, 0.0)}
    connector = ConnectorSample("life", 60.0, {"decode_transfer": QueueSample(0, None, 5)})
    frozen = RankSample(0, "pod-decode", world.now, world.now, connector, EngineSample(0, 0, {}))
    world.judge.on_samples(Target("llm", "chat", Role.DECODE, 0, "pod-decode", "127.0.0.1"), [frozen])
    world.sample(Role.PREFILL, {"prefill_bootstrap": (9, 60.0, 5)})
    world.judge.tick()
    assert {str(verdict) for verdict in world.readings.verdicts().values()} == {"Stuck", "Blocked"}
    assert readings() == {}, "neither side may be scaled by requests that wait for a stuck engine"
