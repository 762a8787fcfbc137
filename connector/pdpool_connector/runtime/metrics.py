"""A connector's state as Prometheus metrics and as JSON, both made from one snapshot at each request."""

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pdpool_connector.runtime.stats import ConnectorStats

PREFIX = "pdpool_connector_"


class ConnectorCollector(Collector):
    """Register it with a `CollectorRegistry`; it reads the snapshots, of one rank or of several, at each scrape."""

    def __init__(self, stats: Callable[[], Iterable[ConnectorStats]]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        """Nothing: names and labels are known at a scrape only."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All metrics of these connectors; each series has the label `rank`."""
        families: dict[str, Metric] = {}
        for stats in self._stats():
            for metric in _metrics(stats):
                for sample in metric.samples:
                    sample.labels["rank"] = str(stats.rank)
                if metric is not (family := families.setdefault(metric.name, metric)):
                    family.samples += metric.samples
        return families.values()


def state_json(stats: ConnectorStats) -> bytes:
    """The body of `GET /v1/state`."""
    document = {"version": 1} | {
        name: value for name, value in msgspec.to_builtins(stats).items() if name not in ("releases", "flights_lost")
    }
    return msgspec.json.encode(document)


def _metrics(stats: ConnectorStats) -> Iterable[Metric]:
    yield from _attempts(stats)
    yield from _gauges(stats)
    yield _counter("ended", "Hand-offs that have ended, by outcome.", "outcome", stats.outcomes)
    yield _release_times(stats)
    yield _counter("failures", "Hand-offs that have failed, by root cause.", "cause", stats.causes)
    yield _counter("drops", "Frames that changed nothing, by reason.", "reason", stats.drops)
    yield _counter("checksums", "Hand-offs whose pages were sampled, by outcome.", "outcome", stats.checksums)
    yield _counter("flights_lost", "Failed hand-offs without a flight record.", "reason", stats.flights_lost)
    moved = CounterMetricFamily(PREFIX + "bytes_moved", "Bytes of KV cache known to have landed.")
    moved.add_metric([], stats.bytes_moved_total)
    yield moved
    faults = CounterMetricFamily(PREFIX + "faults", "Faults inside the connector; each is logged. Stays 0.")
    faults.add_metric([], stats.faults)
    yield faults
    yield _transports(stats)


def _transports(stats: ConnectorStats) -> Metric:
    family = InfoMetricFamily(
        PREFIX + "transport", "Transfer backend and transports in use; one series for each transport."
    )
    for backend, transport in sorted({(peer.backend, peer.transport) for peer in stats.peers}) or [(stats.backend, "")]:
        family.add_metric([], {"backend": backend, "transport": transport})
    return family


def _attempts(stats: ConnectorStats) -> Iterable[Metric]:
    live = GaugeMetricFamily(PREFIX + "attempts", "Hand-offs in each state.", labels=["state"])
    oldest = GaugeMetricFamily(
        PREFIX + "attempt_oldest_seconds",
        "Time that the oldest hand-off has been in it; 0: none.",
        labels=["state"],
    )
    for state, queue in stats.attempts.items():
        live.add_metric([state], queue.reqs)
        oldest.add_metric([state], queue.oldest_s or 0.0)
    yield live
    yield oldest


def _release_times(stats: ConnectorStats) -> HistogramMetricFamily:
    """Prometheus counts cumulatively, and ends with +Inf."""
    releases = stats.releases
    running = list(accumulate(releases.counts))
    buckets = [(str(bound), float(count)) for bound, count in zip((*releases.bounds, "+Inf"), running, strict=True)]
    family = HistogramMetricFamily(
        PREFIX + "release_seconds", "Time from a hand-off's failure or abort to the release of its pages."
    )
    family.add_metric([], buckets, releases.total)
    return family


def _gauges(stats: ConnectorStats) -> Iterable[Metric]:
    for name, help_text, value in (
        ("holds", "Failed hand-offs whose pages a peer may still touch.", stats.holds),
        ("held_bytes", "Memory that they keep back: pages, items of state, aux rows.", stats.held_bytes),
        ("held_oldest_seconds", "Age of the oldest of them; 0: none.", stats.held_oldest_s or 0.0),
        (
            "loop_lag_seconds",
            "Longest recent turn of the loop, or how long it is stuck.",
            stats.loop_lag_s,
        ),
        ("peers", "Paired processes.", len(stats.peers)),
        (
            "link_failing_seconds",
            "Time for which the instance that is longest out of reach has been so; 0: all are in reach.",
            max((link.failing_s or 0.0 for link in stats.links), default=0.0),
        ),
        ("tombstones", "Ended attempts that are remembered for late frames.", stats.tombstones),
        ("draining", "1 when no new work is taken.", int(stats.draining)),
    ):
        yield GaugeMetricFamily(PREFIX + name, help_text, value=value)


def _counter(name: str, help_text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, help_text, labels=[label])
    for key, count in sorted(counts.items()):
        family.add_metric([key], count)
    return family
