"""`/metrics` under SGLang's names: the scheduler's counters, and gauges from its last report."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdpool_reference.scheduler_report import Report

LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank")
"""SGLang's labels for every series."""
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 300)


class Counters:
    """The scheduler's counters, under SGLang's names. The Prometheus client adds `_total`.

    Args:
        registry: where they are registered.
        model_name: the served model.
        engine_type: prefill, decode or unified.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, engine_type: str) -> None:
        values = label_values(model_name, engine_type)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"sglang:{name}", text, LABELS, registry=registry).labels(*values)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"sglang:{name}", text, LABELS, registry=registry, buckets=_SECONDS).labels(*values)

        self.requests = counter("num_requests", "Sequences taken.")
        self.aborted = counter("num_aborted_requests", "Sequences aborted by their client or by /abort_request.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens computed here.")
        self.generated = counter("generation_tokens", "Tokens handed to clients.")
        self.bootstrap_failed = counter("num_bootstrap_failed_reqs", "Hand-offs that failed before the sides had met.")
        self.transfer_failed = counter("num_transfer_failed_reqs", "Hand-offs that failed after the sides had met.")
        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the end.")


def label_values(model_name: str, engine_type: str) -> tuple[str, ...]:
    """Values for LABELS; the scheduler is rank 0's, and counts for all."""
    return (model_name, engine_type, "0", "0", "0")


class Gauges(Collector):
    """The scheduler's last report as gauges. A scheduler that hangs freezes them, as in SGLang.

    Args:
        report: returns the last report.
        model_name: the served model.
    """

    def __init__(self, report: Callable[[], Report], model_name: str) -> None:
        self._report = report
        self._model_name = model_name

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See prometheus_client."""
        report = self._report()
        values = label_values(self._model_name, report.mode)
        for name, value, text in (
            ("num_running_reqs", report.running, "Sequences that compute."),
            ("num_queue_reqs", report.waiting, "Sequences that wait for pages to compute in."),
            ("num_used_tokens", report.used_tokens, "Tokens' worth of cache pages in use."),
            ("token_usage", report.token_usage, "Used share of the cache, 0 to 1."),
            ("num_prefill_bootstrap_queue_reqs", report.prefill_bootstrap, "Wait for a decode engine to offer memory."),
            ("num_prefill_inflight_queue_reqs", report.prefill_inflight, "Computed, being sent."),
            ("num_decode_prealloc_queue_reqs", report.decode_prealloc, "Wait for pages to receive into."),
            ("num_decode_transfer_queue_reqs", report.decode_transfer, "Being received."),
            ("num_decode_deferred_kv_release_reqs", report.held, "Ended, with pages that a peer may still touch."),
        ):
            family = GaugeMetricFamily(f"sglang:{name}", text, labels=LABELS)
            family.add_metric(values, float(value))
            yield family
