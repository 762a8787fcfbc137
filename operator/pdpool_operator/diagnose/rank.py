"""The judgement on one rank. Evidence of its own comes first, then what it waits for on the other side.

With  still(q)   = time since anything moved in the queue q, and
      oldest(q)  = age of its oldest request as the connector tells it:

    overdue(q)  <=>  q is not empty and oldest(q) >= stuckAfter     (still(q), where the connector tells no age)
    stalled(q)  <=>  overdue(q) and still(q) >= stuckAfter

    overdue and not stalled                       Saturated, or Blocked if an engine of the other side is silent;
                                                  Unknown, if nothing moved for as long as we have looked
    stalled, and own engine loop silent           Stuck
    stalled, and an engine it waits for silent    Blocked by that one
    stalled, and the other side busy, unseen,
        or silent until less than stuckAfter ago  Blocked
    stalled for memory, and requests run          Saturated; Unknown, if the engine does not tell what runs
    stalled, and the other side fine              Stuck

An engine is *silent* when its connector answers but its scheduler loop has not run for stuckAfter; for half of that,
once requests on the other side are overdue. No answer at all is no evidence: such an engine is `Unknown`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from ..api.names import Role
from ..observe.model import ConnectorSample, EngineSample, QueueSample
from .model import Finding, Subject, Verdict
from .track import RankTrack

STALE_S = 15.0
"""A look that is older than this says nothing about now: five missed looks at the sampler's usual interval."""

AGE_WORTH_SAYING = timedelta(seconds=1)

WAITS_FOR_OTHER_SIDE = {"prefill_bootstrap": Role.DECODE, "decode_transfer": Role.PREFILL}
"""Queues whose head can be moved by the other side only."""

NEEDS_OTHER_SIDE = frozenset({*WAITS_FOR_OTHER_SIDE, "prefill_inflight"})
"""Queues that stand still while the other side does: our write ends when its process takes it."""

PURPOSE = {
    "prefill_bootstrap": "for bootstrap",
    "prefill_inflight": "for the transfer",
    "decode_prealloc": "for memory",
    "decode_transfer": "for the KV cache",
}


@dataclass(frozen=True)
class Surroundings:
    """What the judgement needs beside the rank itself. What follows from the other side is the same for every rank, and
    found once.
    """

    others: Sequence[Subject]
    """Instances of the other side."""
    stuck_after: timedelta
    silent_after: timedelta
    """`stuck_after`, or half of it once requests are overdue somewhere."""
    now: datetime

    @cached_property
    def silent(self) -> Mapping[str, timedelta]:
        """For how long the engines that are silent have been so, by name of the instance."""
        return {s.name: silence for s in self.others if (silence := _silence(s, self)) is not None}

    @cached_property
    def candidates(self) -> Sequence[Subject]:
        """Instances that could take part in a hand-off."""
        return [s for s in self.others if s.came_up and not s.leaving and s.pod is not None and not s.pod.terminating]

    @cached_property
    def unseen(self) -> tuple[str, ...]:
        """Those of them that do not answer."""
        return tuple(s.name for s in self.candidates if not _answers(s, self))

    @cached_property
    def resumed(self) -> tuple[str, ...]:
        """Those that run again since a moment."""
        return tuple(s.name for s in self.candidates if any(_has_just_resumed(track, self) for track in s.tracks))

    @cached_property
    def busy(self) -> tuple[str, ...]:
        """Those that have requests which wait long for themselves."""
        return tuple(s.name for s in self.candidates if any(_is_busy(track, self) for track in s.tracks))


@dataclass(frozen=True, slots=True)
class _Wait:
    """One queue with requests in it."""

    name: str
    queue: QueueSample
    still: timedelta
    begun: bool
    """That nothing moves was seen to begin."""
    oldest: timedelta | None

    def overdue(self, limit: timedelta) -> bool:
        return (self.oldest if self.oldest is not None else self.still) >= limit

    def stalled(self, limit: timedelta) -> bool:
        return self.overdue(limit) and self.still >= limit

    def __str__(self) -> str:
        age = f" {_seconds(self.oldest)}" if self.oldest is not None and self.oldest >= AGE_WORTH_SAYING else ""
        purpose = PURPOSE.get(self.name, f"in {self.name}")
        if self.queue.reqs == 1:
            return f"1 request waits{age} {purpose}"
        return f"{self.queue.reqs} requests wait{age} {purpose}"


def judge_rank(track: RankTrack, around: Surroundings, shared: EngineSample | None) -> Finding:
    """Verdict on one rank, without what Kubernetes says about its pod.

    `shared`: what the scheduler says that counts the requests of ranks without a count of their own.
    """
    connector = current_connector(track, around.now)
    if connector is None:
        why = track.latest.connector_error or f"last look {_seconds(around.now - track.latest.at)} ago"
        return Finding(Verdict.UNKNOWN, f"connector does not answer ({why})")
    silence = silent_for(track, around.now, around.silent_after)
    waits = list(_waits(track, connector, around.now))
    overdue = [wait for wait in waits if wait.overdue(around.stuck_after)]
    if silence is not None:
        own = f"engine loop silent for {_seconds(silence)} while its connector answers"
        return Finding(Verdict.STUCK, "; ".join([own, *(str(wait) for wait in waits)]))
    if overdue:
        findings = [_judge_overdue(wait, track, around, shared) for wait in overdue]
        return max(findings, key=lambda finding: finding.verdict.severity)
    return _judge_healthy(track, waits)


def current_connector(track: RankTrack, now: datetime) -> ConnectorSample | None:
    """The connector's answer at the last look, unless that look is too old to count."""
    return track.latest.connector if is_current(track, now) else None


def is_current(track: RankTrack, now: datetime) -> bool:
    """Whether the last look says something about now."""
    return now - track.latest.at <= timedelta(seconds=STALE_S)


def silent_for(track: RankTrack, now: datetime, limit: timedelta) -> timedelta | None:
    """For how long the engine's loop has been silent while its connector answers.

    `None` if for less than the limit, or if the engine does not report it.
    """
    connector = current_connector(track, now)
    if connector is None:
        return None
    silence = timedelta(seconds=connector.beat_age_s or 0.0)
    return silence if silence >= limit else None


def is_overdue(track: RankTrack, now: datetime, limit: timedelta) -> bool:
    """Whether requests wait longer than the limit in a queue of this rank."""
    connector = current_connector(track, now)
    return connector is not None and any(wait.overdue(limit) for wait in _waits(track, connector, now))


def oldest_waiting_since(track: RankTrack, now: datetime) -> datetime | None:
    """Since when the rank's oldest request has waited in a hand-off queue."""
    connector = current_connector(track, now)
    ages = [q.oldest_s for q in connector.queues.values() if q.reqs and q.oldest_s is not None] if connector else []
    return track.latest.at - timedelta(seconds=max(ages)) if ages else None


def _waits(track: RankTrack, connector: ConnectorSample, now: datetime) -> Iterator[_Wait]:
    """Queues with requests whose progress can be judged: one without a counter shows a level only."""
    for name, queue in sorted(connector.queues.items()):
        if queue.reqs > 0 and queue.moved_total is not None:
            oldest = None if queue.oldest_s is None else timedelta(seconds=queue.oldest_s)
            seen = track.queues[name]
            yield _Wait(name, queue, now - seen.still_since, seen.begun, oldest)


def _judge_healthy(track: RankTrack, waits: list[_Wait]) -> Finding:
    engine = track.latest.engine
    running = engine.running + engine.waiting if engine is not None else 0
    if waits:
        return Finding(Verdict.FLOWING, "; ".join(str(wait) for wait in waits))
    if running:
        return Finding(Verdict.FLOWING, f"{running} requests in the engine")
    return Finding(Verdict.IDLE, "nothing waits")


def _judge_overdue(wait: _Wait, track: RankTrack, around: Surroundings, shared: EngineSample | None) -> Finding:
    moving = not wait.stalled(around.stuck_after)
    if wait.name in NEEDS_OTHER_SIDE and around.silent:
        return _blocked_by_silence(wait, around)
    if moving:
        return _judge_moving(wait)
    if wait.name in NEEDS_OTHER_SIDE and (finding := _blocked_by_absence(wait, around)) is not None:
        return finding
    if wait.name in WAITS_FOR_OTHER_SIDE:
        return _judge_wait_for_others(wait, around)
    if wait.name == "decode_prealloc" and (finding := _judge_wait_for_memory(wait, track, shared)) is not None:
        return finding
    return Finding(Verdict.STUCK, _stands_still(wait))


def _judge_moving(wait: _Wait) -> Finding:
    if wait.begun:
        return Finding(Verdict.SATURATED, f"{wait}; the queue moves")
    return Finding(Verdict.UNKNOWN, f"{wait}; not watched for long enough to say whether the queue moves")


def _judge_wait_for_others(wait: _Wait, around: Surroundings) -> Finding:
    """Of a queue that only the other side can move, when all engines there run, or none is there."""
    role = WAITS_FOR_OTHER_SIDE[wait.name]
    if not around.candidates:
        return Finding(Verdict.BLOCKED, f"{_stands_still(wait)}; there is no {role} engine")
    if around.busy:
        return _blocked(wait, around.busy, "has requests that wait as long")
    return Finding(Verdict.STUCK, f"{_stands_still(wait)}, though every {role} engine runs")


def _judge_wait_for_memory(wait: _Wait, track: RankTrack, shared: EngineSample | None) -> Finding | None:
    """Of memory that running requests may hold. That the loop turns is known here, so an engine that does not answer is
    slow rather than hung.
    """
    why = track.latest.engine_error
    engine = shared if track.latest.engine is None and not why else track.latest.engine
    if engine is None:
        return Finding(Verdict.UNKNOWN, f"{_stands_still(wait)}; its engine does not tell what runs ({why})")
    if engine.running > 0:
        return Finding(Verdict.SATURATED, f"{wait} that {engine.running} running requests hold")
    return None


def _blocked_by_silence(wait: _Wait, around: Surroundings) -> Finding:
    shown = ", ".join(
        f"{name} engine loop silent for {_seconds(silence)} while its connector answers"
        for name, silence in around.silent.items()
    )
    return Finding(Verdict.BLOCKED, f"{wait}; {shown}", tuple(around.silent))


def _blocked_by_absence(wait: _Wait, around: Surroundings) -> Finding | None:
    """Blocked by engines of the other side that do not answer, or did not until a moment ago."""
    if around.unseen:
        return _blocked(wait, around.unseen, "cannot be asked")
    if around.resumed:
        return _blocked(wait, around.resumed, "runs again since a moment")
    return None


def _blocked(wait: _Wait, names: tuple[str, ...], why: str) -> Finding:
    return Finding(Verdict.BLOCKED, f"{_stands_still(wait)}; {', '.join(names)} {why}", names)


def _stands_still(wait: _Wait) -> str:
    return f"{wait}; nothing moved for {_seconds(wait.still)}"


def _silence(subject: Subject, around: Surroundings) -> timedelta | None:
    silences = [silent_for(track, around.now, around.silent_after) for track in subject.tracks]
    return max((silence for silence in silences if silence is not None), default=None)


def _has_just_resumed(track: RankTrack, around: Surroundings) -> bool:
    return track.resumed_at is not None and around.now - track.resumed_at < around.stuck_after


def _is_busy(track: RankTrack, around: Surroundings) -> bool:
    """Whether requests wait long for the engine itself. Those that wait for our side do not count: two that wait for
    each other are both stuck.
    """
    connector = current_connector(track, around.now)
    waits = _waits(track, connector, around.now) if connector is not None else ()
    return any(wait.overdue(around.stuck_after) for wait in waits if wait.name not in WAITS_FOR_OTHER_SIDE)


def _answers(subject: Subject, around: Surroundings) -> bool:
    return bool(subject.tracks) and all(current_connector(track, around.now) for track in subject.tracks)


def _seconds(value: timedelta) -> str:
    return f"{int(value.total_seconds())} s"
