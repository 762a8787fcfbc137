"""The condition Progressing: whether the operator is on its way to the goal, and what it waits for."""

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
    """They were not up before, or are on their way out and back."""
    fallen: tuple[str, ...]
    """Their engines were up: to wait for them to start would be to wait for nothing."""


def unready(instances: Iterable[ObservedInstance], diagnoses: Sequence[Diagnosis]) -> Unready:
    """Those of the instances of one pool that cannot serve; `diagnoses` are of that pool."""
    verdicts = {d.subject.index: d.verdict for d in diagnoses}
    on_the_way = {Verdict.STARTING, Verdict.DRAINING}
    waiting = [(i.name, verdicts.get(i.index, Verdict.STARTING)) for i in instances if not is_ready(i)]
    return Unready(
        tuple(name for name, verdict in waiting if verdict in on_the_way),
        tuple(name for name, verdict in waiting if verdict not in on_the_way),
    )


def progressing(writer: ConditionWriter, plan: Plan, faults: Sequence[Fault], waits: Unready) -> Condition:
    """True while the operator is on its way to the goal, with what it is doing."""
    if faults:
        return writer.write(
            PROGRESSING, ConditionStatus.FALSE, faults[0].reason, "Waits until the fault that Ready tells of is mended"
        )
    progress = plan.progress
    if progress is not None and progress.reason is Reason.STARTING and waits.fallen:
        fallen = f"{_some(waits.fallen)} came up and cannot serve now; QueuesHealthy has the evidence"
        if not waits.starting:
            return writer.write(PROGRESSING, ConditionStatus.FALSE, Reason.ENGINES_NOT_READY, fallen)
        progress = Progress(Reason.STARTING, f"Waiting for {_some(waits.starting)} to be Ready. {fallen}")
    if progress is not None:
        return writer.write(PROGRESSING, ConditionStatus.TRUE, progress.reason, progress.message)
    if plan.update_available:
        message = (
            f"{_some(plan.update_available)} run as an earlier operator built them; annotate the object with "
            f"{names.ANNOTATION_RESTARTED_AT} to replace them one by one"
        )
        return writer.write(PROGRESSING, ConditionStatus.FALSE, Reason.UPDATE_AVAILABLE, message)
    return writer.write(PROGRESSING, ConditionStatus.FALSE, Reason.COMPLETE, "Everything is as the spec says")


def _some(workloads: Sequence[str]) -> str:
    more = f" and {len(workloads) - 5} more" if len(workloads) > 5 else ""
    return ", ".join(workloads[:5]) + more
