"""Which pods are sampled, and how each is asked."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..api.engine import EngineType
from ..api.names import ENGINE_HTTP_PORT, Role
from ..api.pools import Pool
from ..engines import engine_of
from .model import ObservedInstance


@dataclass(frozen=True, slots=True)
class Target:
    """One engine pod to sample. `pool` is its pool's name."""

    namespace: str
    pool: str
    role: Role
    instance: int
    pod_uid: str
    ip: str
    engine: EngineType = EngineType.REFERENCE
    has_connector: bool = True
    """Every rank has pdpool's connector with its admin endpoint."""
    port: int = ENGINE_HTTP_PORT
    """Port of the engine's HTTP endpoints."""
    asks_metrics: bool = False
    """The engine's `/metrics` are read too. Only without a connector."""


def pool_targets(pool: Pool, instances: Iterable[ObservedInstance]) -> list[Target]:
    """Return the pods of a pool that are sampled: those that run, of its own instances."""
    meta, kind = pool.metadata, engine_of(pool.spec.engine.type)
    return [
        Target(
            meta.namespace,
            meta.name,
            pool.role,
            instance.index,
            pod.uid,
            pod.ip,
            kind.type,
            kind.has_connector(pool),
        )
        for instance in instances
        if instance.belongs_to(meta.uid) and (pod := instance.pod) and pod.ip and pod.phase == "Running"
    ]
