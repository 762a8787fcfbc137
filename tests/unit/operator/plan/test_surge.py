"""An update of a pool with one instance: by a second one, where the cluster has room."""

from dataclasses import replace
from typing import Any

import pytest
from pdpool_operator.api.reasons import Reason
from pdpool_operator.observe.model import ObservedInstance, ObservedPool
from pdpool_operator.plan.model import EventType, Plan
from pdpool_operator.plan.pool import plan_pool
from pdpool_operator.status.pool import PoolFacts, pool_status

from tests.unit.operator.plan.makers import SETTINGS, T0, make_instance, make_observed, make_pool, seconds
from tests.unit.operator.plan.test_selection import FULL, outdated
from tests.unit.operator.plan.world import BAD_MODEL, settled

NEXT = {"path": "/models/next"}


def new(**pod: Any) -> ObservedInstance:
    instance = make_instance(make_pool(), 1, ready=False)
    assert instance.pod is not None
    return replace(instance, pod=replace(instance.pod, **pod))


def observed(successor: ObservedInstance, **old: Any) -> ObservedPool:
    return make_observed(make_pool(), outdated(make_pool(), 0, **old), successor)


def plan_at(after_s: float, pool: ObservedPool) -> Plan:
    return plan_pool(pool, SETTINGS, T0 + seconds(after_s))


def conditions(pool: ObservedPool, plan: Plan) -> dict[str, str]:
    """Return the message of each condition."""
    return {one.type: one.message for one in pool_status(PoolFacts(pool, plan, (), T0)).conditions}


def test_new_instance_serves_before_the_old_one_drains() -> None:
    world = settled(1)
    world.want(model=NEXT)
    serving = []
    while (plan := world.plan()).acts or plan.progress is not None:
        world.carry_out(plan)
        world.tick()
        serving.append(any(sts.pod and sts.pod.ready and sts.listed for sts in world.sets.values()))
    assert all(serving)
    assert world.trace == ["create 1", "drain 0", "remove 0"]


def test_next_update_takes_the_free_index_again() -> None:
    world = settled(1)
    for model in ("/models/a", "/models/b"):
        world.want(model={"path": model})
        world.settle()
    assert list(world.sets) == ["chat-prefill-0"]


def test_spec_that_fails_leaves_the_old_instance_serving() -> None:
    world = settled(1)
    world.want(model={"path": BAD_MODEL})
    for _ in range(100):
        world.carry_out(world.plan())
        world.tick()
    assert world.trace == ["create 1"]
    assert world.sets["chat-prefill-0"].listed
    world.trace.clear()
    world.want(model=NEXT)
    world.settle()
    assert world.trace == ["update 1", "kill 1", "drain 0", "remove 0"]


def test_update_taken_back_removes_the_new_instance() -> None:
    world = settled(1)
    world.want(model=NEXT)
    world.carry_out(world.plan())
    world.tick()
    world.want(model={"path": "/models/smollm2"})
    world.settle()
    assert world.trace == ["create 1", "remove 1"]
    assert world.sets["chat-prefill-0"].listed


def test_update_taken_back_in_drain_keeps_one_serving() -> None:
    world = settled(1)
    world.want(model=NEXT)
    while "drain 0" not in world.trace:
        world.carry_out(world.plan())
        world.tick()
    world.want(model={"path": "/models/smollm2"})
    while (plan := world.plan()).acts or plan.progress is not None:
        world.carry_out(plan)
        world.tick()
        assert any(sts.pod and sts.pod.ready for sts in world.sets.values())
    assert list(world.sets) == ["chat-prefill-0"]
    assert "kill 0" not in world.trace


def test_scale_in_and_update_together_keep_one_serving() -> None:
    world = settled(2)
    world.want(replicas=1, model=NEXT)
    while (plan := world.plan()).acts or plan.progress is not None:
        world.carry_out(plan)
        world.tick()
        assert any(sts.listed for sts in world.sets.values())
    assert list(world.sets) == ["chat-prefill-1"]


@pytest.mark.parametrize(
    "lack",
    [
        new(unschedulable=FULL),
        new(unschedulable="held back by the queue"),
        new(warnings=('Multi-Attach error for volume "m"',)),
    ],
    ids=["no capacity", "another scheduler", "a volume for one node"],
)
def test_lack_of_room_is_announced_before_a_drain(lack: ObservedInstance) -> None:
    early = plan_at(30, observed(lack))
    assert not early.acts
    assert early.requeue_after_s == 30
    assert early.progress is not None
    assert "serves nothing until chat-prefill-1 is Ready" in early.progress.message
    assert "2026-11-21T12:01:00Z" in early.progress.message
    assert conditions(observed(lack), early)["Ready"] == early.progress.message
    assert conditions(observed(lack), early)["Reconciling"] == early.progress.message
    late = plan_at(60, observed(lack))
    assert [patch.name for patch in late.patch] == ["chat-prefill-0"]
    assert [(event.type, event.reason) for event in late.events] == [(EventType.WARNING, Reason.DRAIN_STARTED)]
    drains = observed(lack, drain_started=T0, drain_seen=T0, drain_reason="Update", listed_by=("router",))
    assert plan_at(61, drains).surplus == ("chat-prefill-0",)
    assert not plan_at(59, drains).acts


def test_exceeded_quota_is_no_room_at_once() -> None:
    refused = replace(new(), pod=None, create_error='pods "x" is forbidden: exceeded quota: gpus')
    assert [patch.name for patch in plan_at(5, observed(refused)).patch] == ["chat-prefill-0"]


@pytest.mark.parametrize(
    "trouble",
    [
        new(
            unschedulable="0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector. preemption: x"
        ),
        new(unschedulable="0/1 nodes are available: 1 node(s) had untolerated taint {gpu: }."),
        new(waiting_reason="ImagePullBackOff"),
        new(waiting_reason="CrashLoopBackOff"),
        replace(new(), pod=None, create_error="admission webhook denied the request"),
    ],
    ids=["no such node", "taint", "image", "crash", "refused"],
)
def test_spec_without_fitting_nodes_stops_nothing(trouble: ObservedInstance) -> None:
    plan = plan_at(3600, observed(trouble))
    assert "make room" not in conditions(observed(trouble), plan)["Ready"]
    assert not plan.acts
    assert plan.progress is not None


def test_never_surging_says_that_serving_stops() -> None:
    world = settled(1, rollout={"surge": "Never"})
    world.want(model=NEXT)
    (event,) = world.plan().events
    assert event.type is EventType.WARNING
    assert "serves nothing until its replacement is Ready" in event.message
    world.settle()
    assert world.trace == ["drain 0", "update 0", "kill 0", "undrain 0"]


def test_faulty_new_instance_replaces_no_old_one() -> None:
    pool = observed(make_instance(make_pool(), 1))
    assert [patch.name for patch in plan_pool(pool, SETTINGS, T0).patch] == ["chat-prefill-0"]
    assert not plan_pool(pool, SETTINGS, T0, {1}).acts


def test_idle_old_instance_is_replaced_in_place() -> None:
    world = settled(1)
    world.fail("chat-prefill-0")
    world.want(model=NEXT)
    world.settle()
    assert world.trace == ["update 0", "kill 0"]


def test_change_of_the_rollout_restarts_nothing() -> None:
    world = settled(1)
    world.want(rollout={"surge": "Never"})
    assert not world.plan().acts
