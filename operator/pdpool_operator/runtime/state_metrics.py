"""Metrics about the objects that the operator reconciles, as of their last reconcile.

Each scrape computes the series from the present state. So a condition that changes leaves no old series behind, and a
deleted object has none.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .object_key import ObjectKey

OBJECT_LABELS = ("kind", "namespace", "name")
POOL_LABELS = ("namespace", "pool", "role")
SERVICE_LABELS = ("namespace", "service", "part")


class ShownCondition(Protocol):
    """Fields of a condition that become labels."""

    @property
    def type(self) -> str:
        """Type of the condition."""

    @property
    def status(self) -> str:
        """`True`, `False` or `Unknown`."""

    @property
    def reason(self) -> str:
        """From the fixed set of reasons."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Numbers of instances of one pool."""

    role: str
    wanted: int
    ready: int
    available: int
    """Those that serve requests, as the condition Available counts them."""
    updated: int
    repair_budget: int | None = None
    """Restarts that repair may still make. `None` unless the mode of repair is Enforce."""


@dataclass(frozen=True, slots=True)
class Serving:
    """One part of a service: its prefill instances, its decode instances, or its routers."""

    wanted: int
    serving: int


@dataclass(eq=False)
class ObjectStates(Collector):
    """The newest state of each object, and its metrics. `clock` is monotonic, in seconds."""

    clock: Callable[[], float]
    _conditions: dict[tuple[str, str, str], tuple[tuple[str, str, str], ...]] = field(default_factory=dict)
    """Type, status and reason of the conditions, by OBJECT_LABELS."""
    _pools: dict[tuple[str, str, str], PoolCounts] = field(default_factory=dict)
    _services: dict[tuple[str, str, str], Mapping[str, Serving]] = field(default_factory=dict)
    _failing_since: dict[tuple[str, str, str], float] = field(default_factory=dict)

    def show_conditions(self, key: ObjectKey, conditions: Iterable[ShownCondition]) -> None:
        """Replace the conditions of an object."""
        self._conditions[_labels(key)] = tuple((c.type, str(c.status), str(c.reason)) for c in conditions)

    def show_pool(self, key: ObjectKey, counts: PoolCounts) -> None:
        """Replace the numbers of a pool."""
        self._pools[_labels(key)] = counts

    def show_service(self, key: ObjectKey, parts: Mapping[str, Serving]) -> None:
        """Replace the parts of a service. A service without routers has no part `router`."""
        self._services[_labels(key)] = parts

    def reconciled(self, key: ObjectKey, outcome: str) -> None:
        """Note how a reconcile ended.

        Errors begin or continue a failure. Another writer that was faster (`conflict`) changes nothing.
        """
        if outcome == "error":
            self._failing_since.setdefault(_labels(key), self.clock())
        elif outcome != "conflict":
            self._failing_since.pop(_labels(key), None)

    def drop(self, key: ObjectKey) -> None:
        """Forget an object that was deleted."""
        for state in (self._conditions, self._pools, self._services, self._failing_since):
            state.pop(_labels(key), None)

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families one by one."""
        yield from self._of_pools()
        yield from self._of_services()
        condition = GaugeMetricFamily(
            "pdpool_condition",
            "1 for the current status and reason of each condition of an object.",
            labels=(*OBJECT_LABELS, "type", "status", "reason"),
        )
        for labels, conditions in self._conditions.items():
            for one in conditions:
                condition.add_metric((*labels, *one), 1)
        failing = GaugeMetricFamily(
            "pdpool_reconcile_failing_seconds",
            "Time since the first of the failed reconciles in a row; absent after a success.",
            labels=OBJECT_LABELS,
        )
        for labels, since in self._failing_since.items():
            failing.add_metric(labels, self.clock() - since)
        yield from (condition, failing)

    def _of_pools(self) -> Iterator[Metric]:
        meanings = {
            "wanted": "Instances that the spec asks for.",
            "ready": "Instances that are Ready.",
            "available": "Instances that serve requests.",
            "updated": "Instances that run the current spec.",
        }
        for name, meaning in meanings.items():
            family = GaugeMetricFamily(f"pdpool_pool_{name}", meaning, labels=POOL_LABELS)
            for (_, namespace, pool), counts in self._pools.items():
                family.add_metric((namespace, pool, counts.role), getattr(counts, name))
            yield family
        budget = GaugeMetricFamily(
            "pdpool_repair_budget_remaining",
            "Restarts that repair may still make within the hour; absent unless its mode is Enforce.",
            labels=POOL_LABELS,
        )
        for (_, namespace, pool), counts in self._pools.items():
            if counts.repair_budget is not None:
                budget.add_metric((namespace, pool, counts.role), counts.repair_budget)
        yield budget

    def _of_services(self) -> Iterator[Metric]:
        wanted = GaugeMetricFamily(
            "pdpool_service_wanted", "Instances or routers that a part of a service should have.", labels=SERVICE_LABELS
        )
        serving = GaugeMetricFamily(
            "pdpool_service_serving", "Those of them that can serve requests now.", labels=SERVICE_LABELS
        )
        for (_, namespace, service), parts in self._services.items():
            for part, numbers in parts.items():
                wanted.add_metric((namespace, service, part), numbers.wanted)
                serving.add_metric((namespace, service, part), numbers.serving)
        yield from (wanted, serving)


def _labels(key: ObjectKey) -> tuple[str, str, str]:
    return key.kind, key.namespace, key.name
