"""Status of a service as a function of observation, plan and diagnosis."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ..api.base import Condition
from ..api.names import Role
from ..api.reasons import ConditionType, Reason
from ..api.services import DisaggregatedServiceStatus
from ..diagnose.model import Diagnosis
from ..observe.model import DrainReason, ObservedPool, ObservedService
from ..plan.model import Fault, Plan
from ..plan.service import router_url
from .chain import ConditionWriter, Rule, Violation, first_violation
from .contradictions import contradictions
from .pods import PodFacts, pod_trouble
from .queues import oldest_waiting_since, queues_column, queues_healthy
from .serving import has_router_service, is_ready, serving, serving_routers, silent_nodes
from .summary import from_faults, restarted_at, summary, update_available


@dataclass(frozen=True, slots=True)
class Side:
    """One bound pool."""

    kind: str
    name: str
    role: Role
    pool: ObservedPool | None
    """`None` if there is no such pool."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def scaled_to_zero(self) -> bool:
        """Whether the pool's spec wants no instance."""
        return self.pool is not None and self.pool.pool.spec.replicas == 0


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """Inputs of a service's status."""

    observed: ObservedService
    plan: Plan
    diagnoses: tuple[Diagnosis, ...]
    """Diagnoses of both sides."""
    faults: tuple[Fault, ...] = ()
    """Faults of carrying out the plan. Those of planning are in the plan."""
    unsettled: tuple[str, ...] = ()
    """Changes of worker lists that did not show in time."""

    @property
    def all_faults(self) -> tuple[Fault, ...]:
        """Faults of planning and of carrying out."""
        return (*self.plan.faults, *self.faults)

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both bound pools."""
        spec = self.observed.service.spec
        return (
            Side("PrefillPool", spec.prefill.pool_name, Role.PREFILL, self.observed.prefill),
            Side("DecodePool", spec.decode.pool_name, Role.DECODE, self.observed.decode),
        )

    @property
    def at_zero(self) -> tuple[Side, ...]:
        """Sides without any instance, as their specs say. Routers cannot become Ready without them."""
        return tuple(side for side in self.sides if side.scaled_to_zero)

    def serves(self, side: Side) -> bool:
        """Whether an engine of this side serves, also one that a deleted pool has left."""
        if side.pool is not None:
            return bool(serving(side.pool, self.diagnoses))
        return self.observed.serving_orphans(side.role) > 0


def being_deleted(facts: ServiceFacts) -> Violation | None:
    """The service itself is being deleted."""
    if facts.observed.service.metadata.deletion_timestamp is not None:
        return Violation(Reason.DELETING, "The service is being deleted")
    return None


def has_fault(facts: ServiceFacts) -> Violation | None:
    """The service as it is cannot be planned or applied."""
    return from_faults(facts.all_faults)


def pool_missing(facts: ServiceFacts) -> Violation | None:
    """A pool that the service names does not exist."""
    missing = [str(side) for side in facts.sides if side.pool is None]
    if missing:
        advice = "create it, or name another pool in poolRef"
        return Violation(Reason.POOL_NOT_FOUND, f"{' and '.join(missing)} not found in this namespace; {advice}")
    return None


def pools_contradict(facts: ServiceFacts) -> Violation | None:
    """The specs of the two pools contradict each other."""
    prefill, decode = facts.observed.prefill, facts.observed.decode
    found = contradictions(prefill.pool, decode.pool) if prefill is not None and decode is not None else ()
    if found:
        advice = "give both pools the same value, or bind another pool"
        return Violation(Reason.POOLS_CONTRADICT, f"Requests fail: {'; '.join(found)}; {advice}")
    return None


def side_missing(facts: ServiceFacts) -> Violation | None:
    """A pool does not exist, and left no engine that serves."""
    lost = any(side.pool is None and not facts.serves(side) for side in facts.sides)
    return pool_missing(facts) if lost else None


def scaled_to_zero(facts: ServiceFacts) -> Violation | None:
    """The spec of a pool wants no instance, so no request can be served."""
    sides = " and ".join(str(side) for side in facts.at_zero if not facts.serves(side))
    plural = len(facts.at_zero) > 1
    return Violation(Reason.SCALED_TO_ZERO, f"{sides} {'are' if plural else 'is'} scaled to 0") if sides else None


def pools_not_ready(facts: ServiceFacts) -> Violation | None:
    """A side that should have instances has none that can serve."""
    waiting = [
        _cannot_serve(side, side.pool)
        for side in facts.sides
        if side.pool is not None and not side.scaled_to_zero and not facts.serves(side)
    ]
    return Violation(Reason.POOLS_NOT_READY, "; ".join(waiting)) if waiting else None


def _cannot_serve(side: Side, pool: ObservedPool) -> str:
    """Return why no instance of a pool can serve, for people who read the service's status first."""
    trouble = pod_trouble([PodFacts(i.name, i.pod, i.create_error) for i in pool.instances])
    return f"No instance of {side} can serve{f': {trouble.message}' if trouble else '; see its own conditions'}"


def router_not_ready(facts: ServiceFacts) -> Violation | None:
    """Fewer routers can serve than the spec demands."""
    return first_violation(ROUTER_CHAIN, facts) if facts.observed.service.spec.router.enabled else None


def router_pod_trouble(facts: ServiceFacts) -> Violation | None:
    """Kubernetes cannot run a router pod."""
    return pod_trouble([PodFacts(router.pod.name, router.pod) for router in facts.observed.routers])


def router_deployment_missing(facts: ServiceFacts) -> Violation | None:
    """The Deployment is not created yet, or Kubernetes refuses its pods."""
    deployment = facts.observed.deployment
    if deployment is None:
        return Violation(Reason.ROUTER_NOT_READY, "The router's Deployment is not created yet")
    if deployment.failure:
        return Violation(Reason.POD_REJECTED, f"{deployment.name}: {deployment.failure}")
    return None


def router_on_silent_node(facts: ServiceFacts) -> Violation | None:
    """The kubelet of a router's node does not report."""
    nodes = silent_nodes(router.pod for router in facts.observed.routers)
    if not nodes:
        return None
    return Violation(Reason.NODE_NOT_READY, f"Routers run on nodes whose kubelet does not report: {', '.join(nodes)}")


def routers_starting(facts: ServiceFacts) -> Violation | None:
    """Not all router pods are Ready. A router becomes Ready when it knows a healthy engine of each side."""
    router, deployment = facts.observed.service.spec.router, facts.observed.deployment
    if deployment is None or deployment.ready_replicas >= router.replicas:
        return None
    if facts.at_zero:
        sides = " and ".join(map(str, facts.at_zero))
        return Violation(Reason.SCALED_TO_ZERO, f"Routers become Ready when {sides} has an instance")
    words = "a router becomes Ready when it knows a healthy engine of each side"
    message = f"{deployment.ready_replicas} of {router.replicas} routers are Ready; {words}"
    return Violation(Reason.ROUTER_NOT_READY, message)


def no_router_serves(facts: ServiceFacts) -> Violation | None:
    """Clients reach no router."""
    observed = facts.observed
    if not observed.service.spec.router.enabled or serving_routers(observed):
        return None
    if not has_router_service(observed):
        return from_faults(facts.all_faults) or Violation(
            Reason.ROUTER_NOT_READY, "The Service of the router is not created yet"
        )
    return router_not_ready(facts)


def routers_not_ready(facts: ServiceFacts) -> Violation | None:
    """Fewer routers can serve than the spec demands, for another cause than a pool that is scaled to 0."""
    violation = router_not_ready(facts)
    return None if violation is not None and violation.reason is Reason.SCALED_TO_ZERO else violation


def is_in_progress(facts: ServiceFacts) -> Violation | None:
    """The plan has steps left. Changes of worker lists that were made and read back are no step any more."""
    progress = facts.plan.progress
    if progress is None:
        return None
    if progress.reason is Reason.ROUTER_LIST_OUTDATED and facts.plan.workers and not facts.unsettled:
        return None
    if progress.reason is Reason.STARTING and facts.at_zero:
        return None
    return Violation(progress.reason, progress.message)


ROUTER_CHAIN: Sequence[Rule[ServiceFacts]] = (
    router_deployment_missing,
    router_pod_trouble,
    router_on_silent_node,
    routers_starting,
)
READY_CHAIN: Sequence[Rule[ServiceFacts]] = (
    being_deleted,
    has_fault,
    pool_missing,
    pools_contradict,
    pools_not_ready,
    routers_not_ready,
    is_in_progress,
)
AVAILABLE_CHAIN: Sequence[Rule[ServiceFacts]] = (
    pools_contradict,
    side_missing,
    scaled_to_zero,
    pools_not_ready,
    no_router_serves,
)


def service_status(facts: ServiceFacts, now: datetime) -> DisaggregatedServiceStatus:
    """Return the status to show now. The earlier status affects transition times and `restartedAt`."""
    service, before = facts.observed.service, facts.observed.service.status
    writer = ConditionWriter(before.conditions, service.metadata.generation, now)
    deployment = facts.observed.deployment
    unready = first_violation(READY_CHAIN, facts)
    return DisaggregatedServiceStatus(
        observed_generation=service.metadata.generation,
        url=router_url(service),
        router_replicas=deployment.ready_replicas if deployment is not None else 0,
        ready=", ".join(_ready_text(side) for side in facts.sides),
        queues=queues_column(facts.diagnoses, with_role=True),
        oldest_waiting_since=oldest_waiting_since(facts.diagnoses, before.oldest_waiting_since),
        restarted_at=restarted_at(service.metadata, before.restarted_at, complete=unready is None),
        conditions=_conditions(facts, writer, unready),
    )


def _conditions(facts: ServiceFacts, writer: ConditionWriter, unready: Violation | None) -> tuple[Condition, ...]:
    router = facts.observed.service.spec.router
    good = Reason.READY if router.enabled else Reason.ROUTER_DISABLED
    ready = "1 router is Ready" if router.replicas == 1 else f"{router.replicas} routers are Ready"
    message = ready if router.enabled else "The service runs no router"
    return (
        *summary(
            writer,
            unavailable=first_violation(AVAILABLE_CHAIN, facts),
            unready=unready,
            ready=_well(facts),
            activity=facts.plan.progress,
        ),
        queues_healthy(writer, facts.diagnoses, unjudged=_unjudged(facts)),
        writer.judge(ConditionType.ROUTER_READY, router_not_ready(facts), good, message),
    )


def _well(facts: ServiceFacts) -> Violation:
    """Reason and message of Ready while all is as the spec says."""
    if facts.at_zero:
        sides = " and ".join(map(str, facts.at_zero))
        return Violation(Reason.SCALED_TO_ZERO, f"All is as the specs say, but {sides} has no instance")
    if facts.plan.update_available:
        return update_available(facts.plan.update_available)
    return Violation(Reason.READY, "All is as the spec says")


def _unjudged(facts: ServiceFacts) -> tuple[str, ...]:
    """Return pools with instances that were not judged since the operator started."""
    judged = {d.subject.role for d in facts.diagnoses}
    return tuple(
        str(side) for side in facts.sides if side.role not in judged and side.pool is not None and side.pool.own
    )


def _ready_text(side: Side) -> str:
    if side.pool is None:
        return f"no {side.role}"
    wanted = side.pool.pool.spec.replicas
    staying = (i for i in side.pool.instances if i.drain_reason != DrainReason.SCALE_DOWN)
    return f"{sum(is_ready(i) for i in staying)}/{wanted} {side.role}"
