"""Which instances and routers serve requests."""

from collections.abc import Iterable, Sequence

from ..diagnose.model import Diagnosis, Verdict
from ..observe.model import ObservedInstance, ObservedPod, ObservedPool, ObservedService

CANNOT_SERVE = {
    Verdict.STUCK: "stuck",
    Verdict.FAILING: "fails requests",
    Verdict.NOTHING_FINISHES: "finishes no request",
}
"""Verdicts by which an instance serves nothing, although its pod may be Ready, in words for messages."""


def cannot_serve(diagnosis: Diagnosis) -> bool:
    """Whether an instance serves nothing, or must not serve, although its pod may be Ready."""
    return diagnosis.verdict in CANNOT_SERVE or bool(diagnosis.unfit)


def is_ready(instance: ObservedInstance) -> bool:
    """Whether Kubernetes counts the instance's pod as Ready."""
    return instance.pod is not None and instance.pod.takes_requests


def serving(observed: ObservedPool, diagnoses: Iterable[Diagnosis]) -> tuple[ObservedInstance, ...]:
    """Return the instances of a pool that serve requests. `diagnoses` may hold those of other pools.

    A pod that only a silent node makes not Ready serves while its engine answers.
    """
    pool = observed.pool
    broken = {
        d.subject.index
        for d in diagnoses
        if (d.subject.pool, d.subject.role) == (pool.metadata.name, pool.role) and cannot_serve(d)
    }
    return tuple(instance for instance in observed.own if instance.index not in broken and _in_service(instance))


def serving_routers(observed: ObservedService) -> int:
    """Return how many routers of a service serve: those that are Ready, if there is a Service that lists them.

    A router on a silent node does not serve, even if it answers the operator. Kubernetes counts it as not Ready and
    takes it out of its Service, so clients do not reach it. An engine there may serve: routers connect to its address.
    """
    deployment = observed.deployment
    return deployment.ready_replicas if deployment is not None and has_router_service(observed) else 0


def has_router_service(observed: ObservedService) -> bool:
    """Whether the Service exists through which clients reach the routers."""
    uid = observed.service.metadata.uid
    return any(o.kind == "Service" and (o.controller_uid == uid or o.labelled) for o in observed.objects)


def fallen(instance: ObservedInstance, diagnoses: Sequence[Diagnosis]) -> bool:
    """Whether an instance that is not Ready served before, so that it is not just starting."""
    broken = any(d.subject.index == instance.index and cannot_serve(d) for d in diagnoses)
    return broken or (instance.pod is not None and instance.pod.was_ready and not instance.pod.terminating)


def silent_nodes(pods: Iterable[ObservedPod | None]) -> tuple[str, ...]:
    """Return the nodes whose kubelet does not report, of pods that do not terminate."""
    return tuple(sorted({pod.node for pod in pods if pod is not None and pod.node_silent and not pod.terminating}))


def _in_service(instance: ObservedInstance) -> bool:
    pod = instance.pod
    if pod is None or pod.terminating or instance.deleting or instance.drain_started is not None:
        return False
    return pod.ready or (pod.node_silent and _answers(instance))


def _answers(instance: ObservedInstance) -> bool:
    """Whether the engine answered the newest sample."""
    return any(sample.connector is not None or sample.engine is not None for sample in instance.ranks.values())
