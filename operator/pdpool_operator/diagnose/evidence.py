"""Evidence about one rank: its last answer, its queues with requests, and whether its engine runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..observe.samples import ConnectorSample, QueueSample, RankSample
from .track import RankTrack

STALE_S = 15.0
"""A sample that is older than this is out of date: five missed samples at the sampler's usual interval."""
STALE = timedelta(seconds=STALE_S)

TOKENS_LAG = timedelta(seconds=15)
"""SGLang counts the tokens of decode once in 40 steps."""

PAUSED = "engine is paused on request"

PURPOSE = {
    "prefill_bootstrap": "for bootstrap",
    "prefill_inflight": "for the transfer",
    "decode_prealloc": "for memory",
    "decode_transfer": "for the KV cache",
}


@dataclass(frozen=True, slots=True)
class Wait:
    """One queue that has requests."""

    name: str
    purpose: str
    """What its requests wait for, as text."""
    still: timedelta
    """Time since anything moved in it, as far as its counter has been read."""
    begun: bool
    """The start of the stillness was observed."""
    oldest: timedelta | None
    """Age of its oldest request. `None` if its source does not report it."""
    counted: bool
    """A counter shows whether the queue moves. Otherwise it is still since it was last seen empty."""

    def overdue(self, limit: timedelta) -> bool:
        """Whether a request has waited for so long, as far as is known."""
        return (self.oldest if self.oldest is not None else self.still) >= limit

    def stalled(self, limit: timedelta) -> bool:
        """Whether a request has waited for so long, and nothing has moved meanwhile."""
        return self.overdue(limit) and self.still >= limit

    def __str__(self) -> str:
        return f"requests wait {self.purpose}"


def current_queues(track: RankTrack, now: datetime) -> Mapping[str, QueueSample] | None:
    """Return the rank's queues by the best source of its pod, or None if the last answer is out of date."""
    return track.latest.queues if is_current(track, now) else None


def current_connector(track: RankTrack, now: datetime) -> ConnectorSample | None:
    """Return the connector's last answer, or None if it is out of date."""
    return track.latest.connector if is_current(track, now) else None


def is_current(track: RankTrack, now: datetime) -> bool:
    """Whether the last sample is recent enough."""
    return now - track.latest.at <= STALE


def silence_of(track: RankTrack, now: datetime, limit: timedelta) -> str:
    """Return how the engine is known not to run. Empty if it has run within the limit, or does not show it."""
    sample = track.latest
    if not is_current(track, now):
        return ""
    if sample.connector is not None and sample.connector.paused:
        return PAUSED if timedelta(seconds=track.beat_age_s) >= limit else ""
    if sample.connector is not None and timedelta(seconds=track.hung_s) >= limit:
        return "connector loop does not run while its admin endpoint answers"
    if sample.connector is not None:
        silent = timedelta(seconds=sample.connector.beat_age_s or 0.0) >= limit
        return "engine loop does not run while its connector answers" if silent else ""
    if sample.has_connector or sample.engine is None or not sample.engine.running:
        return ""
    work, lag = track.work, timedelta(seconds=sample.engine.lag_s)
    known = _known_until(work.tokens_at, sample, now) if work is not None else None
    silent = work is not None and known is not None and known - work.still_since >= limit + TOKENS_LAG + lag
    return "engine computes no token while requests run" if silent else ""


def is_overdue(track: RankTrack, now: datetime, limit: timedelta) -> bool:
    """Whether requests wait longer than the limit in a queue of this rank."""
    return any(wait.counted and wait.overdue(limit) for wait in waits_of(track, now))


def oldest_waiting_since(track: RankTrack, now: datetime) -> datetime | None:
    """Return when the rank's oldest request in a hand-off queue began to wait."""
    connector = current_connector(track, now)
    ages = [q.oldest_s for q in connector.queues.values() if q.reqs and q.oldest_s is not None] if connector else []
    return track.latest.at - timedelta(seconds=max(ages)) if ages else None


def waits_of(track: RankTrack, now: datetime) -> Iterator[Wait]:
    """Yield the queues with requests of a current answer. A connector's queue without a counter is left out."""
    sample = track.latest
    lag = timedelta(seconds=sample.engine.lag_s if sample.engine is not None and not sample.has_connector else 0.0)
    for name, queue in sorted((current_queues(track, now) or {}).items()):
        seen = track.queues[name]
        known = _known_until(seen.counted_at, sample, now)
        counted = known is not None
        if queue.reqs > 0 and (counted or not sample.has_connector):
            yield Wait(
                name=name,
                purpose=_purpose(name, sample),
                still=max((known or now) - seen.still_since - lag, timedelta(0)),
                begun=seen.begun,
                oldest=None if queue.oldest_s is None else timedelta(seconds=queue.oldest_s),
                counted=counted,
            )


def _known_until(read_at: datetime | None, sample: RankSample, now: datetime) -> datetime | None:
    """Return the time up to which a counter is known. None if it was not read lately.

    Args:
        read_at: When it was last read.
        sample: The last sample.
        now: The time of the judgement.
    """
    if read_at is None or now - read_at > STALE:
        return None
    return now if read_at == sample.at else read_at


def _purpose(name: str, sample: RankSample) -> str:
    if name == "decode_prealloc" and not sample.has_connector:
        return "for memory or the handshake"
    return PURPOSE[name]


def is_known_to_run(track: RankTrack, now: datetime, limit: timedelta) -> bool:
    """Whether the engine is known to have run within the limit. A connector would report that it has not."""
    work = track.work
    return track.latest.has_connector or (work is not None and work.seen and now - work.still_since < limit)


def ran_lately(track: RankTrack, now: datetime) -> bool:
    """Whether the engine ran requests at a sample so recent that the other side's newest sample may be older."""
    return track.ran_at is not None and now - track.ran_at <= STALE
