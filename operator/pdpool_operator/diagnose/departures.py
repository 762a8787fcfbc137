"""Remembers instances whose process or pod is gone or was replaced.

Requests that waited for such an instance still wait at the other side, or fail there. Both say nothing against the
other side's instances. An instance that never answered took no request, so its end is no departure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from .model import Subject

REMEMBERED = timedelta(minutes=10)
"""Older departures are forgotten. No judgement looks back so far."""


@dataclass(frozen=True, slots=True)
class Departures:
    """What is remembered of the processes of one pool. Both maps are by name of the instance."""

    lives: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """UID of the pod and incarnation of the last process that answered. An engine without our connector has none."""
    at: Mapping[str, datetime] = field(default_factory=dict)
    """When an earlier process was found to be gone."""

    def within(self, limit: timedelta, now: datetime) -> tuple[str, ...]:
        """Return the names of the instances that departed so recently."""
        return tuple(sorted(name for name, at in self.at.items() if now - at <= limit))


def follow_departures(before: Departures, own: Iterable[Subject], now: datetime) -> Departures:
    """Return the departures of a pool after a look.

    Args:
        before: Result of the last look.
        own: All instances of the pool.
        now: Time of the clock that stamped the samples.
    """
    lives = {s.name: life for s in own if (life := _life(s, before.lives.get(s.name))) is not None}
    at = {name: moment for name, moment in before.at.items() if now - moment <= REMEMBERED}
    at |= {name: now for name, life in before.lives.items() if lives.get(name) != life}
    return Departures(lives, at)


def _life(subject: Subject, before: tuple[str, str] | None) -> tuple[str, str] | None:
    if subject.pod is None:
        return None
    # The process ends before its pod is gone. One that only does not answer may live.
    if subject.pod.terminating and subject.tracks and all(track.latest.queues is None for track in subject.tracks):
        return None
    if any(track.answered for track in subject.tracks):
        return subject.pod.uid, next((track.incarnation for track in subject.tracks if track.incarnation), "")
    return before if before is not None and before[0] == subject.pod.uid else None
