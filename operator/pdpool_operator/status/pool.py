"""Status of a pool as a function of observation, plan and diagnosis."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from ..api import names
from ..api.base import Condition, ConditionStatus, format_time
from ..api.pools import MAX_INSTANCES, InstanceStatus, PoolStatus, RepairRecord
from ..api.reasons import ConditionType, Reason
from ..api.wording import some
from ..build.pool import pool_spec_hash
from ..diagnose.model import Diagnosis, Verdict
from ..observe.model import ObservedInstance, ObservedPool
from ..plan.fences import Unproven
from ..plan.model import Fault, Plan
from ..plan.repair_model import Stop
from .chain import ConditionWriter, Rule, Violation, first_violation, shortened
from .holds import holds_provable
from .pods import PodFacts, pod_trouble
from .queues import oldest_waiting_since, queues_column, queues_healthy
from .reach import peers_unreachable
from .serving import CANNOT_SERVE, cannot_serve, fallen, is_ready, serving, silent_nodes
from .summary import from_faults, restarted_at, summary, update_available
from .transfer import connectors_in_use, engines_in_use, transfer_ready, transports_in_use

MAX_INSTANCE_MESSAGE = 512
LINGERS_AFTER = timedelta(seconds=60)
"""Time after a pod's grace period within which a healthy kubelet reports that the pod is gone."""


@dataclass(frozen=True)
class PoolFacts:
    """Inputs of a pool's status."""

    observed: ObservedPool
    plan: Plan
    diagnoses: tuple[Diagnosis, ...]
    now: datetime
    faults: tuple[Fault, ...] = ()
    """Faults of carrying out the plan. Those of planning are in the plan."""
    unproven: tuple[Unproven, ...] = ()
    """Holds of engines without possible proof."""
    repairs: tuple[RepairRecord, ...] = ()
    """Proposed, intended and recent repairs."""
    stops: tuple[Stop, ...] = ()
    """Why repair has stopped at instances at fault."""

    @property
    def all_faults(self) -> tuple[Fault, ...]:
        """Faults of planning and of carrying out."""
        return (*self.plan.faults, *self.faults)

    @property
    def wanted(self) -> tuple[ObservedInstance, ...]:
        """Desired instances that exist."""
        return tuple(one for one in self.observed.own if one.name not in self.plan.surplus)

    @cached_property
    def spec_hash(self) -> str:
        """Hash of the pool's current spec."""
        return pool_spec_hash(self.observed.pool, self.observed.keys)

    def updated(self, instance: ObservedInstance) -> bool:
        """Whether the instance's pod is as the current spec says."""
        pod = instance.pod
        return pod is not None and (pod.spec_hash == self.spec_hash or instance.name in self.plan.same_build)


def being_deleted(facts: PoolFacts) -> Violation | None:
    """The pool itself is being deleted."""
    if facts.observed.pool.metadata.deletion_timestamp is not None:
        return Violation(Reason.DELETING, "The pool is being deleted")
    return None


def has_fault(facts: PoolFacts) -> Violation | None:
    """The pool as it is cannot be planned or applied."""
    return from_faults(facts.all_faults)


def will_stop_serving(facts: PoolFacts) -> Violation | None:
    """The update has no room for a second instance, and will drain the only one."""
    return Violation(Reason.UPDATING, facts.plan.stops_serving) if facts.plan.stops_serving else None


def has_pod_trouble(facts: PoolFacts) -> Violation | None:
    """Kubernetes cannot run a pod."""
    return pod_trouble([PodFacts(i.name, i.pod, i.create_error) for i in facts.wanted])


def has_lingering_pod(facts: PoolFacts) -> Violation | None:
    """A pod should have terminated, but its node does not report it. No other pod of its name can start."""
    for instance in facts.wanted:
        pod = instance.pod
        if pod is not None and pod.gone_by is not None and facts.now - pod.gone_by > LINGERS_AFTER:
            message = (
                f"{pod.name} should have terminated by {format_time(pod.gone_by)}, but node {pod.node} has not "
                f"reported it, so no replacement pod can start. If the node is down for good, taint it "
                f"node.kubernetes.io/out-of-service. A pod that is force-deleted may still run"
            )
            return Violation(Reason.POD_LINGERS, message)
    return None


def is_on_silent_node(facts: PoolFacts) -> Violation | None:
    """The kubelet of a node does not report, so Kubernetes counts its pods as not Ready."""
    pods = [instance.pod for instance in facts.wanted]
    nodes = silent_nodes(pods)
    if not nodes:
        return None
    names = ", ".join(pod.name for pod in pods if pod is not None and pod.node in nodes)
    plural = len(nodes) > 1
    message = (
        f"The kubelet{'s' if plural else ''} of node{'s' if plural else ''} {', '.join(nodes)} "
        f"{'do' if plural else 'does'} not report, so Kubernetes counts {names} as not Ready"
    )
    return Violation(Reason.NODE_NOT_READY, message)


def lacks_instances(facts: PoolFacts) -> Violation | None:
    """Instances are not created yet."""
    missing = facts.observed.pool.spec.replicas - len(facts.wanted)
    if missing > 0:
        reason = Reason.NO_PODS if not facts.wanted else Reason.SCALING_UP
        return Violation(reason, f"{missing} of {facts.observed.pool.spec.replicas} instances are not created yet")
    return None


def is_updating(facts: PoolFacts) -> Violation | None:
    """Instances still run an earlier spec."""
    old = [i.name for i in facts.wanted if i.pod is not None and not facts.updated(i)]
    if not old:
        return None
    return Violation(Reason.UPDATING, f"{len(old)} of {len(facts.wanted)} instances run an earlier spec")


def engines_not_ready(facts: PoolFacts) -> Violation | None:
    """An engine cannot serve."""
    broken = {d.subject.index for d in facts.diagnoses if cannot_serve(d)}
    waiting = [i for i in facts.wanted if not is_ready(i) or i.index in broken]
    if not waiting:
        return None
    reason = Reason.ENGINES_NOT_READY if any(fallen(i, facts.diagnoses) for i in waiting) else Reason.STARTING
    shown = some([f"{i.name}{_why(i, facts.diagnoses)}" for i in waiting])
    return Violation(reason, f"{len(waiting)} of {len(facts.wanted)} instances cannot serve: {shown}")


def _why(instance: ObservedInstance, diagnoses: Sequence[Diagnosis]) -> str:
    """Return in brackets why an instance cannot serve although its pod may be Ready."""
    for diagnosis in diagnoses:
        if diagnosis.subject.index == instance.index and cannot_serve(diagnosis):
            return f" ({diagnosis.unfit or CANNOT_SERVE[diagnosis.verdict]})"
    return ""


def is_in_progress(facts: PoolFacts) -> Violation | None:
    """The plan has steps left."""
    progress = facts.plan.progress
    return Violation(progress.reason, progress.message) if progress is not None else None


READY_CHAIN: Sequence[Rule[PoolFacts]] = (
    being_deleted,
    has_fault,
    will_stop_serving,
    has_pod_trouble,
    has_lingering_pod,
    is_on_silent_node,
    lacks_instances,
    is_updating,
    engines_not_ready,
    is_in_progress,
)


def pool_status(facts: PoolFacts) -> PoolStatus:
    """Return the status to show now. The earlier status affects transition times and `restartedAt`."""
    pool, before = facts.observed.pool, facts.observed.pool.status
    writer = ConditionWriter(before.conditions, pool.metadata.generation, facts.now)
    mine = facts.observed.own
    ready = sum(is_ready(instance) for instance in facts.wanted)
    unready = first_violation(READY_CHAIN, facts)
    return PoolStatus(
        observed_generation=pool.metadata.generation,
        replicas=len(mine),
        ready_replicas=ready,
        updated_replicas=sum(facts.updated(instance) for instance in facts.wanted),
        ready=f"{ready}/{pool.spec.replicas}",
        selector=names.selector_string(names.pool_selector(pool.metadata.name, pool.role)),
        queues=queues_column(facts.diagnoses),
        engine=engines_in_use(facts.diagnoses),
        connector=connectors_in_use(facts.diagnoses),
        transport=transports_in_use(facts.diagnoses),
        oldest_waiting_since=oldest_waiting_since(facts.diagnoses, before.oldest_waiting_since),
        restarted_at=restarted_at(pool.metadata, before.restarted_at, complete=unready is None),
        instances=tuple(_instance_status(instance, facts) for instance in mine if instance.index < MAX_INSTANCES),
        repairs=facts.repairs,
        conditions=_conditions(writer, facts, unready),
    )


def _conditions(writer: ConditionWriter, facts: PoolFacts, unready: Violation | None) -> tuple[Condition, ...]:
    return (
        *summary(
            writer,
            unavailable=_unavailable(facts, unready),
            unready=unready,
            ready=_well(facts),
            activity=facts.plan.progress,
        ),
        queues_healthy(writer, facts.diagnoses),
        holds_provable(writer, facts.unproven),
        *_repair_stopped(writer, facts.stops),
        *peers_unreachable(writer, facts.diagnoses),
        *transfer_ready(writer, facts.observed.pool.spec.rdma, facts.diagnoses),
    )


def _repair_stopped(writer: ConditionWriter, stops: Sequence[Stop]) -> tuple[Condition, ...]:
    """Return the condition RepairStopped, with the reason of the first stop. There is none while repair goes on."""
    if not stops:
        return ()
    message = some([stop.message for stop in stops], " ")
    return (writer.write(ConditionType.REPAIR_STOPPED, ConditionStatus.TRUE, stops[0].reason, message),)


def _unavailable(facts: PoolFacts, unready: Violation | None) -> Violation | None:
    """Return why no instance serves. The rules of Ready give the cause."""
    if serving(facts.observed, facts.diagnoses):
        return None
    if unready is not None:
        return Violation(unready.reason, unready.message)
    return Violation(Reason.SCALED_TO_ZERO, "The pool is scaled to 0")


def _well(facts: PoolFacts) -> Violation:
    """Reason and message of Ready while all is as the spec says."""
    replicas, outdated = facts.observed.pool.spec.replicas, facts.plan.update_available
    if replicas == 0:
        return Violation(Reason.SCALED_TO_ZERO, "The pool is scaled to 0, as its spec says")
    if outdated:
        return update_available(outdated)
    return Violation(Reason.READY, f"{'1 instance serves' if replicas == 1 else f'All {replicas} instances serve'}")


def _instance_status(instance: ObservedInstance, facts: PoolFacts) -> InstanceStatus:
    diagnosis = next((d for d in facts.diagnoses if d.subject.index == instance.index), None)
    pod = instance.pod
    return InstanceStatus(
        index=instance.index,
        ready=is_ready(instance),
        updated=facts.updated(instance),
        pod=pod.name if pod is not None else None,
        pod_uid=pod.uid if pod is not None else None,
        verdict=str(diagnosis.verdict) if diagnosis is not None else str(Verdict.UNKNOWN),
        message=shortened(diagnosis.message, MAX_INSTANCE_MESSAGE) if diagnosis is not None else "",
    )
