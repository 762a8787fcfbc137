"""Observes engine pods that something else runs: a service with selectors in place of pools."""

import asyncio

from ..api import names
from ..api.pools import POOL_KINDS
from ..api.services import DisaggregatedService
from ..runtime.resources import PODS, Object
from .fleet_sides import bindings_of, fleet_side
from .keys import FLEET_PREFIX
from .model import ObservedFleet, ObservedPool
from .reads import Reads, listed
from .sampler import Sampler


class FleetReads:
    """Lists the pods of fleets, and has them sampled."""

    def __init__(self, reads: Reads, sampler: Sampler) -> None:
        self._reads, self._sampler = reads, sampler

    async def observe(self, service: DisaggregatedService) -> ObservedFleet:
        """Return both sides with the newest samples. From now on the sampler samples exactly these pods."""
        namespace, bindings = service.metadata.namespace, bindings_of(service)
        pods = await asyncio.gather(*(selected_pods(self._reads, namespace, one.selector) for one in bindings.values()))
        selected = dict(zip(bindings, pods, strict=True))
        sides: list[ObservedPool] = []
        refusals: list[str] = []
        for kind in POOL_KINDS:
            # A pod that has left the first side for the second one is free once the first is watched.
            side = fleet_side(service, kind, selected, self._sampler.target)
            await self._sampler.watch(namespace, side.pool.metadata.name, side.pool.role, side.targets)
            sides.append(side.observed(self._sampler.newest))
            refusals += side.refusals
        return ObservedFleet(service, sides[0], sides[1], tuple(dict.fromkeys(refusals)))

    async def forget(self, namespace: str, service: str) -> None:
        """Stop sampling the pods of a service that was deleted, or that binds pools now."""
        for role in names.ENGINE_ROLES:
            await self._sampler.watch(namespace, f"{FLEET_PREFIX}{service}", role, ())


async def selected_pods(reads: Reads, namespace: str, selector: dict[str, str] | None) -> list[Object]:
    """Return the pods that one side of a service selects."""
    return await listed(reads, PODS, namespace, names.selector_string(selector or {}))
