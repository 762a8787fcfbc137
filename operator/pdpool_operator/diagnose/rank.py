"""Judges one rank: first by its own evidence, then by the engines on the other side.

With  still(q)   = time since anything moved in the queue q, and
      oldest(q)  = age of its oldest request, as the connector reports it:

    own engine loop silent                        Stuck, even with empty queues

    q has no counter, and was not seen empty
        for stuckAfter                            Unknown: its requests may move or not

    overdue(q)  <=>  q is not empty and oldest(q) >= stuckAfter     (still(q), if the connector reports no age)

    stalled(q)  <=>  overdue(q) and still(q) >= stuckAfter

    overdue, and an engine it waits for silent    Blocked by that one
    overdue for a failing instance                Blocked by that one

    overdue and not stalled                       Saturated; Unknown, if nothing has moved since the first sample

    stalled, but hand-offs have finished within
        stuckAfter                                Unknown: the queue's numbers contradict it

    stalled for less than LONGEST_PROMPT times
        stuckAfter, and the prefill engine that
        it waits for computes                     Saturated

    stalled, and the other side absent, busy,
        unseen, or silent until less than
        stuckAfter ago                            Blocked

    stalled, and a process of the other side was
        gone less than twice stuckAfter ago       Blocked by its instance

    stalled for memory, and requests run          Saturated; Unknown, if the engine does not report running requests

    stalled for memory that requests hold which
        wait for the KV cache                     as for the KV cache

    stalled, and nothing shows whether the engine
        that it waits for runs                    Unknown

    stalled, and the other side healthy           Stuck

    the engine keeps requests in q of which no
        hand-off is under way (see `orphans`)     Leaked

The first line that fits holds. A long prompt keeps two engines waiting that are busy. Prefill's queues move when a
chunk or the prompt has been computed. Decode's move when the last chunk has arrived.

An engine is *silent* when its connector answers but its scheduler loop has not run for stuckAfter. Half of stuckAfter
is enough once requests on the other side are overdue. That does not hold before a process has finished its first
hand-off: its first requests compile kernels. A connector that does not answer is no evidence: such an engine is
`Unknown`.

A connector whose own loop does not run makes its engine silent too.

An engine that is paused on request is silent for the other side. It is not at fault itself, but `Unknown`, until
stuckAfter after its pause.

An engine without pdpool's connector is judged by the same table, from what it reports itself. There is no age, so
oldest(q) is still(q). The lengths of gauges may be out of date for `lag_s`, which is taken off still(q). The engine is
silent when requests run and it has computed no token for stuckAfter, TOKENS_LAG and `lag_s`. It is known to run when
its counters show work within stuckAfter. A counter proves nothing of the time since it was last read, and a queue has
no counter once that is STALE_S ago. Its decode_prealloc also waits for the handshake with prefill, while no request
runs that could hold the memory.

How requests end is judged for the instance as a whole, and the most severe verdict counts:

    it fails requests while siblings serve        Failing, until it has succeeded in a trial (see `failing`)

    requests fail, none finishes, and neither
    side has an instance that is failing          NothingFinishes

Messages stay the same while nothing changes, because statuses quote them. Live numbers are metrics.
"""

from collections.abc import Iterator
from datetime import datetime

from ..api.names import Role
from ..observe.samples import EngineSample
from .evidence import PAUSED, STALE_S, Wait, current_queues, is_current, ran_lately, silence_of, waits_of
from .model import Finding, Verdict
from .surroundings import WAITS_FOR_OTHER_SIDE, Surroundings
from .track import RankTrack

NEEDS_OTHER_SIDE = frozenset({*WAITS_FOR_OTHER_SIDE, "prefill_inflight"})
"""Queues that do not move while the other side is frozen: our write completes when the peer process handles it."""

LONGEST_PROMPT = 10
"""Times stuckAfter: a queue that stands still for longer is not explained by a prompt that is being computed."""


def judge_rank(track: RankTrack, around: Surroundings, shared: EngineSample | None) -> Finding:
    """Return the verdict on one rank, without what Kubernetes reports about its pod.

    `shared` is the sample of the scheduler that counts the requests of ranks without a count of their own.
    """
    if current_queues(track, around.now) is None:
        return Finding(Verdict.UNKNOWN, _why_unknown(track, around.now))
    if track.paused_since is not None and track.paused_at == track.answered_at:
        return Finding(Verdict.UNKNOWN, f"its {PAUSED}")
    waits = list(waits_of(track, around.now))
    if silence := silence_of(track, around.now, around.silent_limit(track)):
        return Finding(Verdict.STUCK, "; ".join([silence, *(str(wait) for wait in waits)]))
    findings = [_judge_overdue(wait, track, around, shared) for wait in waits if wait.overdue(around.stuck_after)]
    findings += _judge_leaks(track)
    if findings:
        return _excused(max(findings, key=lambda finding: finding.verdict.severity), track, around)
    return _judge_healthy(track, waits)


def _excused(finding: Finding, track: RankTrack, around: Surroundings) -> Finding:
    """Return a finding that finds no fault in an engine that was paused until recently. It needs time to catch up."""
    recently = track.paused_at is not None and around.now - track.paused_at < around.stuck_after
    if finding.verdict is not Verdict.STUCK or not recently:
        return finding
    return Finding(Verdict.UNKNOWN, f"{finding.message}; its engine was paused until recently")


def _why_unknown(track: RankTrack, now: datetime) -> str:
    sample, late = track.latest, f"no sample for {STALE_S:.0f} s"
    if sample.has_connector:
        return f"connector does not answer ({sample.connector_error or late})"
    if is_current(track, now):
        tried = sample.engine_error, f"/metrics: {sample.metrics_error}" if sample.metrics_error else ""
        return f"engine does not report its queues ({'; '.join(filter(None, tried))})"
    return f"engine does not report its queues ({late})"


def _judge_leaks(track: RankTrack) -> Iterator[Finding]:
    for name, reqs in sorted(track.leaked.items()):
        what = "1 request stays" if reqs == 1 else f"{reqs} requests stay"
        yield Finding(Verdict.LEAKED, f"{what} in {name} although no hand-off of it is under way")


def _judge_healthy(track: RankTrack, waits: list[Wait]) -> Finding:
    engine = track.latest.engine
    running = engine.running + engine.waiting if engine is not None else 0
    if waits:
        return Finding(Verdict.FLOWING, "; ".join(str(wait) for wait in waits))
    if running:
        return Finding(Verdict.FLOWING, "requests run")
    return Finding(Verdict.IDLE, "nothing waits")


def _judge_overdue(wait: Wait, track: RankTrack, around: Surroundings, shared: EngineSample | None) -> Finding:
    if not wait.counted:
        return Finding(Verdict.UNKNOWN, f"{wait}; {_why_uncounted(track)}")
    lands = _waits_for_landing(wait, track, shared)
    needs_other_side = lands or wait.name in NEEDS_OTHER_SIDE or _waits_for_handshake(wait, track)
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


def _why_uncounted(track: RankTrack) -> str:
    why = track.latest.metrics_error
    return f"nothing shows whether the queue moves{f' (/metrics: {why})' if why else ''}"


def _waits_for_handshake(wait: Wait, track: RankTrack) -> bool:
    """Whether requests wait for prefill or for memory, in an engine without our connector that runs no request."""
    engine = track.latest.engine
    return (
        wait.name == "decode_prealloc" and not track.latest.has_connector and engine is not None and not engine.running
    )


def _waits_for_landing(wait: Wait, track: RankTrack, shared: EngineSample | None) -> bool:
    """Whether requests wait for memory that no running request holds, but requests that wait for their KV cache."""
    queues = track.latest.queues
    if wait.name != "decode_prealloc" or queues is None:
        return False
    engine, transfer = _load(track, shared), queues.get("decode_transfer")
    return engine is not None and not engine.running and transfer is not None and transfer.reqs > 0


def _judge_by_outcomes(wait: Wait, track: RankTrack, around: Surroundings) -> Finding | None:
    """Judge a queue that has not moved although hand-offs of the rank have finished."""
    done = track.ended.last_done if track.ended is not None else None
    if done is None or around.now - done >= around.stuck_after:
        return None
    return Finding(Verdict.UNKNOWN, f"{_stands_still(wait)}, but hand-offs finish: its numbers may not be true")


def _judge_by_computing(
    wait: Wait, track: RankTrack, around: Surroundings, shared: EngineSample | None
) -> Finding | None:
    """Judge a queue that does not move while a prefill engine computes a long prompt."""
    if wait.still >= LONGEST_PROMPT * around.stuck_after:
        return None
    if wait.name.startswith(Role.PREFILL):
        computes = (shared is not None and shared.running > 0) or ran_lately(track, around.now)
        return Finding(Verdict.SATURATED, f"{wait}; the engine computes prompts") if computes else None
    if around.computing and (wait.name == "decode_transfer" or _waits_for_landing(wait, track, shared)):
        return Finding(Verdict.SATURATED, f"{wait}; prefill engines compute prompts")
    return None


def _load(track: RankTrack, shared: EngineSample | None) -> EngineSample | None:
    """Return the report of the rank's scheduler, or of the one that counts its requests."""
    return shared if track.latest.engine is None and not track.latest.engine_error else track.latest.engine


def _judge_moving(wait: Wait) -> Finding:
    if wait.begun:
        return Finding(Verdict.SATURATED, f"{wait}; the queue moves")
    return Finding(Verdict.UNKNOWN, f"{wait}; not observed for long enough to see whether the queue moves")


def _judge_wait_for_others(wait: Wait, around: Surroundings) -> Finding:
    """Judge a queue that only the other side can move. No engine there is silent."""
    role = WAITS_FOR_OTHER_SIDE.get(wait.name, Role.PREFILL)
    if not around.candidates:
        return Finding(Verdict.BLOCKED, f"{_stands_still(wait)}; there is no {role} engine")
    if around.busy:
        return _blocked(wait, around.busy, "also has overdue requests")
    if around.unproved:
        why = f"nothing shows whether {', '.join(around.unproved)} runs"
        return Finding(Verdict.UNKNOWN, f"{_stands_still(wait)}; {why}")
    return Finding(Verdict.STUCK, f"{_stands_still(wait)}, though every {role} engine runs")


def _judge_wait_for_memory(wait: Wait, track: RankTrack, shared: EngineSample | None) -> Finding | None:
    """Judge a queue that waits for memory, which running requests may hold.

    The loop is known to run here. So an engine that does not answer is slow, not hung.
    """
    why, engine = track.latest.engine_error, _load(track, shared)
    if engine is None:
        return Finding(Verdict.UNKNOWN, f"{_stands_still(wait)}; its engine does not report running requests ({why})")
    if engine.running > 0:
        return Finding(Verdict.SATURATED, f"{wait} that running requests hold")
    return None


def _blocked_by_silence(wait: Wait, around: Surroundings) -> Finding:
    shown = ", ".join(f"{name} {silence}" for name, silence in around.silent.items())
    return Finding(Verdict.BLOCKED, f"{wait}; {shown}", tuple(around.silent))


def _blocked_by_absence(wait: Wait, around: Surroundings) -> Finding | None:
    """Blocked by engines of the other side that do not answer, or that resumed or departed recently."""
    if around.unseen:
        return _blocked(wait, around.unseen, "did not answer")
    if around.resumed:
        return _blocked(wait, around.resumed, "resumed recently")
    if around.departed:
        return _blocked(wait, around.departed, "ended or was replaced recently")
    return None


def _blocked(wait: Wait, names: tuple[str, ...], why: str) -> Finding:
    return Finding(Verdict.BLOCKED, f"{_stands_still(wait)}; {', '.join(names)} {why}", names)


def _stands_still(wait: Wait) -> str:
    return f"{wait} and nothing moves"
