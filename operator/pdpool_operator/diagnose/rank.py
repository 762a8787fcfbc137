"""Judges one rank: first by its own evidence, then by the engines on the other side.

With  still(q)   = time since anything moved in the queue q, and
      oldest(q)  = age of its oldest request, as the connector reports it:

    overdue(q)  <=>  q is not empty and oldest(q) >= stuckAfter     (still(q), if the connector reports no age)

    stalled(q)  <=>  overdue(q) and still(q) >= stuckAfter

    overdue and not stalled                       Saturated, or Blocked if an engine of the other side is silent;
                                                  Unknown, if nothing has moved since the first sample

    overdue for a failing instance                Blocked by that one

    stalled, and own engine loop silent           Stuck
    stalled, and an engine it waits for silent    Blocked by that one

    stalled, and the other side busy, unseen,
        or silent until less than stuckAfter ago  Blocked

    stalled, but hand-offs have finished within
        stuckAfter                                Unknown: the queue's numbers contradict it

    stalled for less than LONGEST_PROMPT times
        stuckAfter, and the prefill engine that
        it waits for computes                     Saturated

    stalled for memory, and requests run          Saturated; Unknown, if the engine does not report running requests

    stalled for memory that requests hold which
        wait for the KV cache                     as for the KV cache

    stalled, and the other side healthy           Stuck

The first line of these that fits holds, but what the other side's engines say of themselves (silent, failing) goes
first. A long prompt keeps two engines waiting that are busy. Prefill's queues move when a chunk or the prompt has been
computed. Decode's move when the last chunk has arrived.

An engine is *silent* when its connector answers but its scheduler loop has not run for stuckAfter. Half of stuckAfter
is enough once requests on the other side are overdue. A connector that does not answer is no evidence: such an engine
is `Unknown`.

How requests end is judged for the instance as a whole, and the most severe verdict counts:

    it fails requests while siblings serve        Failing, until it has succeeded in a trial (see `failing`)

    requests fail, none finishes, and neither
    side has an instance that is failing          NothingFinishes

Messages stay the same while nothing changes, because statuses quote them. Live numbers are metrics.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from ..api.names import Role
from ..observe.model import ConnectorSample, EngineSample, QueueSample
from .model import Finding, Subject, Verdict
from .native import judge_native_rank
from .outcomes import WINDOW
from .track import RankTrack

STALE_S = 15.0
"""A sample that is older than this is out of date: five missed samples at the sampler's usual interval."""
STALE = timedelta(seconds=STALE_S)

WAITS_FOR_OTHER_SIDE = {"prefill_bootstrap": Role.DECODE, "decode_transfer": Role.PREFILL}
"""Queues whose first request only the other side can move."""

NEEDS_OTHER_SIDE = frozenset({*WAITS_FOR_OTHER_SIDE, "prefill_inflight"})
"""Queues that do not move while the other side is frozen: our write completes when the peer process handles it."""

LONGEST_PROMPT = 10
"""Times stuckAfter: a queue that stands still for longer is not explained by a prompt that is being computed."""

PURPOSE = {
    "prefill_bootstrap": "for bootstrap",
    "prefill_inflight": "for the transfer",
    "decode_prealloc": "for memory",
    "decode_transfer": "for the KV cache",
}


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

    @cached_property
    def silent(self) -> Mapping[str, timedelta]:
        """How long each silent engine has been silent, by name of the instance."""
        return {s.name: silence for s in self.others if (silence := _silence(s, self)) is not None}

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
            if s.standing is not None and s.standing.failing and self.now - s.standing.since <= WINDOW
        )

    @cached_property
    def unseen(self) -> tuple[str, ...]:
        """Candidates that do not answer."""
        return tuple(s.name for s in self.candidates if not _answers(s, self))

    @cached_property
    def resumed(self) -> tuple[str, ...]:
        """Candidates whose engine loop has resumed recently."""
        return tuple(s.name for s in self.candidates if any(_has_just_resumed(track, self) for track in s.tracks))

    @cached_property
    def computing(self) -> bool:
        """Whether a prefill engine of the other side computes a prompt, or did until a few samples ago."""
        tracks = (track for s in self.candidates if s.role is Role.PREFILL for track in s.tracks)
        return any(_ran_lately(track, self.now) for track in tracks)

    @cached_property
    def busy(self) -> tuple[str, ...]:
        """Candidates with overdue requests that wait for the candidate itself."""
        return tuple(s.name for s in self.candidates if any(_is_busy(track, self) for track in s.tracks))


@dataclass(frozen=True, slots=True)
class _Wait:
    """One queue that has requests."""

    name: str
    queue: QueueSample
    still: timedelta
    begun: bool
    """The start of the stillness was observed."""
    oldest: timedelta | None

    def overdue(self, limit: timedelta) -> bool:
        return (self.oldest if self.oldest is not None else self.still) >= limit

    def stalled(self, limit: timedelta) -> bool:
        return self.overdue(limit) and self.still >= limit

    def __str__(self) -> str:
        return f"requests wait {PURPOSE.get(self.name, f'in {self.name}')}"


def judge_rank(track: RankTrack, around: Surroundings, shared: EngineSample | None) -> Finding:
    """Return the verdict on one rank, without what Kubernetes reports about its pod.

    `shared` is the sample of the scheduler that counts the requests of ranks without a count of their own.
    """
    if not track.latest.has_connector:
        return judge_native_rank(track, around.stuck_after, around.now, current=is_current(track, around.now))
    connector = current_connector(track, around.now)
    if connector is None:
        why = track.latest.connector_error or f"no sample for {STALE_S:.0f} s"
        return Finding(Verdict.UNKNOWN, f"connector does not answer ({why})")
    silence = silent_for(track, around.now, around.silent_after)
    waits = list(_waits(track, connector, around.now))
    overdue = [wait for wait in waits if wait.overdue(around.stuck_after)]
    if silence is not None:
        own = "engine loop does not run while its connector answers"
        return Finding(Verdict.STUCK, "; ".join([own, *(str(wait) for wait in waits)]))
    if overdue:
        findings = [_judge_overdue(wait, track, around, shared) for wait in overdue]
        return max(findings, key=lambda finding: finding.verdict.severity)
    return _judge_healthy(track, waits)


def current_connector(track: RankTrack, now: datetime) -> ConnectorSample | None:
    """Return the connector's last answer, or None if it is out of date."""
    return track.latest.connector if is_current(track, now) else None


def is_current(track: RankTrack, now: datetime) -> bool:
    """Whether the last sample is recent enough."""
    return now - track.latest.at <= STALE


def silent_for(track: RankTrack, now: datetime, limit: timedelta) -> timedelta | None:
    """Return how long the engine's loop has not run while its connector answers.

    `None` if less than the limit, or if the engine does not report it.
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
    """Return when the rank's oldest request in a hand-off queue began to wait."""
    connector = current_connector(track, now)
    ages = [q.oldest_s for q in connector.queues.values() if q.reqs and q.oldest_s is not None] if connector else []
    return track.latest.at - timedelta(seconds=max(ages)) if ages else None


def _waits(track: RankTrack, connector: ConnectorSample, now: datetime) -> Iterator[_Wait]:
    """Queues with requests whose progress can be judged. A queue without a counter shows only its length."""
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
        return Finding(Verdict.FLOWING, "requests run")
    return Finding(Verdict.IDLE, "nothing waits")


def _judge_overdue(wait: _Wait, track: RankTrack, around: Surroundings, shared: EngineSample | None) -> Finding:
    lands = _waits_for_landing(wait, track, shared)
    needs_other_side = lands or wait.name in NEEDS_OTHER_SIDE
    if needs_other_side and around.silent:
        return _blocked_by_silence(wait, around)
    if needs_other_side and around.failing:
        return Finding(Verdict.BLOCKED, f"{wait}; {', '.join(around.failing)} fails its requests", around.failing)
    if not wait.stalled(around.stuck_after):
        return _judge_moving(wait)
    if (
        finding := _judge_by_outcomes(wait, track, around) or _judge_by_computing(wait, track, around, shared)
    ) is not None:
        return finding
    if needs_other_side and (finding := _blocked_by_absence(wait, around)) is not None:
        return finding
    if lands or wait.name in WAITS_FOR_OTHER_SIDE:
        return _judge_wait_for_others(wait, around)
    if wait.name == "decode_prealloc" and (finding := _judge_wait_for_memory(wait, track, shared)) is not None:
        return finding
    return Finding(Verdict.STUCK, _stands_still(wait))


def _waits_for_landing(wait: _Wait, track: RankTrack, shared: EngineSample | None) -> bool:
    """Whether requests wait for memory that no running request holds, but requests that wait for their KV cache."""
    if wait.name != "decode_prealloc" or track.answer is None:
        return False
    engine, transfer = _load(track, shared), track.answer.queues.get("decode_transfer")
    return engine is not None and not engine.running and transfer is not None and transfer.reqs > 0


def _judge_by_outcomes(wait: _Wait, track: RankTrack, around: Surroundings) -> Finding | None:
    """Judge a queue that has not moved although hand-offs of the rank have finished."""
    done = track.ended.last_done if track.ended is not None else None
    if done is None or around.now - done >= around.stuck_after:
        return None
    return Finding(Verdict.UNKNOWN, f"{_stands_still(wait)}, but hand-offs finish: its numbers may not be true")


def _judge_by_computing(
    wait: _Wait, track: RankTrack, around: Surroundings, shared: EngineSample | None
) -> Finding | None:
    """Judge a queue that does not move while a prefill engine computes a long prompt."""
    if wait.still >= LONGEST_PROMPT * around.stuck_after:
        return None
    if wait.name.startswith(Role.PREFILL):
        computes = (shared is not None and shared.running > 0) or _ran_lately(track, around.now)
        return Finding(Verdict.SATURATED, f"{wait}; the engine computes prompts") if computes else None
    if around.computing and (wait.name == "decode_transfer" or _waits_for_landing(wait, track, shared)):
        return Finding(Verdict.SATURATED, f"{wait}; prefill engines compute prompts")
    return None


def _ran_lately(track: RankTrack, now: datetime) -> bool:
    """Whether the engine ran requests at a sample so recent that the other side's newest sample may be older."""
    return track.ran_at is not None and now - track.ran_at <= STALE


def _load(track: RankTrack, shared: EngineSample | None) -> EngineSample | None:
    """Return the report of the rank's scheduler, or of the one that counts its requests."""
    return shared if track.latest.engine is None and not track.latest.engine_error else track.latest.engine


def _judge_moving(wait: _Wait) -> Finding:
    if wait.begun:
        return Finding(Verdict.SATURATED, f"{wait}; the queue moves")
    return Finding(Verdict.UNKNOWN, f"{wait}; not observed for long enough to see whether the queue moves")


def _judge_wait_for_others(wait: _Wait, around: Surroundings) -> Finding:
    """Judge a queue that only the other side can move. No engine there is silent."""
    role = WAITS_FOR_OTHER_SIDE.get(wait.name, Role.PREFILL)
    if not around.candidates:
        return Finding(Verdict.BLOCKED, f"{_stands_still(wait)}; there is no {role} engine")
    if around.busy:
        return _blocked(wait, around.busy, "also has overdue requests")
    return Finding(Verdict.STUCK, f"{_stands_still(wait)}, though every {role} engine runs")


def _judge_wait_for_memory(wait: _Wait, track: RankTrack, shared: EngineSample | None) -> Finding | None:
    """Judge a queue that waits for memory, which running requests may hold.

    The loop is known to run here. So an engine that does not answer is slow, not hung.
    """
    why, engine = track.latest.engine_error, _load(track, shared)
    if engine is None:
        return Finding(Verdict.UNKNOWN, f"{_stands_still(wait)}; its engine does not report running requests ({why})")
    if engine.running > 0:
        return Finding(Verdict.SATURATED, f"{wait} that running requests hold")
    return None


def _blocked_by_silence(wait: _Wait, around: Surroundings) -> Finding:
    shown = ", ".join(f"{name} engine loop does not run while its connector answers" for name in around.silent)
    return Finding(Verdict.BLOCKED, f"{wait}; {shown}", tuple(around.silent))


def _blocked_by_absence(wait: _Wait, around: Surroundings) -> Finding | None:
    """Blocked by engines of the other side that do not answer, or that resumed recently."""
    if around.unseen:
        return _blocked(wait, around.unseen, "did not answer")
    if around.resumed:
        return _blocked(wait, around.resumed, "resumed recently")
    return None


def _blocked(wait: _Wait, names: tuple[str, ...], why: str) -> Finding:
    return Finding(Verdict.BLOCKED, f"{_stands_still(wait)}; {', '.join(names)} {why}", names)


def _stands_still(wait: _Wait) -> str:
    return f"{wait} and nothing moves"


def _silence(subject: Subject, around: Surroundings) -> timedelta | None:
    silences = [silent_for(track, around.now, around.silent_after) for track in subject.tracks]
    return max((silence for silence in silences if silence is not None), default=None)


def _has_just_resumed(track: RankTrack, around: Surroundings) -> bool:
    return track.resumed_at is not None and around.now - track.resumed_at < around.stuck_after


def _is_busy(track: RankTrack, around: Surroundings) -> bool:
    """Whether overdue requests wait for the engine itself.

    Requests that wait for our side do not count. Two engines that wait for each other are both stuck.
    """
    connector = current_connector(track, around.now)
    waits = _waits(track, connector, around.now) if connector is not None else ()
    return any(wait.overdue(around.stuck_after) for wait in waits if wait.name not in WAITS_FOR_OTHER_SIDE)


def _answers(subject: Subject, around: Surroundings) -> bool:
    return bool(subject.tracks) and all(current_connector(track, around.now) for track in subject.tracks)
