"""Reads the current state of a pool or service: from the watched objects, or with `live` from the API server.

A reconcile reads the objects itself, so it does not depend on the event that started it.
"""

import asyncio
import copy
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Protocol

from ..api import names
from ..api.base import Metadata, SpecInvalid
from ..api.key_epochs import KeyEpochs, next_epochs
from ..api.operations import OperationType, PoolOperation
from ..api.pools import DecodePool, Pool, PrefillPool
from ..api.services import DisaggregatedService, RepairMode, RepairSpec
from ..engines import engine_of
from ..plan.drain import with_operations
from ..runtime.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    EVENTS,
    NETWORK_POLICIES,
    OPERATIONS,
    PODS,
    POOL_RESOURCES,
    REPLICA_SETS,
    SERVICES,
    SERVICES_PD,
    STATEFUL_SETS,
    Object,
    Resource,
)
from . import parse
from .fleets import FleetReads
from .http import Unanswered
from .lives import Lives
from .model import ObservedFleet, ObservedInstance, ObservedPod, ObservedPool, ObservedRouter, ObservedService
from .router_pods import own_pods
from .routers import RouterClient
from .sampler import Sampler, pool_targets

log = logging.getLogger(__name__)

EVENTS_AFTER = timedelta(seconds=3)
"""Age from which events are read for a pod that is not Ready, or for an instance without a pod."""
MAX_EVENT_LOOKUPS = 8
SECRET_MISSED_AFTER = timedelta(seconds=10)
"""Age from which a container that is not created yet may lack its Secret, which the operator never reads."""


class Reads(Protocol):
    """Reads objects."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return the object, or None."""

    def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: str = "",
        fields: str = "",
        *,
        metadata_only: bool = False,
    ) -> AsyncIterator[Object]:
        """Yield all objects that match the selectors."""


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
        self._routers = routers
        self._router_key = router_key
        self._key_epoch = key_epoch
        self._now = now
        self._fleets = FleetReads(live, sampler)
        self._has_operations = has_operations
        self._drains: dict[tuple[str, str, str], dict[str, tuple[datetime, datetime]]] = {}
        """By pool, then by UID of the StatefulSet: start of the drain, and when this process first saw it."""

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
        services = await self._services_of(pool)
        listed, routers = await asyncio.gather(
            self._watched(pool), asyncio.gather(*(self._service_routers(meta) for meta, _ in services))
        )
        stuck_after = min((service.spec.stuck_after_seconds for _, service in services if service), default=30)
        # A service that cannot be read may have a router.
        routed = any(service is None or service.spec.router.enabled for _, service in services)
        repair = most_cautious(service.spec.repair if service else RepairSpec() for _, service in services)
        listed = replace(listed, stuck_after_s=stuck_after, routed=routed, repair=repair)
        return _with_routers(listed, [r for some in routers for r in some])

    async def operations(self, kind: type[Pool], namespace: str, name: str) -> tuple[PoolOperation, ...]:
        """Return the operations on instances of a pool, which need not exist, the older ones first.

        None is found while the API server does not serve the kind.
        """
        if not self._has_operations():
            return ()
        found = []
        for body in await self._list(OPERATIONS, namespace):
            operation = parsed_operation(body)
            if operation is None or operation.spec.type is OperationType.FENCE:
                continue
            if (operation.pool_kind, operation.pool_name) == (kind, name):
                found.append(operation)
        return tuple(sorted(found, key=lambda one: (one.metadata.creation_timestamp, one.metadata.name)))

    async def forget_pool(self, namespace: str, name: str, role: names.Role) -> None:
        """Forget a pool that was deleted, and stop sampling its pods."""
        self._drains.pop((namespace, name, role), None)
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
            self._service_routers(service.metadata),
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
        keys = parse.applied_keys(front) if front is not None else None
        if any(self._lacks_volume(router.pod) for router in routers):
            keys = None
        stuck_after = float(service.spec.stuck_after_seconds)
        return ObservedService(
            service=service,
            prefill=prefill and _with_routers(replace(prefill, stuck_after_s=stuck_after), routers),
            decode=decode and _with_routers(replace(decode, stuck_after_s=stuck_after), routers),
            deployment=parse.observed_deployment(deployment, labels) if deployment else None,
            objects=(*seen, *([keys] if keys else [])),
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
        found = await self._list(PODS, namespace, names.selector_string(names.pool_labels(pool, role)))
        return tuple(parse.observed_pod(pod) for pod in found)

    async def _services_of(self, pool: Pool) -> list[tuple[Metadata, DisaggregatedService | None]]:
        """Return the services that bind a pool, and the services that do not fit their model.

        The routers of the latter may list its engines as well.
        """
        found: list[tuple[Metadata, DisaggregatedService | None]] = []
        async for body in self._api.list(SERVICES_PD, pool.metadata.namespace):
            try:
                service = DisaggregatedService.parse(body)
            except SpecInvalid:  # its own status reports it
                found.append((Metadata.model_validate(body["metadata"]), None))
                continue
            if _binds(service, pool):
                found.append((service.metadata, service))
        return found

    async def _pool(self, pool: Pool) -> ObservedPool:
        namespace, name, role = pool.metadata.namespace, pool.metadata.name, pool.role
        shared, labels = names.pool_workload(name, role), names.pool_labels(name, role)
        other = names.Role.DECODE if role is names.Role.PREFILL else names.Role.PREFILL
        stateful_sets, pods, others, *objects = await asyncio.gather(
            self._stateful_sets(pool),
            self._list(PODS, namespace, names.selector_string(names.pool_selector(name, role))),
            self._list(PODS, namespace, names.selector_string(names.engine_selector(other)), metadata_only=True),
            self._api.get(SERVICES, namespace, shared),
            self._api.get(DISRUPTION_BUDGETS, namespace, shared),
            self._api.get(NETWORK_POLICIES, namespace, shared),
        )
        for pod in pods:
            self._lives.note(pod)
        by_owner = {parse.controller_uid(pod): pod for pod in sorted(pods, key=_age)}
        instances = [
            parse.observed_instance(index, sts, by_owner.get(sts["metadata"]["uid"]), labels, self._now())
            for index, sts in stateful_sets
        ]
        instances = await self._with_events(pool, instances, {sts["metadata"]["uid"]: sts for _, sts in stateful_sets})
        operations = await self.operations(type(pool), namespace, name)
        instances = [with_operations(instance, operations) for instance in instances]
        keys = parse.applied_keys(objects[0]) if objects[0] is not None else None
        if any(self._lacks_volume(instance.pod) for instance in instances):
            keys = None
        return ObservedPool(
            pool=pool,
            instances=tuple(sorted(instances, key=lambda instance: instance.index)),
            objects=(
                *(parse.observed_object(obj, labels) for obj in objects if obj is not None),
                *([keys] if keys else []),
            ),
            operations=operations,
            keys=self._next_keys(pool, others),
        )

    async def _watched(self, pool: Pool) -> ObservedPool:
        """Return the pool with the newest samples of its pods, which the sampler samples from now on.

        Only the pool's own reconcile calls this. So the sampler's list and the drains of a pool have one owner.
        """
        observed = await self._pool(pool)
        await self._watch(pool, observed.instances)
        meta = pool.metadata
        key = meta.namespace, meta.name, str(pool.role)
        drains = self._drains[key] = _first_seen(observed.instances, self._drains.get(key, {}), self._now())
        instances = (
            replace(instance, drain_seen=drains[instance.uid][1] if instance.uid in drains else None)
            for instance in observed.instances
        )
        return self._sampled(replace(observed, instances=tuple(instances)))

    def _sampled(self, observed: ObservedPool) -> ObservedPool:
        """Return the pool with the newest samples of its pods."""
        instances = (replace(i, ranks=self._sampler.newest(i.pod.uid) if i.pod else {}) for i in observed.instances)
        return replace(observed, instances=tuple(instances))

    def _next_keys(self, pool: Pool, others: Iterable[Object]) -> KeyEpochs:
        if not engine_of(pool.spec.engine.type).has_connector(pool):
            return KeyEpochs(self._key_epoch)
        return next_epochs(pool.role, self._key_epoch, filter(None, map(parse.key_epochs, others)))

    async def _stateful_sets(self, pool: Pool) -> list[tuple[int, Object]]:
        """Return StatefulSets that the pool owns, that carry its labels, or that occupy a name that it needs.

        A StatefulSet whose labels were removed is still the pool's. So the whole namespace is listed.
        """
        namespace, name, role = pool.metadata.namespace, pool.metadata.name, pool.role
        selector, all_labels = names.pool_selector(name, role), names.pool_labels(name, role)
        indexed = [
            (index, sts)
            for sts in await self._list(STATEFUL_SETS, namespace)
            if (index := _index(sts, name, role)) is not None
        ]
        owned = {
            index: sts
            for index, sts in indexed
            if (owner := parse.controller_uid(sts)) == pool.metadata.uid
            or (not owner and names.has_labels(sts, all_labels))
        }
        present = [sts for sts in owned.values() if "deletionTimestamp" not in sts["metadata"]]
        needed = names.free_indexes(owned, pool.spec.replicas - len(present))
        return [
            (index, sts)
            for index, sts in indexed
            if index in owned or index in needed or names.has_labels(sts, selector)
        ]

    async def _watch(self, pool: Pool, instances: Iterable[ObservedInstance]) -> None:
        meta, targets = pool.metadata, pool_targets(pool, instances)
        await self._sampler.watch(meta.namespace, meta.name, pool.role, targets)

    async def _with_events(
        self, pool: Pool, instances: list[ObservedInstance], bodies: dict[str, Object]
    ) -> list[ObservedInstance]:
        """Read events for pods that are not Ready and for instances without a pod. Only a few are read, and not at
        once.
        """
        silent = [i for i in instances if not i.deleting and self._is_silent(i, bodies[i.uid])][:MAX_EVENT_LOOKUPS]
        explained = await asyncio.gather(*(self._explained(pool, instance) for instance in silent))
        by_uid = {instance.uid: instance for instance in explained}
        return [by_uid.get(instance.uid, instance) for instance in instances]

    def _is_silent(self, instance: ObservedInstance, body: Object) -> bool:
        pod = instance.pod
        born = pod.created_at if pod else parse.moment(body["metadata"]["creationTimestamp"])
        return (pod is None or not pod.ready) and born is not None and self._now() - born > EVENTS_AFTER

    async def _explained(self, pool: Pool, instance: ObservedInstance) -> ObservedInstance:
        """Return the instance with what events say about its pod, or about why it has none."""
        pod, namespace = instance.pod, pool.metadata.namespace
        events = await self._list(EVENTS, namespace, fields=f"regarding.uid={pod.uid if pod else instance.uid}")
        if pod:
            return replace(instance, pod=replace(pod, warnings=parse.warnings(events)))
        refused = parse.warnings(events, "FailedCreate")
        why = await self._occupied(pool, instance) or (refused[0] if refused else "")
        return replace(instance, create_error=why)

    async def _occupied(self, pool: Pool, instance: ObservedInstance) -> str:
        """Return which pod occupies the name of the instance's pod.

        The StatefulSet releases a pod whose labels do not match. It then cannot create its own, and reports nothing.
        """
        name = f"{instance.name}-0"
        selector = names.instance_selector(pool.metadata.name, pool.role, instance.index)
        for pod in await self._list(PODS, pool.metadata.namespace, fields=f"metadata.name={name}"):
            if parse.controller_uid(pod) != instance.uid:
                return parse.occupied(pod, selector)
        return ""

    async def _service_routers(self, meta: Metadata) -> tuple[ObservedRouter, ...]:
        selector = names.selector_string(names.router_selector(meta.name))
        pods, sets, deployment = await asyncio.gather(
            self._list(PODS, meta.namespace, selector),
            self._list(REPLICA_SETS, meta.namespace, selector, metadata_only=True),
            self._api.get(DEPLOYMENTS, meta.namespace, names.router(meta.name)),
        )
        own = map(parse.observed_pod, own_pods(meta.uid, deployment, sets, pods))
        ask = [self._router(pod, self._router_key(meta.namespace, pod.keys.newest)) for pod in own]
        return tuple(await asyncio.gather(*ask))

    async def _router(self, pod: ObservedPod, key: str) -> ObservedRouter:
        if not pod.ip or pod.phase != "Running":
            return ObservedRouter(pod, None, f"pod is {pod.phase}")
        try:
            return ObservedRouter(pod, await self._routers.workers(pod.ip, key))
        except Unanswered as error:
            return ObservedRouter(pod, None, str(error))

    def _lacks_volume(self, pod: ObservedPod | None) -> bool:
        """Whether a container has waited so long that a Secret may be missing."""
        waits = pod is not None and pod.waiting_reason == "ContainerCreating"
        return waits and pod is not None and self._now() - pod.created_at > SECRET_MISSED_AFTER

    async def _list(
        self, resource: Resource, namespace: str, labels: str = "", fields: str = "", *, metadata_only: bool = False
    ) -> list[Object]:
        found = self._api.list(resource, namespace, labels, fields, metadata_only=metadata_only)
        return [obj async for obj in found]


def parsed_operation(body: Object) -> PoolOperation | None:
    """Return an operation, or None for one that does not fit the model: the CRD of another version let it in."""
    try:
        return PoolOperation.parse(body)
    except SpecInvalid as invalid:
        meta = body["metadata"]
        log.warning("PoolOperation %s/%s is left alone: %s", meta["namespace"], meta["name"], invalid)
        return None


def most_cautious(specs: Iterable[RepairSpec]) -> RepairSpec:
    """Return the repair that all services of a pool allow. None is made in a pool without a service."""
    some = tuple(specs)
    order = (RepairMode.OFF, RepairMode.OBSERVE, RepairMode.ENFORCE)
    return RepairSpec(
        mode=min((spec.mode for spec in some), key=order.index, default=RepairMode.OFF),
        restarts_per_hour=min((spec.restarts_per_hour for spec in some), default=0),
    )


def _binds(service: DisaggregatedService, pool: Pool) -> bool:
    side = service.spec.prefill if pool.role is names.Role.PREFILL else service.spec.decode
    return side.pool_ref is not None and side.pool_ref.name == pool.metadata.name


def _first_seen(
    instances: Iterable[ObservedInstance], before: Mapping[str, tuple[datetime, datetime]], now: datetime
) -> dict[str, tuple[datetime, datetime]]:
    """Return when each present drain was first seen, by UID of the StatefulSet, with the start of the drain."""
    drains: dict[str, tuple[datetime, datetime]] = {}
    for instance in instances:
        if (started := instance.drain_started) is not None:
            known = before.get(instance.uid)
            drains[instance.uid] = known if known is not None and known[0] == started else (started, now)
    return drains


def _index(sts: Object, pool: str, role: names.Role) -> int | None:
    """Return the instance's number if the object's name follows our scheme."""
    prefix, name = names.instance(pool, role, 0).removesuffix("0"), str(sts["metadata"]["name"])
    number = name.removeprefix(prefix)
    return int(number) if name.startswith(prefix) and number.isdecimal() and number == str(int(number)) else None


def _age(pod: Object) -> tuple[bool, str]:
    """Sort key for several pods of one instance: the pod that is not terminating comes last, else the newest."""
    return "deletionTimestamp" not in pod["metadata"], pod["metadata"]["creationTimestamp"]


def _with_routers(pool: ObservedPool, routers: Iterable[ObservedRouter]) -> ObservedPool:
    """Add to each instance which routers list it.

    A terminating router accepts requests until it receives SIGTERM, and answers until then. After that it only finishes
    streams, which takes minutes. The operator does not wait for that. A silent router that is not Ready gets no
    requests either, as on a lost node.
    """
    running = [r for r in routers if r.pod.phase == "Running"]
    lists = [
        (r.pod.name, r.workers) for r in running if r.workers is not None or (r.pod.ready and not r.pod.terminating)
    ]

    def listed_by(instance: ObservedInstance) -> tuple[str, ...] | None:
        if any(workers is None for _, workers in lists):
            return None
        ip = instance.pod.ip if instance.pod else None
        url = names.engine_url(ip) if ip else None
        return tuple(name for name, workers in lists if any(worker.url == url for worker in workers or ()))

    return replace(pool, instances=tuple(replace(i, listed_by=listed_by(i)) for i in pool.instances))
