"""Status of a service that only watches pods, as a function of observation and diagnosis."""

from collections.abc import Sequence
from datetime import datetime

from ..api.reasons import ConditionType, Reason
from ..api.services import DisaggregatedServiceStatus, WatchedInstanceStatus
from ..api.wording import some
from ..diagnose.model import Diagnosis
from ..observe.model import ObservedFleet, ObservedPool
from .chain import ConditionWriter, Rule, Violation, first_violation, shortened
from .pods import PodFacts, pod_trouble
from .queues import oldest_waiting_since, queues_column, queues_healthy
from .serving import is_ready, serving
from .summary import summary

MAX_MESSAGE = 1024

_Facts = tuple[ObservedFleet, Sequence[Diagnosis]]


def fleet_status(observed: ObservedFleet, diagnoses: Sequence[Diagnosis], now: datetime) -> DisaggregatedServiceStatus:
    """Return the status to show now."""
    meta, before = observed.service.metadata, observed.service.status
    writer = ConditionWriter(before.conditions, meta.generation, now)
    facts = (observed, diagnoses)
    counts = " and ".join(f"{len(side.instances)} {side.pool.role}" for side in observed.sides)
    conditions = (
        *summary(
            writer,
            unavailable=first_violation(AVAILABLE_CHAIN, facts),
            unready=first_violation(READY_CHAIN, facts),
            ready=Violation(Reason.READY, f"The operator watches {counts} pods and changes nothing"),
            activity=None,
        ),
        queues_healthy(writer, diagnoses),
        writer.judge(
            ConditionType.ROUTER_READY, None, Reason.ROUTER_DISABLED, "A service with selectors runs no router"
        ),
    )
    return DisaggregatedServiceStatus(
        observed_generation=meta.generation,
        ready=", ".join(
            f"{sum(map(is_ready, side.instances))}/{len(side.instances)} {side.pool.role}" for side in observed.sides
        ),
        queues=queues_column(diagnoses, with_role=True),
        oldest_waiting_since=oldest_waiting_since(diagnoses, before.oldest_waiting_since),
        instances=tuple(map(_instance, diagnoses)),
        conditions=conditions,
    )


def refused(facts: _Facts) -> Violation | None:
    """A selector selects pods that cannot be watched."""
    refusals = facts[0].refusals
    return Violation(Reason.SPEC_INVALID, some(refusals, "; ")) if refusals else None


def no_pods(facts: _Facts) -> Violation | None:
    """A selector selects no pod."""
    empty = [side for side in facts[0].sides if not side.instances]
    message = " and ".join(f"{side.pool.role}.selector" for side in empty)
    return Violation(Reason.NO_PODS, f"{message} selects no pod in this namespace") if empty else None


def not_ready(facts: _Facts) -> Violation | None:
    """A side has no pod that can serve."""
    observed, diagnoses = facts
    waiting = [_cannot_serve(side) for side in observed.sides if not serving(side, diagnoses)]
    return Violation(Reason.POOLS_NOT_READY, "; ".join(waiting)) if waiting else None


def _cannot_serve(side: ObservedPool) -> str:
    trouble = pod_trouble([PodFacts(i.name, i.pod, i.create_error) for i in side.instances])
    return f"No selected {side.pool.role} pod can serve{f': {trouble.message}' if trouble else ''}"


AVAILABLE_CHAIN: Sequence[Rule[_Facts]] = (no_pods, not_ready)
READY_CHAIN: Sequence[Rule[_Facts]] = (refused, no_pods, not_ready)


def _instance(diagnosis: Diagnosis) -> WatchedInstanceStatus:
    subject = diagnosis.subject
    return WatchedInstanceStatus(
        pod=subject.name,
        role=str(subject.role),
        ready=subject.pod is not None and subject.pod.takes_requests,
        verdict=str(diagnosis.verdict),
        message=shortened(diagnosis.message, MAX_MESSAGE),
    )
