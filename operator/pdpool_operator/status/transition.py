"""Consequences of a change of status: whether to write it now, and which events to record."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from ..api.base import Condition, ConditionStatus
from ..api.models import DisaggregatedServiceStatus, PoolStatus
from ..api.reasons import Reason
from ..diagnose.model import Verdict
from ..plan.model import Event, EventType
from .chain import find

Status = PoolStatus | DisaggregatedServiceStatus

REFRESH = timedelta(seconds=30)
"""Minimum interval of writes that change only numbers. Metrics exist for live numbers."""

WELL = {str(verdict) for verdict in Verdict if verdict.well}

_ON_THE_WAY = {
    Reason.STARTING,
    Reason.NO_PODS,
    Reason.SCALING_UP,
    Reason.SCALING_DOWN,
    Reason.UPDATING,
    Reason.DRAINING,
    Reason.DELETING,
    Reason.POOLS_NOT_READY,
    Reason.ROUTER_NOT_READY,
}
"""Reasons of conditions that are not True in normal operation. They cause no event."""


def should_write(before: Status, after: Status, written_at: datetime | None, now: datetime) -> bool:
    """Whether to write the status now: at once if its content is new, else at most every 30 seconds.

    Args:
        before: as the API server has it.
        after: as it is now.
        written_at: when this operator last wrote it. `None` if it never did.
        now: by the same clock.
    """
    if _lasting(before) != _lasting(after):
        return True
    return before != after and (written_at is None or now - written_at >= REFRESH)


def transition_events(before: Sequence[Condition], after: Sequence[Condition]) -> tuple[Event, ...]:
    """Return events for conditions whose status or reason changed.

    `Progressing` is left out, because its steps have events of their own.
    """
    return tuple(
        event
        for condition in after
        if condition.type != "Progressing" and (event := _event(find(before, condition.type), condition)) is not None
    )


def _event(before: Condition | None, after: Condition) -> Event | None:
    if before is not None and (before.status, before.reason) == (after.status, after.reason):
        return None
    reason = Reason(after.reason)
    if after.status is ConditionStatus.FALSE and reason not in _ON_THE_WAY:
        return Event(EventType.WARNING, reason, f"{after.type}: {after.message}")
    flipped = before is not None and before.status is not after.status
    if after.status is ConditionStatus.TRUE and flipped:
        return Event(EventType.NORMAL, reason, f"{after.type}: {after.message}")
    return None


def _lasting(status: Status) -> dict[str, Any]:
    """The status without values that change all the time in one state: lengths, ages, and texts that contain them."""
    content = status.to_dict()
    content.pop("oldestWaitingSince", None)
    content["queues"] = _unless_well(content["queues"])
    for instance in content.get("instances", []):
        instance.pop("queues", None)
        instance.pop("message", None)
        instance["verdict"] = _unless_well(instance["verdict"])
    for condition in content.get("conditions", []):
        if condition["type"] == "QueuesHealthy" or condition["reason"] == Reason.DRAINING:
            condition.pop("message", None)
    return content


def _unless_well(verdict: str) -> str:
    return "" if verdict in WELL else verdict
