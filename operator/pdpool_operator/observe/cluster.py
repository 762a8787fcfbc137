"""Reads the current state of a pool or service: from the watched objects, or with `live` from the API server.

A reconcile reads the objects itself, so it does not depend on the event that started it.
"""

import asyncio
import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime

from ..api import names
from ..api.base import SpecInvalid
from ..api.key_epochs import KeyEpochs, next_epochs
from ..api.operations import PoolOperation
from ..api.pools import DecodePool, Pool, PrefillPool
from ..api.services import DisaggregatedService
from ..engines import engine_of
from ..runtime.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    PODS,
    POOL_RESOURCES,
    SERVICES,
    STATEFUL_SETS,
    Object,
    Resource,
)
from . import parse
from .applied_keys import applied_keys
from .drains_seen import DrainsSeen
from .fleets import FleetReads
from .kept_out import with_operations
from .lives import Lives
from .model import ObservedFleet, ObservedPod, ObservedPool, ObservedService
from .operations import pool_operations
from .pod_events import explained
from .pool_services import services_of, with_settings
from .reads import Reads, listed
from .router_lists import RouterLists, with_routers
from .routers import RouterClient
from .sampler import Sampler
from .stateful_sets import pods_by_owner, pool_stateful_sets
from .targets import pool_targets


class Cluster:
    """Reads the state of pools and services: from `reads`, from routers, and from the sampler's memory.

    `live` reads the same from the API server. A decision that cannot be undone must rest on it.
    """

    def __init__(
        self,
        reads: Reads,
        live: Reads,
        sampler: Sampler,
        routers: RouterClient,
        router_key: Callable[[str, int], str],
        key_epoch: int,
        lives: Lives,
        now: Callable[[], datetime],
        has_operations: Callable[[], bool] = lambda: True,
    ) -> None:
        self._lives = lives
        self._api, self._live = reads, live
        self._sampler = sampler
        self._routers = RouterLists(routers, router_key)
        self._key_epoch = key_epoch
        self._now = now
        self._fleets = FleetReads(live, sampler)
        self._has_operations = has_operations
        self._drains = DrainsSeen()

    @property
    def live(self) -> "Cluster":
        """The same, read from the API server. What is remembered is shared."""
        other = copy.copy(self)
        other._api = self._live
        return other

    @property
    def is_live(self) -> bool:
        """Whether this reads from the API server."""
        return self._api is self._live

    async def body(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return an object as it is stored, or None."""
        return await self._api.get(resource, namespace, name)

    async def pool(self, pool: Pool) -> ObservedPool:
        """Return the pool with its instances, and with the worker lists of its services' routers.

        From now on the sampler samples exactly these pods of the pool.
        """
        services = await services_of(self._api, pool)
        observed, routers = await asyncio.gather(
            self._watched(pool), asyncio.gather(*(self._routers.of(self._api, meta) for meta, _ in services))
        )
        return with_routers(with_settings(observed, services), [r for some in routers for r in some])

    async def operations(self, kind: type[Pool], namespace: str, name: str) -> tuple[PoolOperation, ...]:
        """Return the operations on instances of a pool, which need not exist, the older ones first.

        None is found while the API server does not serve the kind.
        """
        if not self._has_operations():
            return ()
        return await pool_operations(self._api, kind, namespace, name)

    async def forget_pool(self, namespace: str, name: str, role: names.Role) -> None:
        """Forget a pool that was deleted, and stop sampling its pods."""
        self._drains.forget((namespace, name, role))
        await self._sampler.watch(namespace, name, role, ())

    async def service(self, service: DisaggregatedService) -> ObservedService:
        """Return the service with both pools, its router's objects, and the worker list of each router replica.

        Raises:
            SpecInvalid: one of the pools does not fit its model. The message names the pool.
        """
        namespace, router = service.metadata.namespace, names.router(service.metadata.name)
        labels = names.router_labels(service.metadata.name)
        prefill, decode, routers = await asyncio.gather(
            self._side(PrefillPool, namespace, service.spec.prefill.pool_name),
            self._side(DecodePool, namespace, service.spec.decode.pool_name),
            self._routers.of(self._api, service.metadata),
        )
        orphans = {
            role: await self._orphans(namespace, side.pool_name, role)
            for role, side, pool in (
                (names.Role.PREFILL, service.spec.prefill, prefill),
                (names.Role.DECODE, service.spec.decode, decode),
            )
            if pool is None
        }
        deployment, config, front, budget, policy = await asyncio.gather(
            self._api.get(DEPLOYMENTS, namespace, router),
            self._api.get(CONFIG_MAPS, namespace, router),
            self._api.get(SERVICES, namespace, router),
            self._api.get(DISRUPTION_BUDGETS, namespace, router),
            self._api.get(NETWORK_POLICIES, namespace, router),
        )
        seen = [parse.observed_object(obj, labels) for obj in (config, front, budget, policy) if obj is not None]
        keys = applied_keys(front, (router.pod for router in routers), self._now())
        stuck_after = float(service.spec.stuck_after_seconds)
        return ObservedService(
            service=service,
            prefill=prefill and with_routers(replace(prefill, stuck_after_s=stuck_after), routers),
            decode=decode and with_routers(replace(decode, stuck_after_s=stuck_after), routers),
            deployment=parse.observed_deployment(deployment, labels) if deployment else None,
            objects=(*seen, *keys),
            routers=routers,
            orphans=orphans,
            workers_json=(config.get("data") or {}).get(names.WORKERS_KEY) if config else None,
        )

    async def fleet(self, service: DisaggregatedService) -> ObservedFleet:
        """Return both sides of a service that only watches pods. It reads the API server: foreign pods are not watched.

        From now on the sampler samples exactly these pods of the service.
        """
        return await self._fleets.observe(service)

    async def forget_fleet(self, namespace: str, name: str) -> None:
        """Forget a service that watched pods, and stop sampling them."""
        await self._fleets.forget(namespace, name)

    async def _side(self, kind: type[Pool], namespace: str, name: str) -> ObservedPool | None:
        body = await self._api.get(POOL_RESOURCES[kind], namespace, name)
        if body is None:
            return None
        try:
            return self._sampled(await self._pool(kind.parse(body)))
        except SpecInvalid as invalid:
            # This is not the same as no pool: its running engines must stay in rotation.
            raise SpecInvalid(f"{kind.kind} {name}: {invalid}") from invalid

    async def _orphans(self, namespace: str, pool: str, role: names.Role) -> tuple[ObservedPod, ...]:
        """Return the engine pods of a pool that does not exist. `kubectl delete --cascade=orphan` leaves them."""
        found = await listed(self._api, PODS, namespace, names.selector_string(names.pool_labels(pool, role)))
        return tuple(parse.observed_pod(pod) for pod in found)

    async def _pool(self, pool: Pool) -> ObservedPool:
        namespace, name, role = pool.metadata.namespace, pool.metadata.name, pool.role
        shared, labels = names.pool_workload(name, role), names.pool_labels(name, role)
        other = names.Role.DECODE if role is names.Role.PREFILL else names.Role.PREFILL
        stateful_sets, pods, others, *objects = await asyncio.gather(
            listed(self._api, STATEFUL_SETS, namespace),
            listed(self._api, PODS, namespace, names.selector_string(names.pool_selector(name, role))),
            listed(self._api, PODS, namespace, names.selector_string(names.engine_selector(other)), metadata_only=True),
            self._api.get(SERVICES, namespace, shared),
            self._api.get(DISRUPTION_BUDGETS, namespace, shared),
            self._api.get(NETWORK_POLICIES, namespace, shared),
        )
        for pod in pods:
            self._lives.note(pod)
        by_owner, now = pods_by_owner(pods), self._now()
        own = pool_stateful_sets(pool, stateful_sets)
        instances = [
            parse.observed_instance(index, sts, by_owner.get(sts["metadata"]["uid"]), labels, now) for index, sts in own
        ]
        instances = await explained(self._api, pool, instances, {sts["metadata"]["uid"]: sts for _, sts in own}, now)
        operations = await self.operations(type(pool), namespace, name)
        instances = [with_operations(instance, operations) for instance in instances]
        return ObservedPool(
            pool=pool,
            instances=tuple(sorted(instances, key=lambda instance: instance.index)),
            objects=(
                *(parse.observed_object(obj, labels) for obj in objects if obj is not None),
                *applied_keys(objects[0], (instance.pod for instance in instances), self._now()),
            ),
            operations=operations,
            keys=self._next_keys(pool, others),
        )

    async def _watched(self, pool: Pool) -> ObservedPool:
        """Return the pool with the newest samples of its pods, which the sampler samples from now on.

        Only the pool's own reconcile calls this. So the sampler's list and the drains of a pool have one owner.
        """
        observed = await self._pool(pool)
        meta, targets = pool.metadata, pool_targets(pool, observed.instances)
        await self._sampler.watch(meta.namespace, meta.name, pool.role, targets)
        return self._sampled(self._drains.note(observed, self._now()))

    def _sampled(self, observed: ObservedPool) -> ObservedPool:
        """Return the pool with the newest samples of its pods."""
        instances = (replace(i, ranks=self._sampler.newest(i.pod.uid) if i.pod else {}) for i in observed.instances)
        return replace(observed, instances=tuple(instances))

    def _next_keys(self, pool: Pool, others: Iterable[Object]) -> KeyEpochs:
        if not engine_of(pool.spec.engine.type).has_connector(pool):
            return KeyEpochs(self._key_epoch)
        return next_epochs(pool.role, self._key_epoch, filter(None, map(parse.key_epochs, others)))
