"""How requests ended lately: counters of connectors and routers, as increments within a window.

A counter that falls belongs to a new process. Its value then counts from 0. The first sample of a process only sets the
starting point, so that what happened before this operator started is not counted as recent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ..observe.samples import Tally

WINDOW = timedelta(seconds=60)
"""Requests that ended longer ago are forgotten."""
LATEST = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class OutcomeTrack:
    """Requests that ended at one engine, by one source."""

    total: Tally
    """The counters at the newest sample."""
    recent: tuple[tuple[datetime, Tally], ...] = ()
    """Increments with the time of their sample. Samples without an increment have no entry."""

    def since(self, moment: datetime, until: datetime = LATEST) -> Tally:
        """Return how many requests ended after `moment`, and not after `until`."""
        done = failed = 0
        for at, tally in reversed(self.recent):
            if at <= moment:
                break
            if at <= until:
                done, failed = done + tally.done, failed + tally.failed
        return Tally(done, failed)

    @property
    def last_done(self) -> datetime | None:
        """When the newest sample showed a success, within the window."""
        return max((at for at, tally in self.recent if tally.done), default=None)

    @property
    def last_failed(self) -> datetime | None:
        """When the newest sample showed a failure, within the window."""
        return max((at for at, tally in self.recent if tally.failed), default=None)


def total_of(tallies: Iterable[Tally]) -> Tally:
    """Return the sum of tallies."""
    done = failed = 0
    for tally in tallies:
        done, failed = done + tally.done, failed + tally.failed
    return Tally(done, failed)


def count(track: OutcomeTrack | None, total: Tally, at: datetime) -> OutcomeTrack:
    """Return the track after one more sample."""
    if track is None:
        return OutcomeTrack(total)
    step = Tally(_step(track.total.done, total.done), _step(track.total.failed, total.failed))
    kept = tuple(entry for entry in track.recent if at - entry[0] <= WINDOW)
    return OutcomeTrack(total, (*kept, (at, step)) if step != Tally() else kept)


def _step(before: int, now: int) -> int:
    return now - before if now >= before else now


def count_router(
    known: Mapping[str, OutcomeTrack] | None, totals: Mapping[str, Tally], at: datetime
) -> dict[str, OutcomeTrack]:
    """Return the tracks of the requests that one router sent, by URL of the engine, after one more sample of it.

    An engine that is new in a known router's counters has them from 0.
    """
    return {
        url: count(known.get(url, OutcomeTrack(Tally())) if known is not None else None, total, at)
        for url, total in totals.items()
    }
