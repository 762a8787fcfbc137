"""What a pool gets from the services that bind it: the most cautious of their settings."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..api import names
from ..api.base import Metadata, SpecInvalid
from ..api.pools import Pool
from ..api.services import STUCK_AFTER_S, DisaggregatedService, RepairMode, RepairSpec
from ..runtime.resources import SERVICES_PD
from .model import ObservedPool
from .reads import Reads

BoundService = tuple[Metadata, DisaggregatedService | None]
"""A service that binds a pool. It is None if it does not fit its model: its router may list the pool's engines."""


async def services_of(reads: Reads, pool: Pool) -> list[BoundService]:
    """Return the services that bind a pool, and all services that do not fit their model."""
    found: list[BoundService] = []
    async for body in reads.list(SERVICES_PD, pool.metadata.namespace):
        try:
            service = DisaggregatedService.parse(body)
        except SpecInvalid:  # its own status reports it
            found.append((Metadata.model_validate(body["metadata"]), None))
            continue
        if _binds(service, pool):
            found.append((service.metadata, service))
    return found


def with_settings(pool: ObservedPool, services: Sequence[BoundService]) -> ObservedPool:
    """Return the pool with the settings of its services. A service that cannot be read may have a router."""
    return replace(
        pool,
        stuck_after_s=min(
            (service.spec.stuck_after_seconds for _, service in services if service), default=STUCK_AFTER_S
        ),
        routed=any(service is None or service.spec.router.enabled for _, service in services),
        repair=most_cautious(service.spec.repair if service else RepairSpec() for _, service in services),
    )


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
