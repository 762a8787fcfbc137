"""State that is kept of a rank's samples to judge progress. Its size is constant, however long the history.

A queue is *still* since the last sample at which it was empty, had another `moved_total` than before, or belonged to
another incarnation. Without our connector there is no counter, and a queue is still since it was last seen empty.
Samples without an answer change nothing. The counter in the next answer shows whether something
moved meanwhile.

An engine's loop *resumes* when it runs after a gap of `GAP_S` or longer. An engine that waited for it needs time to
catch up, and is not at fault until then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from ..observe.model import ConnectorSample, EngineSample, RankSample
from .outcomes import OutcomeTrack, count

GAP_S = 5.0
"""Seconds without a run of the engine's loop that no ordinary step explains."""


@dataclass(frozen=True, slots=True)
class QueueTrack:
    """Progress of one queue."""

    moved_total: int | None
    still_since: datetime
    begun: bool
    """The start of the stillness was observed. Otherwise it began with the first sample, or earlier."""


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
    """From the connector's last answer. 0 for an engine that does not report it."""
    resumed_at: datetime | None = None
    """Time of the sample at which the engine's loop last resumed after a gap."""
    ended: OutcomeTrack | None = None
    """Hand-offs that ended at this incarnation. `None` if its connector does not report them."""

    @property
    def answered(self) -> bool:
        """Whether its source of verdicts has answered: the connector, or else the engine."""
        return bool(self.incarnation) or (not self.latest.has_connector and self.latest.engine is not None)


def follow(track: RankTrack | None, sample: RankSample) -> RankTrack:
    """Return the track after one more sample. A sample of another pod starts a new track."""
    if track is None or track.latest.pod_uid != sample.pod_uid:
        track = RankTrack(sample)
    if sample.connector is None:
        queues = _not_seen_empty(track.queues, sample.engine, sample.at) if not sample.has_connector else track.queues
        return replace(track, latest=sample, queues=queues)
    same = track.incarnation == sample.connector.incarnation
    beat_age_s = sample.connector.beat_age_s or 0.0
    return RankTrack(
        latest=sample,
        answer=sample.connector,
        incarnation=sample.connector.incarnation,
        queues=_progress(track.queues if same else {}, sample.connector, sample.at),
        beat_age_s=beat_age_s,
        ended=_ended(track.ended if same else None, sample.connector, sample.at),
        resumed_at=sample.at if same and beat_age_s < GAP_S <= track.beat_age_s else track.resumed_at,
    )


def _ended(before: OutcomeTrack | None, connector: ConnectorSample, at: datetime) -> OutcomeTrack | None:
    return None if connector.ended is None else count(before, connector.ended, at)


def _not_seen_empty(
    before: Mapping[str, QueueTrack], engine: EngineSample | None, at: datetime
) -> Mapping[str, QueueTrack]:
    """Return since when each queue of an engine without our connector was not seen empty."""
    if engine is None:
        return before
    return {
        name: before[name] if reqs and name in before else QueueTrack(None, at, begun=not reqs)
        for name, reqs in engine.queues.items()
    }


def _progress(before: Mapping[str, QueueTrack], connector: ConnectorSample, at: datetime) -> dict[str, QueueTrack]:
    progress: dict[str, QueueTrack] = {}
    for name, queue in connector.queues.items():
        earlier = before.get(name)
        if earlier is not None and queue.reqs > 0 and queue.moved_total == earlier.moved_total:
            progress[name] = earlier
        else:
            progress[name] = QueueTrack(queue.moved_total, at, begun=earlier is not None or queue.reqs == 0)
    return progress
