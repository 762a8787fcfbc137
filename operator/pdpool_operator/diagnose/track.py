"""State that is kept of a rank's samples to judge progress. Its size is constant, however long the history.

A queue is *still* since the last sample at which it was empty, had another `moved_total` than before, or belonged to
another incarnation. A queue without a counter is still since it was last seen empty. Samples without an answer change
nothing. The counter in the next answer shows whether something moved meanwhile. The same holds for an answer without
the counter: until it is read again, it proves no stillness.

The counters of an engine without our connector also count its health probes: SGLang's `/health` sends a request of one
token through the queues while no request runs. So such a queue has moved when its counter has changed and the engine
has worked. It has worked if it finished a request or computed more tokens than probes do.

An engine's loop *resumes* when it runs after a gap of `GAP_S` or longer. An engine that waited for it needs time to
catch up, and is not at fault until then. A loop that is paused on request counts as one that does not run. So does one
whose connector hangs: the connector's numbers then stay as they were.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from ..observe.samples import ConnectorSample, Counters, QueueSample, RankSample
from .orphans import Orphans, follow_orphans, leaked
from .outcomes import OutcomeTrack, count

GAP_S = 5.0
"""Seconds without a run of the engine's loop that no ordinary step explains."""

WAITED_S = 15.0
"""Age of a request, in seconds, from which requests of its queue may end at their deadlines."""

PROBE_TOKENS = 8
"""More tokens than health probes compute between two samples."""


@dataclass(frozen=True, slots=True)
class QueueTrack:
    """Progress of one queue."""

    moved_total: int | None
    still_since: datetime
    begun: bool
    """The start of the stillness was observed. Otherwise it began with the first sample, or earlier."""
    counted_at: datetime | None = None
    """When its counter was last read."""


@dataclass(frozen=True, slots=True)
class WorkTrack:
    """Work of an engine that only its own counters show."""

    counters: Counters
    """The last value of each counter. Only `tokens` and `finished` are kept."""
    still_since: datetime
    """When its work was last seen to go on, or it was first sampled."""
    seen: bool = False
    """Its work was seen to go on since the first sample."""
    tokens_at: datetime | None = None
    """When its tokens were last read."""


@dataclass(frozen=True, slots=True)
class RankTrack:
    """State that is kept of one rank of one pod."""

    latest: RankSample
    """The last sample, answered or not."""
    answer: ConnectorSample | None = None
    """The connector's last answer. `None` if it never answered."""
    incarnation: str = ""
    """From the connector's last answer. Empty if it never answered."""
    queues: Mapping[str, QueueTrack] = field(default_factory=dict)
    beat_age_s: float = 0.0
    """From the connector's last answer, or the length of a reported pause, or `hung_s`. 0 if it reports none."""
    hung_s: float = 0.0
    """For how long the connector's own loop hangs. Two answers show it: the time grows from one to the next."""
    paused_since: datetime | None = None
    """Time of the first sample of a pause that goes on."""
    paused_at: datetime | None = None
    """Time of the last sample at which the engine had been paused for `GAP_S`."""
    resumed_at: datetime | None = None
    """Time of the sample at which the engine's loop last resumed after a gap."""
    gap_s: float = 0.0
    """Length of that gap, as last seen."""
    ran_at: datetime | None = None
    """Time of the last sample at which the engine ran requests."""
    ended: OutcomeTrack | None = None
    """Hand-offs that ended at this incarnation. `None` if its connector does not report them."""
    work: WorkTrack | None = None
    """`None` for an engine with our connector, or without counters of its work."""
    waited_at: datetime | None = None
    """Time of the last sample with a request of `WAITED_S` or older in a queue."""
    answered_at: datetime | None = None
    """Time of the connector's last answer."""
    orphans: Mapping[str, Orphans] = field(default_factory=dict)
    """By queue."""

    @property
    def leaked(self) -> Mapping[str, int]:
        """How many requests of each queue have leaked, as of the connector's last answer."""
        return {} if self.answered_at is None else leaked(self.orphans, self.answered_at)

    @property
    def answered(self) -> bool:
        """Whether its source of verdicts has answered: the connector, or else the engine."""
        return bool(self.incarnation) or (not self.latest.has_connector and self.latest.engine is not None)


def follow(track: RankTrack | None, sample: RankSample, ranks: Sequence[RankSample] = ()) -> RankTrack:
    """Return the track after one more sample. A sample of another pod starts a new track.

    Args:
        track: After the last sample. `None` before the first.
        sample: Of one rank.
        ranks: Of all ranks of the instance, from the same look. May be empty if it has only one.
    """
    if track is None or track.latest.pod_uid != sample.pod_uid:
        track = RankTrack(sample)
    if not sample.has_connector:
        return _follow_engine(track, sample) if sample.engine is not None else replace(track, latest=sample)
    if sample.connector is None:
        return replace(track, latest=sample)
    same = track.incarnation == sample.connector.incarnation
    paused_since = _paused_since(track.paused_since if same else None, sample)
    pause_s = (sample.at - paused_since).total_seconds() if paused_since is not None else 0.0
    hung_s = _hung_s(track.answer if same else None, sample.connector)
    beat_age_s = max(sample.connector.beat_age_s or 0.0, pause_s, hung_s)
    runs = beat_age_s < GAP_S
    resumed = same and runs and track.beat_age_s >= GAP_S
    return RankTrack(
        latest=sample,
        answer=sample.connector,
        incarnation=sample.connector.incarnation,
        queues=_progress(track.queues if same else {}, sample.connector.queues, sample.at),
        beat_age_s=beat_age_s,
        hung_s=hung_s,
        paused_since=paused_since,
        paused_at=sample.at if paused_since is not None and not runs else track.paused_at if same else None,
        ended=_ended(track.ended if same else None, sample.connector, sample.at),
        resumed_at=sample.at if resumed else track.resumed_at,
        gap_s=track.beat_age_s if resumed else track.gap_s,
        ran_at=sample.at if sample.engine is not None and sample.engine.running else track.ran_at if same else None,
        waited_at=sample.at if _has_waited(sample.connector) else track.waited_at if same else None,
        answered_at=sample.at,
        orphans=follow_orphans(track.orphans if same else {}, sample, ranks or [sample]) if runs else {},
    )


def _hung_s(before: ConnectorSample | None, now: ConnectorSample) -> float:
    """Return for how long the connector's loop hangs. A long turn that has ended keeps its length."""
    hangs = before is not None and GAP_S <= before.loop_lag_s < now.loop_lag_s
    return now.loop_lag_s if hangs else 0.0


def _paused_since(before: datetime | None, sample: RankSample) -> datetime | None:
    return (before or sample.at) if sample.connector is not None and sample.connector.paused else None


def _has_waited(connector: ConnectorSample) -> bool:
    return any(queue.reqs and (queue.oldest_s or 0.0) >= WAITED_S for queue in connector.queues.values())


def _ended(before: OutcomeTrack | None, connector: ConnectorSample, at: datetime) -> OutcomeTrack | None:
    return None if connector.ended is None else count(before, connector.ended, at)


def _follow_engine(track: RankTrack, sample: RankSample) -> RankTrack:
    """Return the track of a rank without our connector after an answer of its engine."""
    engine, at = sample.engine, sample.at
    assert engine is not None
    worked = _worked(track.work, engine.counters)
    ran = worked or (worked is None and engine.running > 0)
    return replace(
        track,
        latest=sample,
        queues=_progress(track.queues, sample.queues or {}, at, worked=worked),
        ran_at=at if ran else track.ran_at,
        work=_work(track.work, engine.counters, at, worked=worked),
    )


def _worked(before: WorkTrack | None, now: Counters) -> bool | None:
    """Return whether an engine has worked on requests since the last sample. None if nothing shows it."""
    steps = [
        (least, abs(after - earlier))  # a counter that falls belongs to a new process
        for least, earlier, after in (
            (PROBE_TOKENS, before.counters.tokens if before else None, now.tokens),
            (0, before.counters.finished if before else None, now.finished),
        )
        if earlier is not None and after is not None
    ]
    return any(step > least for least, step in steps) if steps else None


def _work(before: WorkTrack | None, now: Counters, at: datetime, *, worked: bool | None) -> WorkTrack | None:
    old = before.counters if before is not None else Counters()
    tokens = now.tokens if now.tokens is not None else old.tokens
    finished = now.finished if now.finished is not None else old.finished
    if tokens is None and finished is None:
        return None
    kept = Counters(tokens=tokens, finished=finished)
    tokens_at = at if now.tokens is not None else before.tokens_at if before is not None else None
    if before is None or worked:
        return WorkTrack(kept, at, seen=before is not None, tokens_at=tokens_at)
    return replace(before, counters=kept, tokens_at=tokens_at)


def _progress(
    before: Mapping[str, QueueTrack], queues: Mapping[str, QueueSample], at: datetime, *, worked: bool | None = None
) -> dict[str, QueueTrack]:
    """Return the progress of the queues of an answer. `worked`: whether the engine has worked, if that is known."""
    progress: dict[str, QueueTrack] = {}
    for name, queue in queues.items():
        earlier = before.get(name)
        counter = _counter(earlier, queue, worked=worked)
        kept_at = earlier.counted_at if earlier is not None and counter is not None else None
        counted_at = at if queue.moved_total is not None else kept_at
        if earlier is not None and queue.reqs > 0 and counter == earlier.moved_total:
            progress[name] = replace(earlier, counted_at=counted_at)
        else:
            begun = earlier is not None or queue.reqs == 0
            progress[name] = QueueTrack(counter, at, begun=begun, counted_at=counted_at)
    return progress


def _counter(earlier: QueueTrack | None, queue: QueueSample, *, worked: bool | None) -> int | None:
    """Return the counter by which a queue's movement is judged.

    While requests wait, a counter that the answer lacks, or that only health probes changed, keeps its earlier value.
    """
    if earlier is None or earlier.moved_total is None or not queue.reqs:
        return queue.moved_total
    return earlier.moved_total if queue.moved_total is None or worked is False else queue.moved_total
