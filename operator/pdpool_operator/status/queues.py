"""The condition QueuesHealthy and the queue columns, from diagnoses."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from ..api.base import Condition, ConditionStatus
from ..api.reasons import ConditionType, Reason
from ..api.wording import some
from ..diagnose.model import Diagnosis, Verdict, worst
from .chain import ConditionWriter, shortened

MAX_COLUMN = 64
"""Limit of the field in the CRD."""

STEADY = timedelta(seconds=2)
"""Waiting times that differ by less are the same time, computed from two samples."""

_MEANING = {
    Verdict.STUCK: (ConditionStatus.FALSE, Reason.QUEUES_STUCK),
    Verdict.FAILING: (ConditionStatus.FALSE, Reason.REQUESTS_FAILING),
    Verdict.NOTHING_FINISHES: (ConditionStatus.FALSE, Reason.NOTHING_FINISHES),
    Verdict.BLOCKED: (ConditionStatus.FALSE, Reason.QUEUES_BLOCKED),
    Verdict.GONE: (ConditionStatus.UNKNOWN, Reason.QUEUES_UNKNOWN),
    Verdict.UNKNOWN: (ConditionStatus.UNKNOWN, Reason.QUEUES_UNKNOWN),
    Verdict.LEAKED: (ConditionStatus.FALSE, Reason.REQUESTS_LEAKED),
    Verdict.SATURATED: (ConditionStatus.TRUE, Reason.QUEUES_SATURATED),
    Verdict.DRAINING: (ConditionStatus.UNKNOWN, Reason.DRAINING),
    Verdict.STARTING: (ConditionStatus.UNKNOWN, Reason.STARTING),
    Verdict.FLOWING: (ConditionStatus.TRUE, Reason.QUEUES_FLOWING),
    Verdict.IDLE: (ConditionStatus.TRUE, Reason.QUEUES_FLOWING),
}


def queues_healthy(
    writer: ConditionWriter, diagnoses: Sequence[Diagnosis], *, unjudged: Sequence[str] = ()
) -> Condition:
    """False if an instance is stuck, failing, blocked or leaks, Unknown if nothing is known, else True.

    Instances that start or drain do not hide the verdicts of the others.

    Args:
        writer: makes the condition.
        diagnoses: of all instances.
        unjudged: pools with instances of which there are no diagnoses yet.
    """
    settled = [d for d in diagnoses if d.verdict not in {Verdict.STARTING, Verdict.DRAINING}]
    top = worst(settled or diagnoses)
    status, reason = _MEANING[top.verdict] if top is not None else (ConditionStatus.TRUE, Reason.NO_INSTANCES)
    waiting = [*unjudged, *(d.subject.name for d in settled if d.verdict is Verdict.UNKNOWN and not d.subject.tracks)]
    if waiting and status is not ConditionStatus.FALSE and not _unknown(settled):
        message = f"The operator has not sampled {some(waiting)} yet"
        return writer.write(ConditionType.QUEUES_HEALTHY, ConditionStatus.UNKNOWN, Reason.NOT_JUDGED, message)
    if top is None:
        return writer.write(ConditionType.QUEUES_HEALTHY, status, reason, "There are no instances")
    if status is ConditionStatus.TRUE and top.verdict is not Verdict.SATURATED:
        return writer.write(ConditionType.QUEUES_HEALTHY, status, reason, "Hand-off queues are empty or move")
    alike = sorted({d.message for d in settled or diagnoses if d.verdict is top.verdict})
    return writer.write(ConditionType.QUEUES_HEALTHY, status, reason, "; ".join(alike))


def _unknown(diagnoses: Sequence[Diagnosis]) -> bool:
    """Whether an instance has ended, or does not answer although it was sampled before."""
    return any(d.verdict is Verdict.GONE or (d.verdict is Verdict.UNKNOWN and d.subject.tracks) for d in diagnoses)


def queues_column(diagnoses: Sequence[Diagnosis], *, with_role: bool = False) -> str:
    """Return the most severe verdict in a few words: `Idle`, `Blocked (decode)`, `Stuck (instance 1)`."""
    top = worst(diagnoses)
    if top is None:
        return ""
    if top.verdict.well:
        return str(top.verdict)
    if top.verdict is Verdict.BLOCKED:
        return f"{top.verdict} ({'decode' if top.subject.role == 'prefill' else 'prefill'})"
    if top.subject.watched_pod:
        return shortened(f"{top.verdict} ({top.subject.watched_pod})", MAX_COLUMN)
    where = f"{top.subject.role} {top.subject.index}" if with_role else f"instance {top.subject.index}"
    return f"{top.verdict} ({where})"


def oldest_waiting_since(diagnoses: Sequence[Diagnosis], before: datetime | None) -> datetime | None:
    """Return when the oldest request began to wait. Keep the earlier value if the new one means the same time."""
    since = min((d.waiting_since for d in diagnoses if d.waiting_since is not None), default=None)
    if since is not None and before is not None and abs(since - before) < STEADY:
        return before
    return since
