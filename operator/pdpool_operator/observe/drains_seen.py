"""Remembers when this process first saw each drain: samples are stamped by the same clock, drains by another's."""

from dataclasses import replace
from datetime import datetime

from .model import ObservedPool

PoolKey = tuple[str, str, str]
"""Namespace, name and role of a pool."""


class DrainsSeen:
    """The drains of each pool. Only the pool's own reconcile notes them."""

    def __init__(self) -> None:
        self._drains: dict[PoolKey, dict[str, tuple[datetime, datetime]]] = {}
        """By pool, then by UID of the StatefulSet: start of the drain, and when it was first seen."""

    def note(self, observed: ObservedPool, now: datetime) -> ObservedPool:
        """Return the pool with the time at which each of its drains was first seen. Drains that ended are forgotten."""
        meta = observed.pool.metadata
        key = meta.namespace, meta.name, str(observed.pool.role)
        before = self._drains.get(key, {})
        drains: dict[str, tuple[datetime, datetime]] = {}
        for instance in observed.instances:
            if (started := instance.drain_started) is not None:
                known, seen = before.get(instance.uid, (None, now))
                drains[instance.uid] = started, seen if known == started else now
        self._drains[key] = drains
        seen_at = {uid: seen for uid, (_, seen) in drains.items()}
        return replace(observed, instances=tuple(replace(i, drain_seen=seen_at.get(i.uid)) for i in observed.instances))

    def forget(self, key: PoolKey) -> None:
        """Forget a pool that was deleted."""
        self._drains.pop(key, None)
