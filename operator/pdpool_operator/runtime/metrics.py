"""The operator's own Prometheus metrics."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from .live_metrics import LiveMetrics
from .state_metrics import ObjectStates

FENCE_OUTCOMES = ("given", "refused", "unanswered")


class Metrics:
    """All metrics of one operator process, in their own registry."""

    def __init__(self, live: LiveMetrics) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(live)
        self.states = ObjectStates(time.monotonic)
        self.registry.register(self.states)
        self.reconciles = Counter(
            "pdpool_reconcile",
            "Reconciles by kind of object and outcome (ok, refused, conflict, error).",
            ("kind", "outcome"),
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "pdpool_reconcile_duration_seconds",
            "How long reconciles took.",
            ("kind",),
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=self.registry,
        )
        self.status_writes = Counter(
            "pdpool_status_writes",
            "Writes of a status, by kind of object and outcome (ok, failed).",
            ("kind", "outcome"),
            registry=self.registry,
        )
        self.samples = Counter(
            "pdpool_samples", "Samples of engine ranks.", ("role", "source", "outcome"), registry=self.registry
        )
        self.fences = Counter(
            "pdpool_fences",
            f"Fences sent to engines, by outcome ({', '.join(FENCE_OUTCOMES)}).",
            ("outcome",),
            registry=self.registry,
        )
        for outcome in FENCE_OUTCOMES:
            self.fences.labels(outcome)  # from 0, because `increase()` does not see the first value
        self.repairs = Counter(
            "pdpool_repair_actions",
            "Repairs of instances at fault, by action (purge, restart, replace), outcome (proposed, done, withdrawn).",
            ("namespace", "pool", "role", "action", "outcome"),
            registry=self.registry,
        )
        self.operations = Counter(
            "pdpool_operations",
            "PoolOperations that have ended, by type and outcome (succeeded, failed).",
            ("namespace", "pool", "role", "type", "outcome"),
            registry=self.registry,
        )
        self.calls = Counter(
            "pdpool_api_calls",
            "Calls of the Kubernetes API by verb, resource and HTTP status (0: none).",
            ("verb", "resource", "status"),
            registry=self.registry,
        )
        self.crd_fields_missing = Gauge(
            "pdpool_crd_fields_missing",
            "Fields of this version that the installed CRDs do not have. The log names them.",
            registry=self.registry,
        )
        self.started = Gauge("pdpool_start_time_seconds", "When this process started.", registry=self.registry)
        self.started.set_to_current_time()

    def report_missing_fields(self, fields: list[str]) -> None:
        """Show how many fields the installed CRDs lack."""
        self.crd_fields_missing.set(len(fields))

    def on_call(self, verb: str, plural: str, status: int) -> None:
        """Count a call of the API."""
        self.calls.labels(verb, plural, str(status)).inc()
