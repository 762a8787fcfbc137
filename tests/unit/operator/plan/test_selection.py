"""Which instances go at scale-in, where indexes have gaps, and in which order an update takes them."""

from dataclasses import replace
from typing import Any

import pytest
from pdpool_operator.api.pools import Pool
from pdpool_operator.build.pool import pool_spec_hash
from pdpool_operator.observe.model import ObservedInstance
from pdpool_operator.plan.pool import plan_pool
from pdpool_operator.plan.selection import Selection, Selector

from tests.unit.operator.plan.makers import SETTINGS, T0, make_instance, make_observed, make_pod, make_pool, make_sample
from tests.unit.operator.plan.world import settled

FULL = "0/2 nodes are available: 1 Insufficient cpu, 1 node(s) had untolerated taint {a: }. preemption: no"


def select(pool: Pool, *instances: ObservedInstance, at_fault: frozenset[int] = frozenset()) -> Selection:
    return Selector(pool, pool_spec_hash(pool), {}, at_fault, T0).select(instances)


def pending(pool: Pool, index: int) -> ObservedInstance:
    instance = make_instance(pool, index, ready=False)
    assert instance.pod is not None
    return replace(instance, pod=replace(instance.pod, phase="Pending", ip=None, unschedulable=FULL))


def outdated(pool: Pool, index: int, **changes: Any) -> ObservedInstance:
    instance = make_instance(pool, index, spec_hash="earlier", **changes)
    assert instance.pod is not None
    return replace(instance, pod=replace(instance.pod, spec_hash="earlier", build_hash="earlier"))


def gone_first(pool: Pool, *instances: ObservedInstance, **options: Any) -> list[int]:
    """Return the indexes that go when all but none are surplus."""
    none = pool.model_copy(update={"spec": pool.spec.model_copy(update={"replicas": 0})})
    return [instance.index for instance in select(none, *instances, **options).surplus]


def test_scale_in_removes_instances_in_the_documented_order() -> None:
    pool = make_pool(replicas=8)
    unready = make_instance(pool, 3, ready=False, ranks={0: make_sample(running=2)})
    order = gone_first(
        pool,
        pending(pool, 0),
        make_instance(pool, 1),
        make_instance(pool, 2, ready=False),
        unready,
        make_instance(pool, 4, pod=None),
        outdated(pool, 5),
        make_instance(pool, 6),
        make_instance(pool, 7, drain_started=T0, drain_reason="ScaleDown"),
        outdated(pool, 8, drain_started=T0, drain_reason="Update"),
        at_fault=frozenset({1}),
    )
    assert order == [7, 8, 4, 0, 2, 3, 1, 5, 6]


@pytest.mark.parametrize(
    "change",
    [{"pod": None}, {"pod": make_pod(ready=False, phase="Failed")}, {"pod": make_pod(terminating=True, ready=False)}],
    ids=["no pod", "failed", "terminating"],
)
def test_instance_that_cannot_serve_goes_first(change: dict[str, Any]) -> None:
    pool = make_pool(replicas=1)
    broken = make_instance(pool, 0, **change)
    assert [i.index for i in select(pool, broken, make_instance(pool, 1)).surplus] == [0]


def test_drain_under_way_is_not_switched() -> None:
    pool = make_pool(replicas=2)
    draining = make_instance(pool, 1, drain_started=T0, drain_reason="ScaleDown")
    instances = pending(pool, 0), draining, make_instance(pool, 2)
    assert [i.index for i in select(pool, *instances).surplus] == [1]


def test_gap_is_filled_with_the_lowest_free_index() -> None:
    world = settled(4)
    world.fail("chat-prefill-0", "chat-prefill-1")
    world.want(replicas=2)
    world.settle()
    assert world.trace == ["remove 1", "remove 0"]
    world.trace.clear()
    world.want(replicas=5)
    world.settle()
    assert world.trace == ["create 0", "create 1", "create 4"]


def test_replicas_count_instances_whatever_their_index() -> None:
    pool = make_pool(replicas=2)
    plan = plan_pool(make_observed(pool, make_instance(pool, 3), make_instance(pool, 7)), SETTINGS, T0)
    assert not plan.acts
    assert plan.progress is None
    assert plan.surplus == ()


def test_instance_under_deletion_keeps_its_index() -> None:
    pool = make_pool(replicas=2)
    selection = select(pool, make_instance(pool, 0, deleting=True), make_instance(pool, 1))
    assert selection.missing == (2,)
    assert selection.surplus == ()


def test_idle_surplus_is_removed_while_another_drains() -> None:
    pool = make_pool(replicas=1)
    draining = make_instance(pool, 1, drain_started=T0, drain_seen=T0, drain_reason="ScaleDown", ranks={})
    plan = plan_pool(make_observed(pool, pending(pool, 0), draining, make_instance(pool, 2)), SETTINGS, T0)
    assert [deletion.name for deletion in plan.delete] == ["chat-prefill-0"]


def test_faulty_new_instance_stops_the_update() -> None:
    pool = make_pool(replicas=2)
    observed = make_observed(pool, outdated(pool, 0), make_instance(pool, 1))
    assert plan_pool(observed, SETTINGS, T0).acts
    stopped = plan_pool(observed, SETTINGS, T0, {1})
    assert not stopped.acts
    assert stopped.progress is not None
    assert "chat-prefill-1" in stopped.progress.message


def test_faulty_old_instance_is_updated_first() -> None:
    pool = make_pool(replicas=2)
    plan = plan_pool(make_observed(pool, outdated(pool, 0), outdated(pool, 1)), SETTINGS, T0, {0})
    assert [patch.name for patch in plan.patch] == ["chat-prefill-0"]
