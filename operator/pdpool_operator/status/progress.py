"""The condition Progressing: whether the operator is working towards the goal, and what it waits for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..api import names
from ..api.base import Condition, ConditionStatus
from ..api.reasons import Reason
from ..diagnose.model import Diagnosis, Verdict
from ..observe.model import ObservedInstance
from ..plan.model import Fault, Plan, Progress
from .chain import ConditionWriter

PROGRESSING = "Progressing"


def is_ready(instance: ObservedInstance) -> bool:
    """Whether the instance's engine can serve."""
    return instance.pod is not None and instance.pod.ready and not instance.pod.terminating


@dataclass(frozen=True, slots=True)
class Unready:
    """Names of instances that cannot serve."""

    starting: tuple[str, ...]
    """They were never Ready, or are being replaced."""
    fallen: tuple[str, ...]
    """Their engines were Ready before, so waiting for their start would have no end."""


def unready(instances: Iterable[ObservedInstance], diagnoses: Sequence[Diagnosis]) -> Unready:
    """Return the instances of one pool that cannot serve. `diagnoses` are of that pool."""
    verdicts = {d.subject.index: d.verdict for d in diagnoses}
    on_the_way = {Verdict.STARTING, Verdict.DRAINING}
    waiting = [(i.name, verdicts.get(i.index, Verdict.STARTING)) for i in instances if not is_ready(i)]
    return Unready(
        tuple(name for name, verdict in waiting if verdict in on_the_way),
        tuple(name for name, verdict in waiting if verdict not in on_the_way),
    )


def progressing(writer: ConditionWriter, plan: Plan, faults: Sequence[Fault], waits: Unready) -> Condition:
    """True while the operator is working towards the goal, with its current activity."""
    if faults:
        return writer.write(
            PROGRESSING, ConditionStatus.FALSE, faults[0].reason, "Stopped: fix the error in the Ready condition first"
        )
    progress = plan.progress
    if progress is not None and progress.reason is Reason.STARTING and waits.fallen:
        fallen = f"{_some(waits.fallen)} can no longer serve; QueuesHealthy has the evidence"
        if not waits.starting:
            return writer.write(PROGRESSING, ConditionStatus.FALSE, Reason.ENGINES_NOT_READY, fallen)
        progress = Progress(Reason.STARTING, f"Waiting for {_some(waits.starting)} to be Ready. {fallen}")
    if progress is not None:
        return writer.write(PROGRESSING, ConditionStatus.TRUE, progress.reason, progress.message)
    if plan.update_available:
        message = (
            f"{_some(plan.update_available)} were built by an earlier operator version; annotate the object with "
            f"{names.ANNOTATION_RESTARTED_AT} to replace them one by one"
        )
        return writer.write(PROGRESSING, ConditionStatus.FALSE, Reason.UPDATE_AVAILABLE, message)
    return writer.write(PROGRESSING, ConditionStatus.FALSE, Reason.COMPLETE, "Everything matches the spec")


def _some(workloads: Sequence[str]) -> str:
    more = f" and {len(workloads) - 5} more" if len(workloads) > 5 else ""
    return ", ".join(workloads[:5]) + more
