"""Numbers by which an autoscaler may scale a pool: its hand-off queues, while more instances would help.

A queue that does not move looks like load, but more instances do not help. So a pool has no numbers while

    an instance of it is Stuck, Failing, NothingFinishes or Blocked, or

    an instance of it is Unknown because it does not answer. The sum of the others would be too small.

An autoscaler without numbers keeps the number of instances.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..observe.samples import QueueSample
from .evidence import is_current
from .model import Diagnosis, Verdict

VETOES = frozenset({Verdict.STUCK, Verdict.FAILING, Verdict.NOTHING_FINISHES, Verdict.BLOCKED})
"""Verdicts on one instance that say that its pool's queues do not show load."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One hand-off queue, over all instances and ranks of a pool."""

    queue: str
    reqs: int
    oldest_s: float | None
    """Age of the oldest request in seconds, 0 if none waits. `None` if the engines do not report it."""


def demand(diagnoses: Sequence[Diagnosis], now: datetime) -> tuple[Demand, ...]:
    """Return the queues of a pool to scale by. Empty while it must not be scaled by them.

    Args:
        diagnoses: Of all instances of the pool.
        now: Time of the clock that stamped the samples.
    """
    if any(_vetoes(diagnosis, now) for diagnosis in diagnoses):
        return ()
    found: dict[str, Demand] = {}
    for queues in _seen(diagnoses, now):
        for name, queue in queues.items():
            before = found.get(name, Demand(name, 0, 0.0))
            oldest_s = queue.oldest_s if queue.reqs else 0.0
            longest = None if before.oldest_s is None or oldest_s is None else max(before.oldest_s, oldest_s)
            found[name] = Demand(name, before.reqs + queue.reqs, longest)
    return tuple(found.values())


def _vetoes(diagnosis: Diagnosis, now: datetime) -> bool:
    silent = diagnosis.verdict is Verdict.UNKNOWN and next(_seen([diagnosis], now), None) is None
    return diagnosis.verdict in VETOES or silent


def _seen(diagnoses: Iterable[Diagnosis], now: datetime) -> Iterator[Mapping[str, QueueSample]]:
    """Yield the queues of each rank that has answered lately."""
    for track in (track for diagnosis in diagnoses for track in diagnosis.subject.tracks):
        if is_current(track, now) and (queues := track.latest.seen_queues) is not None:
            yield queues
