"""Consequences of a change of status: whether to write it now, and which events to record."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from ..api.base import Condition, ConditionStatus
from ..api.pools import PoolStatus
from ..api.reasons import ConditionType, Reason
from ..api.services import DisaggregatedServiceStatus
from ..diagnose.model import Verdict
from ..plan.model import Event, EventType
from .chain import find

Status = PoolStatus | DisaggregatedServiceStatus

REFRESH = timedelta(seconds=30)
"""Minimum interval of writes that change only numbers. Metrics exist for live numbers."""

WELL = frozenset(str(verdict) for verdict in Verdict if verdict.well)
"""Verdicts that call for nothing."""

_ON_THE_WAY = {
    Reason.STARTING,
    Reason.NO_PODS,
    Reason.SCALING_UP,
    Reason.SCALING_DOWN,
    Reason.UPDATING,
    Reason.DRAINING,
    Reason.DELETING,
    Reason.ADOPTING,
    Reason.POOLS_NOT_READY,
    Reason.ROUTER_NOT_READY,
    Reason.ROUTER_LIST_OUTDATED,
    Reason.SCALED_TO_ZERO,
}
"""Reasons of conditions that are not True in normal operation. They cause no event."""

_ASKED_FOR = {Reason.SCALED_TO_ZERO, Reason.SCALING_DOWN, Reason.DELETING}
"""Reasons of `Available=False` that a person or an autoscaler asked for."""

_OTHERS_WORDS = {Reason.API_FAILING}
"""Reasons whose message quotes errors of the network, which may differ each time."""


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
    return differ(before, after) and (written_at is None or now - written_at >= REFRESH)


def differ(before: Status, after: Status) -> bool:
    """Whether the operator's own part of the status has changed."""
    return _own(before) != _own(after)


def transition_events(before: Sequence[Condition], after: Sequence[Condition]) -> tuple[Event, ...]:
    """Return events for conditions whose status or reason changed, each message once.

    `Reconciling` and `Stalled` repeat what `Ready` says.
    """
    events = (
        _event(find(before, condition.type), condition)
        for condition in after
        if condition.type not in {ConditionType.RECONCILING, ConditionType.STALLED}
    )
    return tuple(dict.fromkeys(event for event in events if event is not None))


def _event(before: Condition | None, after: Condition) -> Event | None:
    if before is not None and (before.status, before.reason) == (after.status, after.reason):
        return None
    reason = Reason(after.reason)
    if after.type in {ConditionType.REPAIR_STOPPED, ConditionType.PEERS_UNREACHABLE}:
        return Event(EventType.WARNING, reason, after.message)
    was = before.status if before is not None else None
    if after.status is ConditionStatus.TRUE and was is ConditionStatus.FALSE:
        return Event(EventType.NORMAL, reason, after.message)
    stops_serving = after.type == ConditionType.AVAILABLE and was is ConditionStatus.TRUE and reason not in _ASKED_FOR
    if after.status is ConditionStatus.FALSE and (reason not in _ON_THE_WAY or stops_serving):
        return Event(EventType.WARNING, reason, after.message)
    return None


def _lasting(status: Status) -> dict[str, Any]:
    """The operator's own part of the status, without values that change all the time in one state."""
    content = _own(status)
    content.pop("oldestWaitingSince", None)
    content["queues"] = _unless_well(content["queues"])
    for instance in content.get("instances", []):
        instance["verdict"] = _unless_well(instance["verdict"])
        if not instance["verdict"]:
            instance.pop("message", None)
    for condition in content["conditions"]:
        if condition["reason"] in _OTHERS_WORDS:
            condition.pop("message", None)
    return content


def _own(status: Status) -> dict[str, Any]:
    """The status without conditions of other writers, which the operator neither compares nor writes."""
    content = status.to_dict()
    content["conditions"] = [one for one in content["conditions"] if one["type"] in set(ConditionType)]
    return content


def _unless_well(verdict: str) -> str:
    return "" if verdict in WELL else verdict
