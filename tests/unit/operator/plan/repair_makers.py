"""Instances and records as repair sees them."""

from dataclasses import replace
from datetime import timedelta

from pdpool_operator.api.pools import RepairAction, RepairRecord, RepairState
from pdpool_operator.api.services import RepairMode, RepairSpec
from pdpool_operator.plan.model import Purge
from pdpool_operator.plan.repair_model import AssessedInstance, Health, RepairPlan

from .makers import T0

ENFORCE = RepairSpec(mode=RepairMode.ENFORCE, restarts_per_hour=2)
OBSERVE = RepairSpec(mode=RepairMode.OBSERVE)
OFF = RepairSpec(mode=RepairMode.OFF)


def make(index: int, health: Health = Health.WELL, **changes: object) -> AssessedInstance:
    instance = AssessedInstance(
        index, f"pod-{index}", f"uid-{index}", False, health, serves=health is Health.WELL, evidence="why"
    )
    return replace(instance, **changes)  # type: ignore[arg-type]


SICK = make(0, Health.AT_FAULT)
PAIR = (SICK, make(1))


def record(
    uid: str = "uid-9",
    state: RepairState = RepairState.DONE,
    age_s: float = 600,
    *,
    index: int = 9,
    action: RepairAction = RepairAction.RESTART,
    node: str = "",
) -> RepairRecord:
    since = T0 - timedelta(seconds=age_s)
    return RepairRecord(index=index, pod_uid=uid, action=action, node=node, state=state, since=since, message="why")


def purge_of(uid: str, state: RepairState = RepairState.DONE, age_s: float = 600) -> RepairRecord:
    return record(uid, state, age_s, index=0, action=RepairAction.PURGE)


def states(plan: RepairPlan) -> dict[str, RepairState]:
    return {one.pod_uid: one.state for one in plan.records}


SENT = Purge("uid-0", "10.0.2.1", 0, 30.0, "repair", 1)
