"""Verdicts and diagnoses as data."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from ..api import names
from ..api.names import Role
from ..observe.model import ObservedPod
from .track import RankTrack


class Verdict(StrEnum):
    """What the queues of an instance say."""

    IDLE = "Idle"
    """Nothing waits, nothing runs."""
    FLOWING = "Flowing"
    """Something is there, and moves, or has not waited long."""
    STARTING = "Starting"
    DRAINING = "Draining"
    SATURATED = "Saturated"
    """Requests wait long, and the queue moves: more instances would help, a restart would not."""
    UNKNOWN = "Unknown"
    """It cannot be seen, and Kubernetes does not know better."""
    GONE = "Gone"
    """Kubernetes says that it is dead."""
    BLOCKED = "Blocked"
    """Waits for the other side, which is named."""
    STUCK = "Stuck"
    """Nothing moves, and it is at fault itself."""

    @property
    def severity(self) -> int:
        """Rank among the verdicts; the most severe of an instance's ranks, or of a pool's instances, stands for all."""
        return _SEVERITY[self]

    @property
    def well(self) -> bool:
        """Whether nothing is to be done: Idle and Flowing take turns all the time while requests come and go."""
        return self in {Verdict.IDLE, Verdict.FLOWING}


_SEVERITY = {verdict: rank for rank, verdict in enumerate(Verdict)}


@dataclass(frozen=True, slots=True)
class Subject:
    """One instance to be judged."""

    pool: str
    role: Role
    index: int
    pod: ObservedPod | None
    leaving: bool
    """It drains or is being deleted."""
    tracks: tuple[RankTrack, ...]
    """Of the ranks of the present pod, by rank; none when it was never looked at."""

    @property
    def name(self) -> str:
        """Name of the instance."""
        return names.instance(self.pool, self.role, self.index)

    @property
    def came_up(self) -> bool:
        """Its pod could serve once: one that never could has taken no request, and nobody waits for it."""
        if self.pod is None:
            return False
        return self.pod.ready or self.pod.was_ready or any(track.incarnation for track in self.tracks)


@dataclass(frozen=True, slots=True)
class Finding:
    """Verdict on one rank or one instance, with its evidence."""

    verdict: Verdict
    message: str
    blames: tuple[str, ...] = ()
    """Names of the instances of the other side that are at fault, when `Blocked`; empty when none can be named."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The judgement on one instance."""

    subject: Subject
    verdict: Verdict
    message: str
    blames: tuple[str, ...] = ()
    waiting_since: datetime | None = None
    """Since when its oldest request has waited in a hand-off queue, once that is stuckAfterSeconds; else `None`."""


def worst(diagnoses: Iterable[Diagnosis]) -> Diagnosis | None:
    """The most severe, the lowest index among equals; `None` of none."""
    return max(diagnoses, key=lambda d: (d.verdict.severity, -d.subject.index), default=None)
