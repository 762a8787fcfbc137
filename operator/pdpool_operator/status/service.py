"""Status of a service as a function of observation, plan and diagnosis."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ..api.base import Condition
from ..api.models import DisaggregatedServiceStatus
from ..api.reasons import Reason
from ..diagnose.model import Diagnosis
from ..observe.model import ObservedPool, ObservedService
from ..plan.model import DrainReason, Fault, Plan
from ..plan.service import router_url
from .chain import ConditionWriter, Rule, Violation, first_violation
from .contradictions import contradictions
from .pods import PodFacts, pod_trouble
from .pool import READY
from .progress import Unready, is_ready, progressing, unready
from .queues import oldest_waiting_since, queues_column, queues_healthy

ROUTER_READY = "RouterReady"


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """Inputs of a service's status."""

    observed: ObservedService
    plan: Plan
    diagnoses: tuple[Diagnosis, ...]
    """Diagnoses of both sides."""
    faults: tuple[Fault, ...] = ()
    """Faults of carrying out the plan. Those of planning are in the plan."""

    @property
    def all_faults(self) -> tuple[Fault, ...]:
        """Faults of planning and of carrying out."""
        return (*self.plan.faults, *self.faults)

    @property
    def sides(self) -> tuple[tuple[str, str, ObservedPool | None], ...]:
        """Kind and name of each bound pool, and the pool."""
        spec = self.observed.service.spec
        return (
            ("PrefillPool", spec.prefill.pool_ref.name, self.observed.prefill),
            ("DecodePool", spec.decode.pool_ref.name, self.observed.decode),
        )


def being_deleted(facts: ServiceFacts) -> Violation | None:
    """The service itself is being deleted."""
    if facts.observed.service.metadata.deletion_timestamp is not None:
        return Violation(Reason.DELETING, "The service is being deleted")
    return None


def has_fault(facts: ServiceFacts) -> Violation | None:
    """The service as it is cannot be planned or applied."""
    if not facts.all_faults:
        return None
    return Violation(facts.all_faults[0].reason, "\n".join(fault.message for fault in facts.all_faults))


def pool_missing(facts: ServiceFacts) -> Violation | None:
    """A pool that the service names does not exist."""
    missing = [f"{kind} {name}" for kind, name, pool in facts.sides if pool is None]
    if missing:
        advice = "create it, or name another pool in poolRef"
        return Violation(Reason.POOL_NOT_FOUND, f"{' and '.join(missing)} not found in this namespace; {advice}")
    return None


def pools_contradict(facts: ServiceFacts) -> Violation | None:
    """The specs of the two pools contradict each other."""
    prefill, decode = facts.observed.prefill, facts.observed.decode
    found = contradictions(prefill.pool, decode.pool) if prefill is not None and decode is not None else ()
    if found:
        advice = "Give both pools the same value, or bind another pool"
        return Violation(Reason.POOLS_CONTRADICT, f"Requests fail: {'; '.join(found)}. {advice}")
    return None


def pools_not_ready(facts: ServiceFacts) -> Violation | None:
    """A side has no engine that can serve."""
    waiting = [
        _cannot_serve(f"{kind} {name}", pool)
        for kind, name, pool in facts.sides
        if pool and not any(is_ready(i) for i in pool.instances)
    ]
    return Violation(Reason.POOLS_NOT_READY, ". ".join(waiting)) if waiting else None


def _cannot_serve(who: str, pool: ObservedPool) -> str:
    """Return why no instance of a pool can serve, for people who read the service's status first."""
    if pool.pool.spec.replicas == 0:
        return f"{who} is scaled to 0"
    trouble = pod_trouble([PodFacts(i.name, i.pod, i.create_error) for i in pool.instances])
    return f"No instance of {who} can serve{f': {trouble.message}' if trouble else '; see its own conditions'}"


def router_not_ready(facts: ServiceFacts) -> Violation | None:
    """Fewer routers can serve than the spec demands."""
    return first_violation(ROUTER_CHAIN, facts)


def router_pod_trouble(facts: ServiceFacts) -> Violation | None:
    """Kubernetes cannot run a router pod."""
    if not facts.observed.service.spec.router.enabled:
        return None
    return pod_trouble([PodFacts(router.pod.name, router.pod) for router in facts.observed.routers])


def router_deployment_missing(facts: ServiceFacts) -> Violation | None:
    """The Deployment is not created yet, or Kubernetes refuses its pods."""
    deployment = facts.observed.deployment
    if not facts.observed.service.spec.router.enabled:
        return None
    if deployment is None:
        return Violation(Reason.ROUTER_NOT_READY, "The router's Deployment is not created yet")
    if deployment.failure:
        return Violation(Reason.POD_REJECTED, f"{deployment.name}: {deployment.failure}")
    return None


def routers_starting(facts: ServiceFacts) -> Violation | None:
    """Not all router pods are Ready. A router becomes Ready when it knows a healthy engine of each side."""
    router, deployment = facts.observed.service.spec.router, facts.observed.deployment
    if not router.enabled or deployment is None or deployment.ready_replicas >= router.replicas:
        return None
    words = "a router becomes Ready when it knows a healthy engine of each side"
    message = f"{deployment.ready_replicas} of {router.replicas} routers are Ready; {words}"
    return Violation(Reason.ROUTER_NOT_READY, message)


ROUTER_CHAIN: Sequence[Rule[ServiceFacts]] = (router_deployment_missing, router_pod_trouble, routers_starting)
BINDING_CHAIN: Sequence[Rule[ServiceFacts]] = (pool_missing, pools_contradict)
"""Errors that the user must fix in the pools that the service binds."""
READY_CHAIN: Sequence[Rule[ServiceFacts]] = (
    being_deleted,
    has_fault,
    *BINDING_CHAIN,
    pools_not_ready,
    router_not_ready,
)


def service_status(facts: ServiceFacts, now: datetime) -> DisaggregatedServiceStatus:
    """Return the status to show now. The earlier status only affects transition times."""
    service, before = facts.observed.service, facts.observed.service.status
    writer = ConditionWriter(before.conditions, service.metadata.generation, now)
    deployment = facts.observed.deployment
    return DisaggregatedServiceStatus(
        observed_generation=service.metadata.generation,
        url=router_url(service),
        router_replicas=deployment.ready_replicas if deployment is not None else 0,
        ready=", ".join(_ready_text(pool, role) for role, pool in _by_role(facts)),
        queues=queues_column(facts.diagnoses, with_role=True),
        oldest_waiting_since=oldest_waiting_since(facts.diagnoses, before.oldest_waiting_since),
        conditions=_conditions(facts, writer),
    )


def _conditions(facts: ServiceFacts, writer: ConditionWriter) -> tuple[Condition, ...]:
    router = facts.observed.service.spec.router
    good = Reason.READY if router.enabled else Reason.ROUTER_DISABLED
    ready = "1 router is Ready" if router.replicas == 1 else f"{router.replicas} routers are Ready"
    message = ready if router.enabled else "The service runs no router"
    misbound = first_violation(BINDING_CHAIN, facts)
    faults = (*facts.all_faults, *([Fault(misbound.reason, misbound.message)] if misbound else []))
    return (
        writer.judge(READY, first_violation(READY_CHAIN, facts), Reason.READY, "Requests can be served"),
        progressing(writer, facts.plan, faults, _keep_routers_waiting(facts)),
        queues_healthy(writer, facts.diagnoses),
        writer.judge(ROUTER_READY, router_not_ready(facts), good, message),
    )


def _keep_routers_waiting(facts: ServiceFacts) -> Unready:
    """Instances of the sides without any instance that can serve. They keep every router from becoming Ready."""
    sides = [
        unready(pool.instances, [d for d in facts.diagnoses if d.subject.role is pool.pool.role])
        for _, _, pool in facts.sides
        if pool and not any(is_ready(i) for i in pool.instances)
    ]
    return Unready(
        tuple(name for side in sides for name in side.starting), tuple(name for side in sides for name in side.fallen)
    )


def _by_role(facts: ServiceFacts) -> tuple[tuple[str, ObservedPool | None], ...]:
    return ("prefill", facts.observed.prefill), ("decode", facts.observed.decode)


def _ready_text(pool: ObservedPool | None, role: str) -> str:
    if pool is None:
        return f"no {role}"
    wanted = pool.pool.spec.replicas
    staying = (i for i in pool.instances if i.drain_reason != DrainReason.SCALE_DOWN)
    return f"{sum(is_ready(i) for i in staying)}/{wanted} {role}"
