"""Judges a rank without pdpool's connector, by its scheduler's own report.

The report has the lengths of queues, but neither ages nor counters. So a queue moved for certain only if it was seen
empty. With  waited(q)  = time since the queue q was last seen empty:

    no answer of the scheduler                  Unknown
    waited(q) >= stuckAfter for a queue q       Unknown, because requests may have moved or not
    requests wait or run                        Flowing
    nothing                                     Idle

No rank is judged Stuck, Blocked or Saturated: each of these needs evidence that only the connector has.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

from .model import Finding, Verdict
from .track import QueueTrack, RankTrack


def judge_native_rank(track: RankTrack, stuck_after: timedelta, now: datetime, *, current: bool) -> Finding:
    """Return the verdict on one rank whose pod has no connector of pdpool. `current`: its last sample is recent."""
    engine = track.latest.engine
    if not current:
        return Finding(Verdict.UNKNOWN, "the engine was not sampled lately")
    if engine is None:
        return Finding(Verdict.UNKNOWN, f"the engine does not report its queues ({track.latest.engine_error})")
    waits = {name: reqs for name, reqs in sorted(engine.queues.items()) if reqs}
    if not waits:
        running = engine.running + engine.waiting
        return _flowing(f"{running} requests in the engine") if running else Finding(Verdict.IDLE, "nothing waits")
    shown = "; ".join(f"{reqs} in {name}" for name, reqs in waits.items())
    longest = max(waits, key=lambda name: waited(track.queues, name, now))
    since = waited(track.queues, longest, now)
    if since < stuck_after:
        return _flowing(shown)
    hidden = "transfer.connector Native does not show whether it moves"
    message = f"{shown}; {longest} was not seen empty for {int(since.total_seconds())} s, and {hidden}"
    return Finding(Verdict.UNKNOWN, message)


def waited(queues: Mapping[str, QueueTrack], name: str, now: datetime) -> timedelta:
    """Return the time since the queue was last seen empty."""
    seen = queues.get(name)
    return now - seen.still_since if seen is not None else timedelta(0)


def _flowing(message: str) -> Finding:
    return Finding(Verdict.FLOWING, message)
