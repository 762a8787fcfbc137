"""The sides of a service with selectors: which of the selected pods are watched, and how they are sampled. Pure.

Each selected pod is one instance. A side has the shape of a pool, so that one judge serves both.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..api import names
from ..api.base import Metadata
from ..api.engine import EngineType, ModelSpec, TransferConnector
from ..api.names import Role
from ..api.pools import MAX_INSTANCES, Pool, PoolSpec
from ..api.rules import TINY_MODEL
from ..api.services import DisaggregatedService, PoolBinding
from . import parse
from .keys import FLEET_PREFIX
from .model import ObservedInstance, ObservedPod, ObservedPool
from .samples import RankSample
from .targets import Target

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FleetSide:
    """One side of a service that only watches."""

    pool: Pool
    """The side in the shape of a pool. Nothing is ever built from it."""
    pods: tuple[ObservedPod, ...]
    """The pods that are watched."""
    targets: tuple[Target, ...]
    """Those of them that are sampled."""
    refusals: tuple[str, ...]
    """Why selected pods are not watched, as text."""
    stuck_after_s: float

    def observed(self, newest: Callable[[str], Mapping[int, RankSample]]) -> ObservedPool:
        """Return the observation. `newest` returns the newest sample of each rank, by UID of the pod."""
        instances = tuple(
            replace(_instance(index, self.pool, pod), ranks=newest(pod.uid)) for index, pod in enumerate(self.pods)
        )
        spec = self.pool.spec.model_copy(update={"replicas": len(instances)})
        return ObservedPool(
            pool=self.pool.model_copy(update={"spec": spec}),
            instances=instances,
            objects=(),
            stuck_after_s=self.stuck_after_s,
            watched=True,
            routed=False,
        )


def bindings_of(service: DisaggregatedService) -> dict[Role, PoolBinding]:
    """Return both sides of a service, by role."""
    return {Role.PREFILL: service.spec.prefill, Role.DECODE: service.spec.decode}


def fleet_side(
    service: DisaggregatedService,
    kind: type[Pool],
    selected: Mapping[Role, Sequence[Object]],
    known: Callable[[str], Target | None],
) -> FleetSide:
    """Return one side of a service.

    Args:
        service: a service with selectors.
        kind: the kind of pool whose shape the side has.
        selected: the pods that the selector of each role selects, as the API server has them.
        known: returns what is sampled of a pod now, or None, by UID of the pod.
    """
    meta, role = service.metadata, kind.role
    side = kind(
        metadata=Metadata(name=f"{FLEET_PREFIX}{meta.name}", namespace=meta.namespace, uid=meta.uid),
        spec=PoolSpec(model=ModelSpec(path=TINY_MODEL)),
    )
    others = (pod for other, pods in selected.items() if other is not role for pod in pods)
    uids = {str(pod["metadata"]["uid"]) for pod in others}
    checked = [(pod, _refusal(side, pod, uids, known)) for pod in _present(selected[role])]
    refusals = [refusal for _, refusal in checked if refusal]
    free = [pod for pod, refusal in checked if not refusal]
    if len(free) > MAX_INSTANCES:
        refusals.append(f"{role}.selector selects {len(free)} pods; only {MAX_INSTANCES} are watched")
    pods = tuple(parse.observed_pod(pod) for pod in free[:MAX_INSTANCES])
    targets = _targets(side, bindings_of(service)[role], pods)
    return FleetSide(side, pods, tuple(targets), tuple(refusals), float(service.spec.stuck_after_seconds))


def _present(pods: Iterable[Object]) -> list[Object]:
    """Return the pods by name. An evicted pod, which stays as a record beside its successor, is left out."""
    there = (pod for pod in pods if (pod.get("status") or {}).get("phase") not in {"Succeeded", "Failed"})
    return sorted(there, key=lambda pod: str(pod["metadata"]["name"]))


def _refusal(side: Pool, pod: Object, others: Collection[str], known: Callable[[str], Target | None]) -> str:
    """Return why a selected pod is not watched as part of this side, or an empty text.

    `others` has the UIDs of the pods that the other side selects.
    """
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    if names.has_labels(pod, {names.LABEL_MANAGED_BY: names.MANAGED_BY}):
        return f"{side.role}.selector selects {name}, which pdpool runs; bind its pool by poolRef"
    if uid in others:
        return f"prefill.selector and decode.selector both select {name}; add a label that differs"
    target = known(uid)
    if target is not None and (target.pool, target.role) != (side.metadata.name, side.role):
        return f"{side.role}.selector selects {name}, which {target.pool} already watches; remove one"
    return ""


def _targets(side: Pool, binding: PoolBinding, pods: Iterable[ObservedPod]) -> list[Target]:
    meta = side.metadata
    return [
        Target(
            meta.namespace,
            meta.name,
            side.role,
            0,  # the index may change with other pods, and a changed target loses its samples
            pod.uid,
            pod.ip,
            binding.engine or EngineType.SGLANG,
            binding.connector is TransferConnector.PDPOOL,
            binding.port or names.ENGINE_HTTP_PORT,
            asks_metrics=binding.connector is not TransferConnector.PDPOOL,
        )
        for pod in pods
        if pod.ip and pod.phase == "Running"
    ]


def _instance(index: int, side: Pool, pod: ObservedPod) -> ObservedInstance:
    return ObservedInstance(
        index=index,
        name=pod.name,
        uid=pod.uid,
        controller_uid=side.metadata.uid,
        deleting=False,
        spec_hash="",
        build_hash="",
        replicas=1,
        drain_started=None,
        drain_reason="",
        pod=pod,
    )
