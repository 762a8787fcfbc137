"""Numbers by which an autoscaler may scale a pool: its hand-off queues, while more instances would help.

A queue that does not move looks like load, but more instances do not help. So a pool has no numbers while

    an instance of it is Stuck, Failing, NothingFinishes or Blocked, or

    an instance of it is Unknown because it does not answer. The sum of the others would be too small.

An autoscaler without numbers keeps the number of instances.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from .evidence import is_current
from .model import Diagnosis, Verdict
from .track import RankTrack

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
    for track in _current(diagnoses, now):
        for name, reqs, oldest_s in _queues(track):
            before = found.get(name, Demand(name, 0, 0.0))
            ages = (before.oldest_s, oldest_s)
            oldest = None if None in ages else max(age for age in ages if age is not None)
            found[name] = Demand(name, before.reqs + reqs, oldest)
    return tuple(found.values())


def _vetoes(diagnosis: Diagnosis, now: datetime) -> bool:
    silent = diagnosis.verdict is Verdict.UNKNOWN and not any(_current([diagnosis], now))
    return diagnosis.verdict in VETOES or silent


def _current(diagnoses: Iterable[Diagnosis], now: datetime) -> Iterable[RankTrack]:
    """Return the ranks whose queues are known now."""
    for track in (track for diagnosis in diagnoses for track in diagnosis.subject.tracks):
        if is_current(track, now) and (track.latest.connector or track.latest.engine):
            yield track


def _queues(track: RankTrack) -> Iterable[tuple[str, int, float | None]]:
    """Return name, requests and age of the oldest one for each queue of a rank."""
    connector, engine = track.latest.connector, track.latest.engine
    if connector is not None:
        for name, queue in connector.queues.items():
            yield name, queue.reqs, queue.oldest_s if queue.reqs else 0.0
    elif engine is not None:
        for name, reqs in engine.queues.items():
            yield name, reqs, None if reqs else 0.0
