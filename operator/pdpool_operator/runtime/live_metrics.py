"""Metrics of things that may vanish: an instance, a rank, a queue.

They are not kept in metric objects. Each scrape computes them from the present state, so no series outlives its object.
Absent means unknown, never zero.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

INSTANCE_LABELS = ("namespace", "pool", "role", "instance")
RANK_LABELS = (*INSTANCE_LABELS, "rank")
QUEUE_LABELS = (*RANK_LABELS, "queue")
DEMAND_LABELS = ("namespace", "pool", "role", "queue")


@dataclass(frozen=True, slots=True)
class QueueReading:
    """Last sample of one hand-off queue of one rank. Fields that are None are left out."""

    labels: tuple[str, str, str, str, str, str]
    """Values of QUEUE_LABELS."""
    reqs: int
    oldest_s: float | None
    moved_total: int | None
    leaked: int | None = None
    """Requests that the engine keeps although their hand-offs have ended. `None` if it does not show the queue."""


@dataclass(frozen=True, slots=True)
class HoldReading:
    """Memory that one rank held at its last sample."""

    labels: tuple[str, str, str, str, str]
    """Values of RANK_LABELS."""
    held_bytes: int
    oldest_s: float
    """Age of the oldest hold in seconds. 0 means that nothing is held."""


@dataclass(frozen=True, slots=True)
class DemandReading:
    """One hand-off queue of one pool, for autoscalers."""

    labels: tuple[str, str, str, str]
    """Values of DEMAND_LABELS."""
    reqs: int
    oldest_s: float | None
    """Age of the oldest request in seconds, 0 if none waits. `None` if it is not known."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LiveMetrics(Collector):
    """Turns the present state into metric families, as these functions return it."""

    queues: Callable[[], Iterable[QueueReading]]
    holds: Callable[[], Iterable[HoldReading]]
    verdicts: Callable[[], Mapping[tuple[str, str, str, str], str]]
    """Verdict by the values of INSTANCE_LABELS."""
    rotation: Callable[[], Mapping[tuple[str, str, str, str], bool]]
    """Whether routers should list the instance, by the same."""
    demands: Callable[[], Iterable[DemandReading]]
    leading: Callable[[], bool]
    waiting_keys: Callable[[], int]

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families one by one."""
        yield from self._of_queues()
        yield from self._of_holds()
        yield from self._of_demands()
        verdict = GaugeMetricFamily(
            "pdpool_instance_verdict", "1 for the current verdict.", labels=(*INSTANCE_LABELS, "verdict")
        )
        for labels, word in self.verdicts().items():
            verdict.add_metric((*labels, word), 1)
        rotation = GaugeMetricFamily(
            "pdpool_instance_in_rotation", "1 if routers should list the instance, else 0.", labels=INSTANCE_LABELS
        )
        for labels, listed in self.rotation().items():
            rotation.add_metric(labels, float(listed))
        leader = GaugeMetricFamily("pdpool_leader", "1 while this process is the leader.")
        leader.add_metric((), float(self.leading()))
        keys = GaugeMetricFamily("pdpool_reconcile_waiting", "Objects that wait for a reconcile.")
        keys.add_metric((), self.waiting_keys())
        yield from (verdict, rotation, leader, keys)

    def _of_queues(self) -> Iterator[Metric]:
        reqs = GaugeMetricFamily("pdpool_queue_reqs", "Requests in a hand-off queue.", labels=QUEUE_LABELS)
        oldest = GaugeMetricFamily(
            "pdpool_queue_oldest_seconds",
            "Age of the oldest request in a hand-off queue; absent when none waits.",
            labels=QUEUE_LABELS,
        )
        moved = CounterMetricFamily(
            "pdpool_queue_moved",
            "Requests that moved on from a hand-off queue. The engine's connector counts them from its start.",
            labels=QUEUE_LABELS,
        )
        leaked = GaugeMetricFamily(
            "pdpool_queue_leaked_reqs",
            "Requests that an engine keeps in a hand-off queue although their hand-offs have ended.",
            labels=QUEUE_LABELS,
        )
        for reading in self.queues():
            reqs.add_metric(reading.labels, reading.reqs)
            if reading.oldest_s is not None:
                oldest.add_metric(reading.labels, reading.oldest_s)
            if reading.moved_total is not None:
                moved.add_metric(reading.labels, reading.moved_total)
            if reading.leaked is not None:
                leaked.add_metric(reading.labels, reading.leaked)
        yield from (reqs, oldest, moved, leaked)

    def _of_demands(self) -> Iterator[Metric]:
        reqs = GaugeMetricFamily(
            "pdpool_scaling_queue_reqs",
            "Requests in a hand-off queue of a pool; absent while more instances would not help.",
            labels=DEMAND_LABELS,
        )
        oldest = GaugeMetricFamily(
            "pdpool_scaling_queue_oldest_seconds",
            "Age of the oldest of these requests, 0: none; absent while more instances would not help.",
            labels=DEMAND_LABELS,
        )
        for reading in self.demands():
            reqs.add_metric(reading.labels, reading.reqs)
            if reading.oldest_s is not None:
                oldest.add_metric(reading.labels, reading.oldest_s)
        yield from (reqs, oldest)

    def _of_holds(self) -> Iterator[Metric]:
        held = GaugeMetricFamily("pdpool_held_bytes", "Memory that a rank holds for lost peers.", labels=RANK_LABELS)
        oldest = GaugeMetricFamily(
            "pdpool_held_oldest_seconds", "Age of the oldest hold of a rank; 0: none.", labels=RANK_LABELS
        )
        for reading in self.holds():
            held.add_metric(reading.labels, reading.held_bytes)
            oldest.add_metric(reading.labels, reading.oldest_s)
        yield from (held, oldest)
