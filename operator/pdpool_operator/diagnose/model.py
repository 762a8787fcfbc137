"""Verdicts and diagnoses as data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from ..api import names
from ..api.names import Role
from ..observe.model import ObservedPod
from ..observe.samples import Tally
from .outcomes import LATEST, OutcomeTrack, total_of
from .standing import Standing
from .track import RankTrack


class Verdict(StrEnum):
    """Verdict on the queues of an instance."""

    IDLE = "Idle"
    """No request waits or runs."""
    FLOWING = "Flowing"
    """The instance has requests. They move, or have not waited long."""
    STARTING = "Starting"
    DRAINING = "Draining"
    SATURATED = "Saturated"
    """Requests wait long, but the queue moves. More instances would help; a restart would not."""
    LEAKED = "Leaked"
    """The engine keeps requests in a queue although their hand-offs have ended. It serves, with less memory."""
    UNKNOWN = "Unknown"
    """The instance does not answer, and Kubernetes reports no reason."""
    GONE = "Gone"
    """Kubernetes reports that the pod has ended."""
    NOTHING_FINISHES = "NothingFinishes"
    """Requests fail and none finishes. No sibling serves that could show whether the instance is at fault."""
    BLOCKED = "Blocked"
    """The instance waits for the other side. The message names the instance at fault."""
    FAILING = "Failing"
    """Requests fail at the instance while its siblings serve. It is out of the rotation, or on trial."""
    STUCK = "Stuck"
    """Nothing moves, and the instance itself is at fault."""

    @property
    def severity(self) -> int:
        """Rank of the verdict. The most severe verdict of ranks stands for their instance, and that of instances for
        their pool.
        """
        return _SEVERITY[self]

    @property
    def well(self) -> bool:
        """Whether no action is needed. Idle and Flowing alternate all the time while requests come and go."""
        return self in {Verdict.IDLE, Verdict.FLOWING}

    @property
    def works(self) -> bool:
        """Whether the instance is seen, and is not at fault itself."""
        return self in {Verdict.IDLE, Verdict.FLOWING, Verdict.SATURATED, Verdict.LEAKED, Verdict.BLOCKED}


_SEVERITY = {verdict: rank for rank, verdict in enumerate(Verdict)}


SOURCES = ("router", "connector")
"""Who counts requests. Each is judged by itself, because the two count the same requests."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One instance to judge."""

    pool: str
    role: Role
    index: int
    pod: ObservedPod | None
    leaving: bool
    """The instance drains or is being deleted."""
    tracks: tuple[RankTrack, ...]
    """Tracks of the present pod's ranks, by rank. Empty if the pod was never sampled."""
    routers: tuple[OutcomeTrack, ...] = ()
    """What each router of the pool's services counted at the present pod."""
    standing: Standing | None = None
    """`None` before the first look at the pod's outcomes."""
    watched_pod: str = ""
    """Name of the pod, if something else than pdpool runs it. Empty for an instance of a pool."""

    @property
    def name(self) -> str:
        """Name of the instance."""
        return self.watched_pod or names.instance(self.pool, self.role, self.index)

    @property
    def label(self) -> str:
        """Value of the metric label `instance`: its index in a pool, or the name of a watched pod."""
        return self.watched_pod or str(self.index)

    @property
    def out(self) -> bool:
        """Whether routers must not list the instance while a sibling serves."""
        return self.standing is not None and self.standing.out

    def tally(self, source: str, since: datetime, until: datetime = LATEST) -> Tally:
        """Return how requests ended after `since` and not after `until`, as the routers or the connector counted them.

        Every rank counts each hand-off. The rank with the most failures stands for the instance.
        """
        if source == "router":
            return total_of(track.since(since, until) for track in self.routers)
        by_rank = (track.ended.since(since, until) for track in self.tracks if track.ended is not None)
        return max(by_rank, key=lambda tally: tally.failed, default=Tally())

    def last_done(self, source: str) -> datetime | None:
        """Return when a source last showed that a request succeeded, within the window."""
        return max((moment for track in self._ended(source) if (moment := track.last_done) is not None), default=None)

    def last_failed(self, source: str) -> datetime | None:
        """Return when a source last showed that a request failed, within the window."""
        return max((moment for track in self._ended(source) if (moment := track.last_failed) is not None), default=None)

    def _ended(self, source: str) -> Sequence[OutcomeTrack]:
        return self.routers if source == "router" else [track.ended for track in self.tracks if track.ended]

    @property
    def came_up(self) -> bool:
        """Whether its pod was able to serve at some time.

        A pod that was never able to serve has taken no request, so no other instance waits for it.
        """
        if self.pod is None:
            return False
        return self.pod.ready or self.pod.was_ready or any(track.incarnation for track in self.tracks)


@dataclass(frozen=True, slots=True)
class Finding:
    """Verdict on one rank or one instance, with its evidence."""

    verdict: Verdict
    message: str
    blames: tuple[str, ...] = ()
    """Names of the other side's instances at fault if `Blocked`. Empty if none can be named."""


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """A prefill rank and a decode rank that have paired. Both as text for people."""

    writer: str
    target: str
    backend: str
    transport: str
    """Empty if not known."""

    def __str__(self) -> str:
        """Say how the writer reaches the target."""
        return f"{self.writer} reaches {self.target} by {self.transport or 'an unknown transport'} ({self.backend})"


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """A decode instance that gets no answer from a prefill instance, while both answer the operator."""

    decode: str
    prefill: str
    decode_node: str
    prefill_node: str

    @property
    def ends(self) -> frozenset[str]:
        """Names of both instances."""
        return frozenset({self.decode, self.prefill})

    def __str__(self) -> str:
        """Say who cannot reach whom."""
        return f"{self.decode} on {self.decode_node} gets no answer from {self.prefill} on {self.prefill_node}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The judgement on one instance."""

    subject: Subject
    verdict: Verdict
    message: str
    blames: tuple[str, ...] = ()
    waiting_since: datetime | None = None
    """When the oldest request in a hand-off queue began to wait, if at least stuckAfterSeconds ago. Otherwise `None`.
    """
    pairs: tuple[Pair, ...] = ()
    """Pairs of its ranks with ranks of the other side."""
    unfit: str = ""
    """Why it must not serve, although its pod may be Ready. Empty if it may."""
    ejected: bool = False
    """It was judged Stuck, and has not worked for long enough since."""
    cuts: tuple[Cut, ...] = ()
    """Instances of the other side that it cannot reach, or that cannot reach it."""
    avoided: bool = False
    """It leaves the rotation so that no request meets a cut. It is not at fault, and works."""

    @property
    def out(self) -> bool:
        """Whether routers must not list the instance while a sibling serves."""
        return self.subject.out or self.ejected or bool(self.unfit) or self.avoided

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports of its pairs."""
        return tuple(sorted({pair.transport for pair in self.pairs}))


def worst(diagnoses: Iterable[Diagnosis]) -> Diagnosis | None:
    """Return the most severe diagnosis, with the lowest index among equals; `None` if there are none."""
    return max(diagnoses, key=lambda d: (d.verdict.severity, -d.subject.index), default=None)
