"""A node that the next pod of an instance avoids: written without disturbing a pod, for as long as repair needs it."""

from datetime import timedelta

import pytest
from pdpool_operator.api import names
from pdpool_operator.api.names import Role
from pdpool_operator.api.pools import RepairAction, RepairRecord, RepairState
from pdpool_operator.build.affinity import PREFERRED
from pdpool_operator.plan.repair_model import WINDOW

from .makers import T0, seconds
from .world import BAD_MODEL, Sts, World, settled


def with_replacement(
    world: World,
    *,
    index: int = 1,
    state: RepairState = RepairState.INTENDED,
    action: RepairAction = RepairAction.REPLACE,
) -> None:
    since = T0 + seconds(world.now)
    record = RepairRecord(index=index, pod_uid="any", action=action, node="node-b", state=state, since=since)
    status = world.pool.status.model_copy(update={"repairs": (record,)})
    world.pool = world.pool.model_copy(update={"status": status})


def avoided(sts: Sts) -> list[str]:
    """Return the nodes that the next pod avoids."""
    affinity = sts.body["spec"]["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = [term["preference"]["matchFields"][0] for term in affinity.get(PREFERRED, ())]
    assert all((term["key"], term["operator"]) == ("metadata.name", "NotIn") for term in terms)
    return [node for term in terms for node in term["values"]]


@pytest.mark.parametrize("state", [RepairState.INTENDED, RepairState.DONE])
def test_replacement_changes_one_stateful_set_and_no_pod(state: RepairState) -> None:
    world = settled(2, role=Role.DECODE)
    with_replacement(world, state=state)
    world.settle()
    assert world.trace == ["update 1"]
    assert [avoided(sts) for _, sts in sorted(world.sets.items())] == [[], ["node-b"]]
    assert world.plan().update_available == ()


@pytest.mark.parametrize(
    ("state", "action"),
    [
        (RepairState.PROPOSED, RepairAction.REPLACE),
        (RepairState.WITHDRAWN, RepairAction.REPLACE),
        (RepairState.INTENDED, RepairAction.RESTART),
        (RepairState.DONE, RepairAction.PURGE),
    ],
)
def test_other_repairs_avoid_no_node(state: RepairState, action: RepairAction) -> None:
    world = settled(2)
    with_replacement(world, state=state, action=action)
    world.settle()
    assert world.trace == []


def test_avoided_node_ends_after_an_hour() -> None:
    world = settled(2)
    with_replacement(world, state=RepairState.DONE)
    world.settle()
    world.now += int((WINDOW - timedelta(seconds=2)).total_seconds())
    world.trace.clear()
    world.settle()
    assert world.trace == []
    world.now += 2
    world.settle()
    assert world.trace == ["update 1"]
    assert not any(avoided(sts) or names.ANNOTATION_AVOID_NODE in sts.annotations for sts in world.sets.values())


def test_next_pod_of_the_instance_avoids_the_node() -> None:
    world = settled(2)
    with_replacement(world)
    world.settle()
    sts = world.sets["chat-prefill-1"]
    assert sts.pod is not None
    sts.pod.terminating_for = 0
    for _ in range(10):
        world.tick()
    world.settle()
    assert sts.pod.template == sts.body["spec"]["template"]
    assert avoided(sts) == ["node-b"]


def test_update_of_the_spec_keeps_the_avoided_node() -> None:
    world = settled(2)
    with_replacement(world)
    world.settle()
    world.want(drainTimeoutSeconds=30)
    world.settle()
    assert [avoided(sts) for _, sts in sorted(world.sets.items())] == [[], ["node-b"]]


def test_roll_out_that_has_stopped_is_not_gone_on_with() -> None:
    """Another template would give the instance the new spec, out of turn."""
    world = settled(2)
    world.want(model={"path": BAD_MODEL})
    for _ in range(60):
        world.carry_out(world.plan())
        world.tick()
    old = [world.index(name) for name, sts in world.sets.items() if sts.pod is not None and sts.pod.ready]
    assert len(old) == 1, "the roll-out stops at the first instance"
    world.trace.clear()
    with_replacement(world, index=old[0])
    for _ in range(10):
        world.carry_out(world.plan())
        world.tick()
    assert world.trace == []


def test_lost_stateful_set_is_made_anew_with_the_avoided_node() -> None:
    world = settled(2)
    with_replacement(world)
    world.settle()
    del world.sets["chat-prefill-1"]
    world.trace.clear()
    world.settle()
    assert world.trace == ["create 1"]
    assert avoided(world.sets["chat-prefill-1"]) == ["node-b"]
