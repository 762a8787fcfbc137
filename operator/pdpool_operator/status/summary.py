"""The conditions Available, Ready, Reconciling and Stalled, as `kubectl wait` and kstatus read them.

- Available: requests can be served.
- Ready: all is as the spec says.
- Stalled: not Ready, and nothing proceeds until a person changes something.
- Reconciling: not Ready, and not Stalled.

kstatus wants `Stalled` and `Reconciling` to be present only while they are True. At most one of them is.
"""

from collections.abc import Sequence

from ..api.base import Condition, ConditionStatus, Metadata
from ..api.condition_docs import REASONS
from ..api.names import ANNOTATION_RESTARTED_AT
from ..api.reasons import ConditionType, Reason
from ..api.wording import some
from ..plan.model import Fault, Progress
from .chain import ConditionWriter, Violation

STALLING = frozenset(REASONS["Refused"])
"""Reasons that only a person can remove."""

MAX_ANNOTATION = 256


def summary(
    writer: ConditionWriter,
    *,
    unavailable: Violation | None,
    unready: Violation | None,
    ready: Violation,
    activity: Progress | None,
) -> tuple[Condition, ...]:
    """Return the conditions.

    Args:
        writer: Makes them.
        unavailable: Why requests cannot be served, if they cannot.
        unready: Why not all is as the spec says, if it is not.
        ready: Reason and message of Ready while all is well.
        activity: What the operator does now. Reconciling has its words if `unready` only waits for it.
    """
    conditions = (
        writer.judge(ConditionType.AVAILABLE, unavailable, Reason.SERVING, "Requests can be served"),
        writer.judge(ConditionType.READY, unready, ready.reason, ready.message),
    )
    if unready is None:
        return conditions
    if unready.reason in STALLING:
        return (*conditions, _present(writer, ConditionType.STALLED, unready.reason, unready.message))
    if activity is not None and unready.reason in {Reason.UPDATING, Reason.NO_PODS, Reason.SCALING_UP}:
        return (*conditions, _present(writer, ConditionType.RECONCILING, activity.reason, activity.message))
    return (*conditions, _present(writer, ConditionType.RECONCILING, unready.reason, unready.message))


def refused(writer: ConditionWriter, reason: Reason, message: str) -> tuple[Condition, ...]:
    """Return the conditions of an object that cannot be read or observed. Nothing is known about its requests."""
    known = ConditionStatus.FALSE if reason in STALLING else ConditionStatus.UNKNOWN
    kind = ConditionType.STALLED if reason in STALLING else ConditionType.RECONCILING
    return (
        writer.write(ConditionType.AVAILABLE, ConditionStatus.UNKNOWN, reason, message),
        writer.write(ConditionType.READY, known, reason, message),
        _present(writer, kind, reason, message),
    )


def from_faults(faults: Sequence[Fault]) -> Violation | None:
    """Return the violation of faults: the reason of the first, and every message once."""
    if not faults:
        return None
    first = next((fault for fault in faults if fault.reason in STALLING), faults[0])
    return Violation(first.reason, "; ".join(dict.fromkeys(fault.message for fault in faults)))


def restarted_at(metadata: Metadata, before: str | None, *, complete: bool) -> str | None:
    """Return the restart that has ended: the value of the annotation if all pods run with it."""
    value = metadata.annotations.get(ANNOTATION_RESTARTED_AT)
    return (value[:MAX_ANNOTATION] if value else None) if complete else before


def update_available(workloads: Sequence[str]) -> Violation:
    """Return reason and message of Ready for workloads that an earlier operator version built."""
    message = (
        f"An earlier operator version built {some(workloads)}; annotate the object with "
        f"{ANNOTATION_RESTARTED_AT} to replace them one by one"
    )
    return Violation(Reason.UPDATE_AVAILABLE, message)


def _present(writer: ConditionWriter, kind: ConditionType, reason: Reason, message: str) -> Condition:
    return writer.write(kind, ConditionStatus.TRUE, reason, message)
