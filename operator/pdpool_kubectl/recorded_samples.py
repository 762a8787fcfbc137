"""What the operator's sampler would have made of the answers in a recording."""

import json
from collections.abc import Callable, Iterable, Mapping, Set
from datetime import datetime
from typing import Any, TypeVar

from pdpool_operator.engines import engine_of
from pdpool_operator.observe.connector_state import parse_state
from pdpool_operator.observe.engine_metrics import MetricsReading, parse_metrics
from pdpool_operator.observe.http import Unanswered
from pdpool_operator.observe.pod_reader import parse_loads
from pdpool_operator.observe.rank_samples import EngineAnswer, connector_samples, native_samples
from pdpool_operator.observe.samples import EngineSample, RankSample
from pdpool_operator.observe.targets import Target

from .recording import Answers, Look

T = TypeVar("T")
NOT_ASKED: dict[str, Any] = {"error": ""}


class RecordedSamples:
    """Turns look after look into samples. Like the sampler, it forgets a pod that is not sampled once."""

    def __init__(self) -> None:
        self._ranks: dict[Target, frozenset[int]] = {}
        """Ranks of the last look."""

    def of(self, look: Look, targets: Iterable[Target]) -> dict[Target, list[RankSample]]:
        """Return the samples of all ranks of these pods. A pod that was not asked has none."""
        samples = {
            target: _samples(target, answers, self._ranks.get(target, frozenset()))
            for target in targets
            if (answers := look.answers.get(target.pod_uid)) is not None
        }
        self._ranks = {target: frozenset(sample.rank for sample in ranks) for target, ranks in samples.items()}
        return samples


def _samples(target: Target, answers: Answers, known: Set[int]) -> list[RankSample]:
    no_loads: Mapping[int, EngineSample] = {}
    engines, error = _parsed(answers.engine, lambda text: parse_loads(text, target.role, target.engine), no_loads)
    asked_at, at = datetime.fromisoformat(answers.asked_at), datetime.fromisoformat(answers.at)
    answer = EngineAnswer(target.pod_uid, asked_at, at, engines, error)
    if target.has_connector:
        return connector_samples(answer, [_parsed(one, parse_state, None) for one in answers.connectors])
    names = engine_of(target.engine).metric_names
    uncounted: Mapping[int, MetricsReading] = {}
    metrics, why = _parsed(
        answers.metrics or NOT_ASKED, lambda text: parse_metrics(text, names, target.role), uncounted
    )
    return native_samples(answer, metrics, why, names, known)


def _parsed(answer: dict[str, Any], parser: Callable[[bytes], T], missing: T) -> tuple[T, str]:
    """Return what an answer says, or `missing` and the reason."""
    if "error" in answer:
        return missing, _as_the_sampler_says(str(answer["error"]))
    text = answer["text"] if "text" in answer else json.dumps(answer["body"])
    try:
        return parser(text.encode()), ""
    except Unanswered as error:
        return missing, str(error)


def _as_the_sampler_says(error: str) -> str:
    """Return the reason in the words of the sampler, if diagnosis depends on it: the API server's proxy has others."""
    return "refused" if "connection refused" in error else error
