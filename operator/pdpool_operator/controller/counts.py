"""What the metrics of an object show: how many of its parts are wanted, and how many serve."""

from collections.abc import Iterable

from ..api.names import Role
from ..api.pools import PoolStatus
from ..api.services import RepairMode
from ..diagnose.model import Diagnosis
from ..observe.model import ObservedFleet, ObservedPool, ObservedService
from ..plan.repair_model import RepairPlan
from ..runtime.state_metrics import PoolCounts, Serving
from ..status.serving import serving, serving_routers


def pool_counts(
    observed: ObservedPool, diagnoses: Iterable[Diagnosis], status: PoolStatus, repair: RepairPlan
) -> PoolCounts:
    """Return the counts of a pool. There is no budget of repairs unless the mode is Enforce: only then repair acts."""
    return PoolCounts(
        role=str(observed.pool.role),
        wanted=observed.pool.spec.replicas,
        ready=status.ready_replicas,
        available=len(serving(observed, diagnoses)),
        updated=status.updated_replicas,
        repair_budget=repair.remaining if observed.repair.mode is RepairMode.ENFORCE else None,
    )


def service_parts(observed: ObservedService, diagnoses: Iterable[Diagnosis]) -> dict[str, Serving]:
    """Return how many of each part of a service serve. A pool that does not exist is wanted."""
    router = observed.service.spec.router
    diagnoses = tuple(diagnoses)
    sides = {Role.PREFILL: observed.prefill, Role.DECODE: observed.decode}
    parts = {
        str(role): Serving(pool.pool.spec.replicas, len(serving(pool, diagnoses)))
        if pool is not None
        else Serving(1, observed.serving_orphans(role))
        for role, pool in sides.items()
    }
    if router.enabled:
        parts["router"] = Serving(router.replicas, serving_routers(observed))
    return parts


def fleet_parts(observed: ObservedFleet, diagnoses: tuple[Diagnosis, ...]) -> dict[str, Serving]:
    """Return how many selected pods of each side there are, and how many serve. A side should have one at least."""
    return {
        str(side.pool.role): Serving(max(1, len(side.instances)), len(serving(side, diagnoses)))
        for side in observed.sides
    }
