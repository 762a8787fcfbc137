"""Reads an engine's `/metrics`: the third source, after pdpool's connector and the scheduler's own report.

An answer may be long, and most of it is of no use. So its lines are sifted while they arrive, and only the metrics of
`MetricNames` are parsed. A value that is absent, not finite, negative or too large stays unknown.

Series have the labels `dp_rank`, `pp_rank` and `tp_rank`. As in `/v1/loads`, a data-parallel rank is seen through its
first pipeline and tensor rank.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families

from ..api.names import Role
from ..engines.answers import MAX_COUNT, MAX_RANKS, Counters, EngineSample
from ..engines.metric_names import MetricNames, Series
from .http import Unanswered

METRICS_BYTES = 16 << 20
"""Limit of one answer."""
KEPT_BYTES = 1 << 20
"""Limit of the lines that are kept of it. 256 ranks need about half of it."""
LINE_BYTES = 1 << 16

_RANK = re.compile(r"[0-9]{1,3}")


class Sieve:
    """Keeps the lines of some metrics, of a text that arrives in parts. A last line without an end is dropped."""

    def __init__(self, metrics: Iterable[str]) -> None:
        names = b"|".join(re.escape(name.encode()) for name in sorted(metrics))
        self._wanted = re.compile(rb"^(?:" + names + rb")[{ ][^\n]*\n", re.MULTILINE)
        self._begun = b""
        self._kept = 0

    def __call__(self, part: bytes) -> bytes:
        """Return the wanted lines that end in this part; raises Unanswered beyond a limit."""
        whole, end, self._begun = (self._begun + part).rpartition(b"\n")
        if len(self._begun) > LINE_BYTES:
            raise Unanswered(f"invalid: a line of more than {LINE_BYTES} bytes")
        kept = b"".join(self._wanted.findall(whole + end))
        self._kept += len(kept)
        if self._kept > KEPT_BYTES:
            raise Unanswered(f"invalid: more than {KEPT_BYTES} bytes of queue metrics")
        return kept


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """What one rank's metrics show. What they do not is absent or `None`."""

    lengths: Mapping[str, int] = field(default_factory=dict)
    running: int | None = None
    waiting: int | None = None
    counters: Counters = field(default_factory=Counters)


@dataclass(frozen=True, slots=True)
class _Value:
    metric: str
    labels: Mapping[str, str]
    number: float


def parse_metrics(text: bytes, names: MetricNames, role: Role) -> dict[int, MetricsReading]:
    """Parse the sifted lines of an answer, by data-parallel rank.

    Raises:
        Unanswered: a line is no Prometheus text, or there is no metric of the engine.
    """
    values = list(_values(text))
    finished, of_engine = _read(values, names.finished), {series.metric for series in names.finished}
    by_rank: dict[int, dict[tuple[int, int], list[_Value]]] = {}
    for value in (value for value in values if value.metric not in of_engine):
        rank, *part = _place(value.labels)
        by_rank.setdefault(rank, {}).setdefault((part[0], part[1]), []).append(value)
    if len(by_rank) > MAX_RANKS:
        raise Unanswered(f"invalid: more than {MAX_RANKS} ranks")
    if not by_rank:
        raise Unanswered("invalid: none of the engine's metrics")
    return {rank: _reading(parts[min(parts)], names, role, finished) for rank, parts in sorted(by_rank.items())}


def joined(
    loads: Mapping[int, EngineSample], metrics: Mapping[int, MetricsReading], names: MetricNames
) -> dict[int, EngineSample]:
    """Return the samples of both sources. What the scheduler reports itself goes before a gauge.

    A rank that only `/metrics` shows needs the number of its running and waiting requests, and a queue.
    """
    found = {rank: _with_counters(sample, metrics.get(rank)) for rank, sample in loads.items()}
    for rank, read in metrics.items():
        if not loads and read.running is not None and read.waiting is not None and read.lengths:
            found[rank] = EngineSample(read.running, read.waiting, read.lengths, names.lag_s, read.counters)
    return found


def _with_counters(sample: EngineSample, read: MetricsReading | None) -> EngineSample:
    return sample if read is None else replace(sample, counters=read.counters)


def _values(text: bytes) -> Iterator[_Value]:
    """Yield the samples of a text; raises Unanswered if it is no Prometheus text."""
    try:
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                # Beside the total, with the label empty, SGLang lists each priority.
                if not sample.labels.get("priority"):
                    yield _Value(sample.name, sample.labels, float(sample.value))
    except (ValueError, IndexError, KeyError) as error:
        raise Unanswered(f"invalid: no Prometheus text ({type(error).__name__})") from error


def _place(labels: Mapping[str, str]) -> tuple[int, int, int]:
    """Return the data-parallel, pipeline and tensor rank of a series. A label that is missing means 0."""
    places = [labels.get(name) or "0" for name in ("dp_rank", "pp_rank", "tp_rank")]
    if not all(_RANK.fullmatch(place) for place in places):
        raise Unanswered("invalid: dp_rank, pp_rank and tp_rank must be numbers below 1000")
    data, pipeline, tensor = (int(place) for place in places)
    return data, pipeline, tensor


def _reading(values: Sequence[_Value], names: MetricNames, role: Role, finished: int | None) -> MetricsReading:
    def by_queue(table: Mapping[str, Sequence[Series]]) -> dict[str, int]:
        mine = {queue: _read(values, series) for queue, series in table.items() if queue.startswith(f"{role}_")}
        return {queue: number for queue, number in mine.items() if number is not None}

    return MetricsReading(
        lengths=by_queue(names.lengths),
        running=_read(values, names.running),
        waiting=_read(values, names.waiting),
        counters=Counters(by_queue(names.moved), _read(values, names.tokens), finished),
    )


def _read(values: Sequence[_Value], aliases: Sequence[Series]) -> int | None:
    """Return the sum of the first alias that is there. None if it is no whole number from 0 to MAX_COUNT."""
    for series in aliases:
        found = [value.number for value in values if _is_of(value, series)]
        if found:
            total = sum(found, 0.0)
            usable = all(number >= 0 for number in found) and total <= MAX_COUNT and total.is_integer()
            return int(total) if usable else None
    return None


def _is_of(value: _Value, series: Series) -> bool:
    return value.metric == series.metric and (not series.label or value.labels.get(series.label) in series.values)
