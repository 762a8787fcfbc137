"""Metrics of an operator that has nothing to observe."""

from pdpool_operator.runtime.live_metrics import LiveMetrics
from pdpool_operator.runtime.metrics import Metrics


def idle_metrics() -> Metrics:
    """Return metrics that only count what the operator does."""
    return Metrics(
        LiveMetrics(
            queues=tuple,
            holds=tuple,
            verdicts=dict,
            rotation=dict,
            demands=tuple,
            leading=lambda: True,
            waiting_keys=lambda: 0,
        )
    )
