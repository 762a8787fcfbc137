"""Status of a pool as a function of observation, plan and diagnosis."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..api import names
from ..api.base import Condition, format_time
from ..api.models import MAX_INSTANCES, MAX_RANK_QUEUES, InstanceStatus, PoolStatus, RankQueue
from ..api.reasons import Reason
from ..build.pool import pool_spec_hash
from ..diagnose.model import Diagnosis, Verdict
from ..observe.model import ObservedInstance, ObservedPool
from ..plan.fences import Unproven
from ..plan.model import Fault, Plan
from .chain import ConditionWriter, Rule, Violation, first_violation, shortened
from .holds import holds_provable
from .pods import PodFacts, pod_trouble
from .progress import is_ready, progressing, unready
from .queues import oldest_waiting_since, queues_column, queues_healthy

READY = "Ready"
MAX_INSTANCE_MESSAGE = 512
LINGERS_AFTER = timedelta(seconds=60)
"""Time after a pod's grace period within which a healthy kubelet reports that the pod is gone."""


@dataclass(frozen=True, slots=True)
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

    @property
    def all_faults(self) -> tuple[Fault, ...]:
        """Faults of planning and of carrying out."""
        return (*self.plan.faults, *self.faults)

    @property
    def wanted(self) -> tuple[ObservedInstance, ...]:
        """Desired instances that exist."""
        replicas = self.observed.pool.spec.replicas
        uid = self.observed.pool.metadata.uid
        return tuple(i for i in self.observed.instances if i.index < replicas and i.controller_uid == uid)


def being_deleted(facts: PoolFacts) -> Violation | None:
    """The pool itself is being deleted."""
    if facts.observed.pool.metadata.deletion_timestamp is not None:
        return Violation(Reason.DELETING, "The pool is being deleted")
    return None


def has_fault(facts: PoolFacts) -> Violation | None:
    """The pool as it is cannot be planned or applied."""
    if not facts.all_faults:
        return None
    return Violation(facts.all_faults[0].reason, "\n".join(fault.message for fault in facts.all_faults))


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


def lacks_instances(facts: PoolFacts) -> Violation | None:
    """Instances are not created yet."""
    missing = facts.observed.pool.spec.replicas - len(facts.wanted)
    if missing > 0:
        reason = Reason.NO_PODS if not facts.wanted else Reason.SCALING_UP
        return Violation(reason, f"{missing} of {facts.observed.pool.spec.replicas} instances are not created yet")
    return None


def is_updating(facts: PoolFacts) -> Violation | None:
    """Instances still run an earlier spec."""
    spec_hash = pool_spec_hash(facts.observed.pool, facts.observed.keys)
    old = [i.name for i in facts.wanted if i.pod is not None and i.pod.spec_hash != spec_hash]
    if old:
        doing = facts.plan.progress.message if facts.plan.progress else "waiting"
        return Violation(Reason.UPDATING, f"{len(old)} of {len(facts.wanted)} instances run an earlier spec: {doing}")
    return None


def engines_not_ready(facts: PoolFacts) -> Violation | None:
    """An engine cannot serve."""
    waiting = [instance for instance in facts.wanted if not is_ready(instance)]
    if not waiting:
        return None
    fallen = unready(facts.wanted, facts.diagnoses).fallen
    reason = Reason.ENGINES_NOT_READY if fallen else Reason.STARTING
    stuck = {d.subject.index for d in facts.diagnoses if d.verdict is Verdict.STUCK}
    shown = ", ".join(f"{i.name}{' (stuck)' if i.index in stuck else ''}" for i in waiting[:5])
    return Violation(reason, f"{len(waiting)} of {len(facts.wanted)} instances cannot serve: {shown}")


READY_CHAIN: Sequence[Rule[PoolFacts]] = (
    being_deleted,
    has_fault,
    has_pod_trouble,
    has_lingering_pod,
    lacks_instances,
    is_updating,
    engines_not_ready,
)


def pool_status(facts: PoolFacts) -> PoolStatus:
    """Return the status to show now. The earlier status only affects transition times."""
    pool, before = facts.observed.pool, facts.observed.pool.status
    writer = ConditionWriter(before.conditions, pool.metadata.generation, facts.now)
    spec_hash = pool_spec_hash(pool, facts.observed.keys)
    mine = [i for i in facts.observed.instances if i.controller_uid == pool.metadata.uid]
    ready = sum(is_ready(instance) for instance in facts.wanted)
    return PoolStatus(
        observed_generation=pool.metadata.generation,
        replicas=len(mine),
        ready_replicas=ready,
        updated_replicas=sum(i.pod is not None and i.pod.spec_hash == spec_hash for i in facts.wanted),
        ready=f"{ready}/{pool.spec.replicas}",
        selector=names.selector_string(names.pool_selector(pool.metadata.name, pool.role)),
        queues=queues_column(facts.diagnoses),
        oldest_waiting_since=oldest_waiting_since(facts.diagnoses, before.oldest_waiting_since),
        instances=tuple(
            _instance_status(instance, facts, spec_hash) for instance in mine if instance.index < MAX_INSTANCES
        ),
        conditions=(_ready(writer, facts, ready),
                    progressing(writer, facts.plan, facts.all_faults, unready(facts.wanted, facts.diagnoses)),
                    queues_healthy(writer, facts.diagnoses), holds_provable(writer, facts.unproven)),
    )  # fmt: skip


def _ready(writer: ConditionWriter, facts: PoolFacts, ready: int) -> Condition:
    replicas = facts.observed.pool.spec.replicas
    violation = first_violation(READY_CHAIN, facts)
    if replicas == 0:
        return writer.judge(READY, violation, Reason.SCALED_TO_ZERO, "No instances are wanted")
    return writer.judge(READY, violation, Reason.READY, f"{ready} of {replicas} instances can serve")


def _instance_status(instance: ObservedInstance, facts: PoolFacts, spec_hash: str) -> InstanceStatus:
    diagnosis = next((d for d in facts.diagnoses if d.subject.index == instance.index), None)
    pod = instance.pod
    return InstanceStatus(
        index=instance.index,
        ready=is_ready(instance),
        updated=pod is not None and pod.spec_hash == spec_hash,
        pod=pod.name if pod is not None else None,
        pod_uid=pod.uid if pod is not None else None,
        verdict=str(diagnosis.verdict) if diagnosis is not None else str(Verdict.UNKNOWN),
        message=shortened(diagnosis.message, MAX_INSTANCE_MESSAGE) if diagnosis is not None else "",
        queues=_queues(instance),
    )


def _queues(instance: ObservedInstance) -> tuple[RankQueue, ...]:
    """Queue lengths at the newest sample: from the connector if it answered, else from the engine, else none."""
    lengths: dict[tuple[int, str], int] = {}
    for rank, sample in instance.ranks.items():
        if sample.engine is not None:
            lengths |= {(rank, name): reqs for name, reqs in sample.engine.queues.items()}
        if sample.connector is not None:
            lengths |= {(rank, name): queue.reqs for name, queue in sample.connector.queues.items()}
    return tuple(RankQueue(rank=r, name=n, reqs=reqs) for (r, n), reqs in sorted(lengths.items()))[:MAX_RANK_QUEUES]
