"""Services and pools with the status that the operator has written, read in one go."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from pdpool_operator.api.base import Condition, ConditionStatus
from pdpool_operator.api.condition_docs import NEEDS_PERSON
from pdpool_operator.api.names import ENGINE_ROLES, Role
from pdpool_operator.api.pools import POOL_KINDS, PoolStatus
from pdpool_operator.api.reasons import ConditionType, Reason
from pdpool_operator.api.services import DisaggregatedService, DisaggregatedServiceStatus
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.api_errors import NotFoundError
from pdpool_operator.runtime.resources import POOL_RESOURCES, SERVICES_PD, Object
from pydantic import ValidationError

Status = TypeVar("Status", PoolStatus, DisaggregatedServiceStatus)

_FALSE_IS_BAD = frozenset(
    {
        ConditionType.QUEUES_HEALTHY,
        ConditionType.HOLDS_PROVABLE,
        ConditionType.TRANSFER_READY,
        ConditionType.ROUTER_READY,
    }
)


class NotInstalledError(Exception):
    """The API server does not serve pdpool's kinds."""


class MissingError(Exception):
    """There is no service or pool of the name that was asked for."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool as its status shows it."""

    kind: str
    role: Role
    namespace: str
    name: str
    generation: int
    wanted: int
    """Instances that the spec asks for."""
    status: PoolStatus

    def to_dict(self) -> Object:
        """Return what `-o json` prints."""
        return {
            "kind": self.kind,
            "namespace": self.namespace,
            "name": self.name,
            "generation": self.generation,
            "replicas": self.wanted,
            "needsAttention": needs_attention(self),
            "status": self.status.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class ServiceView:
    """One service as its status shows it, with the pools that it binds, prefill first. A missing pool is left out."""

    namespace: str
    name: str
    generation: int
    pools: tuple[PoolView, ...]
    status: DisaggregatedServiceStatus
    kind: str = DisaggregatedService.kind

    def to_dict(self) -> Object:
        """Return what `-o json` prints."""
        return {
            "kind": self.kind,
            "namespace": self.namespace,
            "name": self.name,
            "generation": self.generation,
            "needsAttention": needs_attention(self),
            "status": self.status.to_dict(),
            "pools": [pool.to_dict() for pool in self.pools],
        }


View = PoolView | ServiceView


@dataclass(frozen=True, slots=True)
class Fleet:
    """Services by name, and the pools that no service binds."""

    services: tuple[ServiceView, ...]
    pools: tuple[PoolView, ...]

    def views(self) -> Iterator[View]:
        """Yield each service, followed by its pools, then the other pools."""
        for service in self.services:
            yield service
            yield from service.pools
        yield from self.pools

    @property
    def needs_attention(self) -> bool:
        """Whether a person should look at one of them."""
        return any(map(needs_attention, self.views()))

    def named(self, name: str) -> "Fleet":
        """Return only the services and pools of this name.

        Raises:
            MissingError: there are none.
        """
        services = tuple(service for service in self.services if service.name == name)
        bound = {id(pool) for service in services for pool in service.pools}
        pools = tuple(v for v in self.views() if isinstance(v, PoolView) and v.name == name and id(v) not in bound)
        if not services and not pools:
            known = ", ".join(sorted({view.name for view in self.views()})) or "none at all"
            raise MissingError(f"no service or pool is named {name}; there is {known}")
        return Fleet(services, pools)

    def to_dict(self) -> Object:
        """Return what `-o json` prints."""
        return {
            "services": [service.to_dict() for service in self.services],
            "pools": [pool.to_dict() for pool in self.pools],
        }


def needs_attention(view: View) -> bool:
    """Whether a person should look: a condition calls for it, or there is no status, as while no operator runs."""
    return bool(attention(view)) or not view.status.conditions


def attention(view: View) -> tuple[Condition, ...]:
    """Return the conditions for which a person should look. Work in progress is none of them."""
    return tuple(c for c in view.status.conditions if _needs_attention(c))


def _needs_attention(condition: Condition) -> bool:
    match condition.type:
        case ConditionType.STALLED | ConditionType.REPAIR_STOPPED | ConditionType.PEERS_UNREACHABLE:
            return condition.status is ConditionStatus.TRUE
        case ConditionType.AVAILABLE:
            return condition.status is not ConditionStatus.TRUE and condition.reason != Reason.SCALED_TO_ZERO
        case ConditionType.READY:
            return condition.status is ConditionStatus.FALSE and condition.reason in NEEDS_PERSON
        case kind if kind in _FALSE_IS_BAD:
            return condition.status is ConditionStatus.FALSE or condition.reason == Reason.QUEUES_UNKNOWN
    return False


async def read_fleet(api: Api, namespace: str | None) -> Fleet:
    """Read all services and pools of a namespace, or of the cluster.

    Raises:
        NotInstalledError: the CRDs are not installed.
        ApiError: the API server refuses, or does not answer.
    """
    try:
        pools = [
            _pool(kind.kind, kind.role, body)
            for kind in POOL_KINDS
            async for body in api.list(POOL_RESOURCES[kind], namespace)
        ]
        services = [_service(body, pools) async for body in api.list(SERVICES_PD, namespace)]
    except NotFoundError as error:
        raise NotInstalledError("the API server does not know pdpool's kinds: install the chart first") from error
    bound = {id(pool) for service in services for pool in service.pools}
    return Fleet(
        tuple(sorted(services, key=lambda service: (service.namespace, service.name))),
        tuple(
            sorted(
                (pool for pool in pools if id(pool) not in bound),
                key=lambda pool: (pool.namespace, pool.name, pool.role is Role.DECODE),
            )
        ),
    )


def _pool(kind: str, role: Role, body: Object) -> PoolView:
    meta = body["metadata"]
    return PoolView(
        kind=kind,
        role=role,
        namespace=meta["namespace"],
        name=meta["name"],
        generation=int(meta.get("generation", 0)),
        wanted=int((body.get("spec") or {}).get("replicas", 1)),
        status=_status(PoolStatus, body),
    )


def _service(body: Object, pools: list[PoolView]) -> ServiceView:
    meta, spec = body["metadata"], body.get("spec") or {}
    wanted = [(role, ((spec.get(str(role)) or {}).get("poolRef") or {}).get("name")) for role in ENGINE_ROLES]
    return ServiceView(
        namespace=meta["namespace"],
        name=meta["name"],
        generation=int(meta.get("generation", 0)),
        pools=tuple(
            pool
            for role, name in wanted
            for pool in pools
            if (pool.namespace, pool.role, pool.name) == (meta["namespace"], role, name)
        ),
        status=_status(DisaggregatedServiceStatus, body),
    )


def _status(kind: type[Status], body: Object) -> Status:
    """Parse a status. One that does not fit was written by another version, and counts as not written."""
    try:
        return kind.model_validate(body.get("status") or {})
    except ValidationError:
        return kind()
