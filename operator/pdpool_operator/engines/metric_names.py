"""Names of the metrics from which the operator judges an engine without pdpool's connector. Pure data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Series:
    """A metric, and the values that one of its labels may have. Without `values`, the label does not matter."""

    metric: str
    label: str = ""
    values: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MetricNames:
    """Metrics of an engine type. Each sequence has aliases of several versions, the newest first.

    The first alias that an answer has is read.
    """

    lengths: Mapping[str, Sequence[Series]]
    """Gauges of the lengths of the hand-off queues, by queue."""
    moved: Mapping[str, Sequence[Series]]
    """Counters of the requests that left a queue for the next one, by queue."""
    running: Sequence[Series]
    waiting: Sequence[Series]
    tokens: Sequence[Series]
    """Counter of the tokens that the rank has computed."""
    finished: Sequence[Series]
    """Counter of the requests that the engine has finished, over all its ranks."""
    lag_s: float
    """Seconds for which an idle engine may leave its gauges as they were."""

    def all(self) -> frozenset[str]:
        """Return the names of all metrics."""
        groups = (*self.lengths.values(), *self.moved.values(), self.running, self.waiting, self.tokens, self.finished)
        return frozenset(series.metric for group in groups for series in group)


def _plain(*metrics: str) -> Sequence[Series]:
    return tuple(Series(f"sglang:{metric}") for metric in metrics)


def _stage(name: str) -> Sequence[Series]:
    return (Series("sglang:per_stage_req_latency_seconds_count", "stage", frozenset({name})),)


SGLANG = MetricNames(
    lengths={
        "prefill_bootstrap": _plain("num_prefill_bootstrap_queue_reqs", "num_prefill_prealloc_queue_reqs"),
        "prefill_inflight": _plain("num_prefill_inflight_queue_reqs", "num_prefill_infight_queue_reqs"),
        "decode_prealloc": _plain("num_decode_prealloc_queue_reqs"),
        "decode_transfer": _plain("num_decode_transfer_queue_reqs"),
    },
    moved={
        "prefill_bootstrap": _stage("prefill_bootstrap"),
        "prefill_inflight": (*_stage("prefill_transfer_kv_cache"), *_plain("kv_transfer_latency_ms_count")),
        "decode_prealloc": _stage("decode_bootstrap"),
        "decode_transfer": _stage("decode_transferred"),
    },
    running=_plain("num_running_reqs"),
    waiting=_plain("num_queue_reqs"),
    tokens=(Series("sglang:realtime_tokens_total", "mode", frozenset({"prefill_compute", "decode"})),),
    finished=_plain("num_requests_total"),
    lag_s=30.0,
)
"""SGLang 0.5.23, from its `python/sglang/srt/observability/metrics_collector.py` and `req_time_stats.py`.

The second gauges are those of `python/sglang/srt/metrics/collector.py` in earlier versions. A stage is counted when a
request leaves its queue for the next one. Gauges change with a batch, and every 30 s while the scheduler is fully idle.
"""
