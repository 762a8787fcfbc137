"""What must be remembered of a rank's samples to judge progress: constant size, however long the history.

A queue is *still* since the last look at which it was empty, had another `moved_total` than before, or belonged to
another incarnation. Looks that got no answer change nothing: the next answer shows by its counter whether something
moved meanwhile.

An engine's loop is seen to *resume* when it runs after it had not for `GAP_S` or longer: whoever waited for it is not
at fault before it has had time to catch up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from ..observe.model import ConnectorSample, RankSample

GAP_S = 5.0
"""Seconds of silence of an engine's loop that no ordinary step explains."""


@dataclass(frozen=True, slots=True)
class QueueTrack:
    """Progress of one queue."""

    moved_total: int | None
    still_since: datetime
    begun: bool
    """The stillness was seen to begin. Otherwise it is as old as our looking, and may be older."""


@dataclass(frozen=True, slots=True)
class RankTrack:
    """Everything remembered of one rank of one pod."""

    latest: RankSample
    """The last look, answered or not."""
    incarnation: str = ""
    """Of the last answer of the connector; empty when it never answered."""
    queues: Mapping[str, QueueTrack] = field(default_factory=dict)
    beat_age_s: float = 0.0
    """Of the last answer of the connector; 0 for an engine that does not report it."""
    resumed_at: datetime | None = None
    """The look at which the engine's loop was last seen to run again after a gap."""


def follow(track: RankTrack | None, sample: RankSample) -> RankTrack:
    """The track after one more look. A look at another pod begins anew."""
    if track is None or track.latest.pod_uid != sample.pod_uid:
        track = RankTrack(sample)
    if sample.connector is None:
        return replace(track, latest=sample)
    same = track.incarnation == sample.connector.incarnation
    beat_age_s = sample.connector.beat_age_s or 0.0
    return RankTrack(
        latest=sample,
        incarnation=sample.connector.incarnation,
        queues=_progress(track.queues if same else {}, sample.connector, sample.at),
        beat_age_s=beat_age_s,
        resumed_at=sample.at if same and beat_age_s < GAP_S <= track.beat_age_s else track.resumed_at,
    )


def _progress(before: Mapping[str, QueueTrack], connector: ConnectorSample, at: datetime) -> dict[str, QueueTrack]:
    progress: dict[str, QueueTrack] = {}
    for name, queue in connector.queues.items():
        earlier = before.get(name)
        if earlier is not None and queue.reqs > 0 and queue.moved_total == earlier.moved_total:
            progress[name] = earlier
        else:
            progress[name] = QueueTrack(queue.moved_total, at, begun=earlier is not None or queue.reqs == 0)
    return progress
