"""Observes engine pods that something else runs: a service with selectors in place of pools.

Each selected pod is one instance. A side has the shape of a pool, so that one judge serves both.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any, Protocol

from ..api import names
from ..api.base import Metadata
from ..api.engine import EngineType, ModelSpec, TransferConnector
from ..api.pools import MAX_INSTANCES, DecodePool, Pool, PoolSpec, PrefillPool
from ..api.rules import TINY_MODEL
from ..api.services import DisaggregatedService, PoolBinding
from ..runtime.api import PODS, Resource
from . import parse
from .keys import FLEET_PREFIX
from .model import ObservedFleet, ObservedInstance, ObservedPod, ObservedPool
from .sampler import Sampler, Target

Object = dict[str, Any]


class Lists(Protocol):
    """Lists objects of the API server."""

    def list(self, resource: Resource, namespace: str | None, labels: str = "") -> AsyncIterator[Object]:
        """Yield all objects that match the selector."""


class FleetReads:
    """Lists the pods of fleets, and has them sampled."""

    def __init__(self, api: Lists, sampler: Sampler) -> None:
        self._api, self._sampler = api, sampler

    async def observe(self, service: DisaggregatedService) -> ObservedFleet:
        """Return both sides with the newest samples. From now on the sampler samples exactly these pods."""
        spec = service.spec
        pods = await asyncio.gather(self._pods(service, spec.prefill), self._pods(service, spec.decode))
        refusals: list[str] = []
        sides = []
        for kind, binding, some, other in (
            (PrefillPool, spec.prefill, pods[0], pods[1]),
            (DecodePool, spec.decode, pods[1], pods[0]),
        ):
            side = _side(service, kind)
            mine = [pod for pod in some if self._may_watch(side, pod, other, refusals)]
            if len(mine) > MAX_INSTANCES:
                refusals.append(f"{kind.role}.selector selects {len(mine)} pods; only {MAX_INSTANCES} are watched")
            watched = [parse.observed_pod(pod) for pod in mine[:MAX_INSTANCES]]
            await self._sampler.watch(
                service.metadata.namespace, side.metadata.name, side.role, _targets(side, binding, watched)
            )
            sides.append(self._observed(service, side, watched))
        return ObservedFleet(service, sides[0], sides[1], tuple(dict.fromkeys(refusals)))

    async def forget(self, namespace: str, service: str) -> None:
        """Stop sampling the pods of a service that was deleted, or that binds pools now."""
        for role in (names.Role.PREFILL, names.Role.DECODE):
            await self._sampler.watch(namespace, f"{FLEET_PREFIX}{service}", role, ())

    async def _pods(self, service: DisaggregatedService, binding: PoolBinding) -> list[Object]:
        labels = names.selector_string(binding.selector or {})
        found = [pod async for pod in self._api.list(PODS, service.metadata.namespace, labels)]
        # An evicted pod stays as a record beside the pod that took its place.
        there = [pod for pod in found if (pod.get("status") or {}).get("phase") not in {"Succeeded", "Failed"}]
        return sorted(there, key=lambda pod: str(pod["metadata"]["name"]))

    def _may_watch(self, side: Pool, pod: Object, other: Iterable[Object], refusals: list[str]) -> bool:
        """Whether a selected pod is watched as part of this side. The reason goes to `refusals`."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if names.has_labels(pod, {names.LABEL_MANAGED_BY: names.MANAGED_BY}):
            refusals.append(f"{side.role}.selector selects {name}, which pdpool runs; bind its pool by poolRef")
        elif any(one["metadata"]["uid"] == uid for one in other):
            refusals.append(f"prefill.selector and decode.selector both select {name}; add a label that differs")
        elif (known := self._sampler.target(uid)) is not None and (known.pool, known.role) != (
            side.metadata.name,
            side.role,
        ):
            refusals.append(f"{side.role}.selector selects {name}, which {known.pool} already watches; remove one")
        else:
            return True
        return False

    def _observed(self, service: DisaggregatedService, side: Pool, pods: Iterable[ObservedPod]) -> ObservedPool:
        instances = tuple(
            replace(_instance(index, side, pod), ranks=self._sampler.newest(pod.uid)) for index, pod in enumerate(pods)
        )
        spec = side.spec.model_copy(update={"replicas": len(instances)})
        return ObservedPool(
            pool=side.model_copy(update={"spec": spec}),
            instances=instances,
            objects=(),
            stuck_after_s=float(service.spec.stuck_after_seconds),
            watched=True,
            routed=False,
        )


def _side(service: DisaggregatedService, kind: type[Pool]) -> Pool:
    """Return one side in the shape of a pool. Nothing is ever built from it."""
    meta = service.metadata
    return kind(
        metadata=Metadata(name=f"{FLEET_PREFIX}{meta.name}", namespace=meta.namespace, uid=meta.uid),
        spec=PoolSpec(model=ModelSpec(path=TINY_MODEL)),
    )


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
