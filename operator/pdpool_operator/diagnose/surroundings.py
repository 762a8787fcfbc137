"""What a rank's judgement takes from the engines on the other side. It is the same for every rank of a pool."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from ..api.names import Role
from .departures import Departures
from .evidence import current_queues, is_known_to_run, ran_lately, silence_of, waits_of
from .model import SOURCES, Subject
from .outcomes import WINDOW
from .track import RankTrack

WAITS_FOR_OTHER_SIDE = {"prefill_bootstrap": Role.DECODE, "decode_transfer": Role.PREFILL}
"""Queues whose first request only the other side can move."""


@dataclass(frozen=True)
class Surroundings:
    """Inputs of the judgement besides the rank itself.

    Properties of the other side are the same for every rank and are computed once.
    """

    others: Sequence[Subject]
    """Instances of the other side."""
    stuck_after: timedelta
    silent_after: timedelta
    """`stuck_after`, or half of it once requests are overdue anywhere."""
    now: datetime
    departures: Sequence[Departures] = ()
    """What is remembered of the other side's processes."""

    @cached_property
    def departed(self) -> tuple[str, ...]:
        """Instances of which requests may still wait for a process that is gone. Such a wait may take stuckAfter."""
        return tuple(name for pool in self.departures for name in pool.within(2 * self.stuck_after, self.now))

    def silent_limit(self, track: RankTrack) -> timedelta:
        """Return how long the engine's loop may pause. The first requests of a new process compile kernels."""
        is_new = track.ended is not None and not track.ended.total.done
        return self.stuck_after if is_new else self.silent_after

    @cached_property
    def silent(self) -> Mapping[str, str]:
        """How each silent engine is known to be silent, by name of the instance."""
        return {s.name: silence for s in self.others if (silence := _silence(s, self))}

    @cached_property
    def candidates(self) -> Sequence[Subject]:
        """Instances that could take part in a hand-off."""
        return [s for s in self.others if s.came_up and not s.leaving and s.pod is not None and not s.pod.terminating]

    @cached_property
    def failing(self) -> tuple[str, ...]:
        """Candidates that were found failing so recently that requests may still wait for them."""
        return tuple(
            s.name
            for s in self.candidates
            if s.standing is not None and self.now - s.standing.since <= WINDOW and _fails(s)
        )

    @cached_property
    def unseen(self) -> tuple[str, ...]:
        """Candidates that do not answer."""
        return tuple(s.name for s in self.candidates if not _answers(s, self))

    @cached_property
    def unproved(self) -> tuple[str, ...]:
        """Candidates of which nothing shows whether they run. A hung engine without connector looks idle."""
        return tuple(
            s.name
            for s in self.candidates
            if not any(is_known_to_run(track, self.now, self.stuck_after) for track in s.tracks)
        )

    @cached_property
    def resumed(self) -> tuple[str, ...]:
        """Candidates whose engine loop has resumed recently."""
        return tuple(s.name for s in self.candidates if any(_has_just_resumed(track, self) for track in s.tracks))

    @cached_property
    def computing(self) -> bool:
        """Whether a prefill engine of the other side computes a prompt, or did until a few samples ago."""
        tracks = (track for s in self.candidates if s.role is Role.PREFILL for track in s.tracks)
        return any(ran_lately(track, self.now) for track in tracks)

    @cached_property
    def busy(self) -> tuple[str, ...]:
        """Candidates with overdue requests that wait for the candidate itself."""
        return tuple(s.name for s in self.candidates if any(_is_busy(track, self) for track in s.tracks))


def _silence(subject: Subject, around: Surroundings) -> str:
    silences = (silence_of(track, around.now, around.silent_limit(track)) for track in subject.tracks)
    return next(filter(None, silences), "")


def _fails(subject: Subject) -> bool:
    """Whether the instance is out for its failures, or has failed in its trial.

    On trial it may compute its first request. That is no failure.
    """
    standing = subject.standing
    if standing is None or not standing.failing:
        return False
    return standing.out or any(subject.tally(source, standing.since).failed for source in SOURCES)


def _has_just_resumed(track: RankTrack, around: Surroundings) -> bool:
    return track.resumed_at is not None and around.now - track.resumed_at < around.stuck_after


def _is_busy(track: RankTrack, around: Surroundings) -> bool:
    """Whether overdue requests wait for the engine itself.

    Requests that wait for our side do not count. Two engines that wait for each other are both stuck.
    """
    return any(
        wait.counted and wait.overdue(around.stuck_after)
        for wait in waits_of(track, around.now)
        if wait.name not in WAITS_FOR_OTHER_SIDE
    )


def _answers(subject: Subject, around: Surroundings) -> bool:
    return bool(subject.tracks) and all(current_queues(track, around.now) is not None for track in subject.tracks)
