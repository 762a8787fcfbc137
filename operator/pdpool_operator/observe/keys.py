"""Maps a changed object to the objects that need a reconcile."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..api import names
from ..api.names import Role
from ..api.operations import PoolOperation
from ..api.pools import POOL_KINDS, DecodePool, PrefillPool
from ..api.services import DisaggregatedService
from .parse import controller

FLEET_PREFIX = "service/"
"""Begins the name of a side that a service only watches, where a pool has its name. No pool can have such a name."""

POOL_KIND_OF_ROLE = {str(kind.role): kind.kind for kind in POOL_KINDS}


@dataclass(frozen=True, order=True, slots=True)
class Key:
    """An object to reconcile."""

    kind: str
    namespace: str
    name: str

    @property
    def to_reconcile(self) -> "Key":
        """The object itself, or the service that watches this side of a fleet."""
        service = self.name.removeprefix(FLEET_PREFIX)
        return self if service == self.name else Key(DisaggregatedService.kind, self.namespace, service)


@dataclass
class Bindings:
    """Which services bind which pools, so that a change of a pool also reconciles its services.

    This is only a hint. Reconciles and events of services keep it up to date. The resync adds missing entries.
    """

    _pools: dict[Key, frozenset[Key]] = field(default_factory=dict)
    _services: dict[Key, dict[Key, None]] = field(default_factory=dict)
    """By pool, in order of their binding."""

    def bind(self, service: Key, prefill: str, decode: str) -> bool:
        """Store the pools of the service; return True if they differ from before."""
        pools = frozenset(
            {Key(PrefillPool.kind, service.namespace, prefill), Key(DecodePool.kind, service.namespace, decode)}
        )
        if self._pools.get(service) == pools:
            return False
        self.drop(service)
        self._pools[service] = pools
        for pool in pools:
            self._services.setdefault(pool, {})[service] = None
        return True

    def drop(self, service: Key) -> None:
        """Remove a service that was deleted."""
        for pool in self._pools.pop(service, ()):
            del self._services[pool][service]
            if not self._services[pool]:
                del self._services[pool]

    def pools(self, service: Key) -> frozenset[Key]:
        """Return the pools of a service."""
        return self._pools.get(service, frozenset())

    def services(self, pool: Key) -> list[Key]:
        """Return the services that bind a pool."""
        return list(self._services.get(pool, ()))

    def partners(self, pool: Key) -> frozenset[Key]:
        """Return the pools of the other role that work with a pool."""
        pools = (partner for service in self.services(pool) for partner in self.pools(service))
        return frozenset(partner for partner in pools if partner.kind != pool.kind)


def keys_of(body: Mapping[str, Any], bindings: Bindings) -> Iterable[Key]:
    """Return the objects that need a reconcile when this one has changed."""
    meta, labels = body["metadata"], body["metadata"].get("labels") or {}
    namespace = meta["namespace"]
    if body.get("kind") == DisaggregatedService.kind:
        key = Key(DisaggregatedService.kind, namespace, meta["name"])
        return {key, *(pool.to_reconcile for pool in bindings.pools(key))}
    if body.get("kind") == PoolOperation.kind:
        return _of_operation(body, bindings)
    if body.get("kind") in (PrefillPool.kind, DecodePool.kind):
        key = Key(body["kind"], namespace, meta["name"])
        return {key, *bindings.services(key)}
    role, pool, service = (labels.get(k) for k in (names.LABEL_ROLE, names.LABEL_POOL, names.LABEL_SERVICE))
    if role == Role.ROUTER and service:
        return {Key(DisaggregatedService.kind, namespace, service)}
    if role in POOL_KIND_OF_ROLE and pool:
        key = Key(POOL_KIND_OF_ROLE[role], namespace, pool)
        return {key, *bindings.services(key)}
    return _of_owner(body, bindings)


def _of_operation(body: Mapping[str, Any], bindings: Bindings) -> Iterable[Key]:
    """Return the pool whose instance an operation names, and the services of the pool: the rotation may change.

    An operation on a node is itself reconciled.
    """
    spec = body.get("spec") or {}
    if spec.get("node"):
        return {Key(PoolOperation.kind, body["metadata"]["namespace"], body["metadata"]["name"])}
    target = names.parse_instance(str(spec.get("instance", "")))
    if target is None:
        return ()
    pool, role, _ = target
    key = Key(POOL_KIND_OF_ROLE[role], body["metadata"]["namespace"], pool)
    return {key, *bindings.services(key)}


def _of_owner(body: Mapping[str, Any], bindings: Bindings) -> Iterable[Key]:
    """Return the objects that need a reconcile when a child has lost labels. Its owner reference names its owner."""
    kind, _, name = controller(body).partition("/")
    key = Key(kind, body["metadata"]["namespace"], name)
    if kind == DisaggregatedService.kind:
        return {key}
    return {key, *bindings.services(key)} if kind in POOL_KIND_OF_ROLE.values() else ()
