"""Joins the answers of one pod into one sample per rank. Pure: the sampler and `kubectl pdpool replay` share it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..engines.metric_names import MetricNames
from .engine_metrics import MetricsReading, joined
from .samples import ConnectorSample, EngineSample, RankSample


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """What a pod's scheduler answered in one look."""

    pod_uid: str
    asked_at: datetime
    at: datetime
    engines: Mapping[int, EngineSample]
    """By rank. A rank that is not listed is absent."""
    error: str = ""
    """Why there is no answer. Empty if there is one."""


def connector_samples(
    answer: EngineAnswer, connectors: Sequence[tuple[ConnectorSample | None, str]]
) -> list[RankSample]:
    """Return the samples of a pod whose ranks have pdpool's connector. `connectors` has answer and error by rank."""
    return [
        RankSample(
            rank=rank,
            pod_uid=answer.pod_uid,
            at=answer.at,
            asked_at=answer.asked_at,
            connector=connector,
            engine=answer.engines.get(rank),
            connector_error=error,
            engine_error=_why_no_engine(rank, answer),
        )
        for rank, (connector, error) in enumerate(connectors)
    ]


def native_samples(
    answer: EngineAnswer,
    metrics: Mapping[int, MetricsReading],
    metrics_error: str,
    names: MetricNames,
    known: Collection[int],
) -> list[RankSample]:
    """Return the samples of a pod without pdpool's connector. The engine alone says which ranks there are.

    Args:
        answer: what the scheduler reported.
        metrics: what `/metrics` showed, by rank.
        metrics_error: why `/metrics` were not read, or empty.
        names: the metrics of the engine's type.
        known: ranks of the last look. They remain while the engine does not answer.
    """
    engines = joined(answer.engines, metrics, names)
    return [
        RankSample(
            rank=rank,
            pod_uid=answer.pod_uid,
            at=answer.at,
            asked_at=answer.asked_at,
            connector=None,
            engine=engines.get(rank),
            engine_error="" if rank in engines else answer.error or "invalid: rank not listed",
            has_connector=False,
            metrics_error=metrics_error,
        )
        for rank in sorted(engines) or sorted(known) or [0]
    ]


def _why_no_engine(rank: int, answer: EngineAnswer) -> str:
    """Ranks that share a scheduler are counted together, at the first one."""
    if rank in answer.engines or answer.error:
        return answer.error
    return "" if 0 in answer.engines else "invalid: rank not listed"
