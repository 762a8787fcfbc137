"""When an object is reconciled again, in seconds: the earliest time at which something changes without an event."""

from datetime import datetime

from ..observe.model import ObservedPool
from ..observe.pod_events import EVENTS_AFTER
from ..plan.model import Plan
from ..plan.repair_model import RepairPlan
from ..runtime.manager import Result
from .apply import ApplyResult

SERVICE_RESYNC_S = 60.0
FLEET_AGAIN_S = 10.0
"""Pods that something else runs are not watched, but listed at this interval."""
UNSETTLED_AGAIN_S = 5.0
FIRST_VERDICTS_AGAIN_S = 1.0
EVENTS_FIRST_S = EVENTS_AFTER.total_seconds() + 0.5
EVENTS_LAST_S = 60.0
NO_POD_AGAIN_S = 10.0
ROTATION_AGAIN_S = 10.0
"""While keys are rotated, a pool waits for the pods of the other side. No event of those pods wakes it."""
REPAIR_AGAIN_S = 1.0
REPAIR_GATES_AGAIN_S = 10.0


def result(plan: Plan, outcome: ApplyResult, *at_latest_s: float | None) -> Result:
    """Return how a reconcile has ended. A failure is tried again at longer and longer intervals."""
    if plan.faults:
        return Result(plan.requeue_after_s, failed=True)
    if outcome.unsettled:
        return Result(UNSETTLED_AGAIN_S, failed=bool(outcome.faults))
    if outcome.faults:
        return Result(failed=True)
    return Result(min((s for s in (plan.requeue_after_s, *at_latest_s) if s is not None), default=None))


def repairs_again_s(repair: RepairPlan) -> float | None:
    """Return when to look at repairs again: gates and budgets change with time alone."""
    if repair.acts or repair.settling:
        return REPAIR_AGAIN_S
    return REPAIR_GATES_AGAIN_S if repair.records else None


def events_again_s(observed: ObservedPool, now: datetime) -> float | None:
    """Return when to check instances that are not Ready again.

    A mount that fails, or a pod that is refused, is reported only by an event, and no watch reacts to it. The age of a
    pod doubles from check to check.
    """
    seconds = [
        min(max((now - i.pod.created_at).total_seconds(), EVENTS_FIRST_S), EVENTS_LAST_S) if i.pod else NO_POD_AGAIN_S
        for i in observed.instances
        if not i.deleting and not (i.pod and i.pod.ready)
    ]
    return min(seconds, default=None)
