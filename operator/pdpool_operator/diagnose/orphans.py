"""Requests that an engine keeps in a hand-off queue although their hand-off has ended.

The engine shows its queues, and the connector counts its hand-offs in the same queues:

    orphaned(q)  <=>  the engine shows more requests in q than the connector has hand-offs in it,
                      and its oldest one is LAG or more older than the oldest of these and of all holds

    leaked(q)    <=>  q has been orphaned for LEAKED_AFTER, with the same oldest request

An engine notices the end of a hand-off in a turn of its loop. So nothing is orphaned while the loop does not run.

Their number is the least surplus of that time: what a queue had more than the connector, at every sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ..observe.model import ConnectorSample, QueueSample

LAG = timedelta(seconds=5)
"""More than an engine takes to notice that a hand-off has ended."""
LEAKED_AFTER = timedelta(seconds=15)
"""Five samples. A request is not called leaked while the engine may only be slow."""
SAME = timedelta(seconds=2)
"""Times of entry that differ by less are the same one, computed from two samples."""


@dataclass(frozen=True, slots=True)
class Orphans:
    """Orphaned requests of one queue."""

    since: datetime
    """Time of the sample that first showed them."""
    entered: datetime
    """When the oldest of them entered the queue."""
    reqs: int


def follow_orphans(
    before: Mapping[str, Orphans], connector: ConnectorSample, at: datetime, *, runs: bool
) -> dict[str, Orphans]:
    """Return the orphans of each queue after one more answer. `runs`: whether the engine's loop does."""
    if not runs:
        return {}
    found = {
        name: _step(before.get(name), queue, connector.handoffs[name], connector.held_oldest_s or 0.0, at)
        for name, queue in connector.queues.items()
        if name in connector.handoffs
    }
    return {name: orphans for name, orphans in found.items() if orphans is not None}


def _step(
    before: Orphans | None, queue: QueueSample, handoffs: QueueSample, held_s: float, at: datetime
) -> Orphans | None:
    surplus = queue.reqs - handoffs.reqs
    known = timedelta(seconds=max(handoffs.oldest_s or 0.0, held_s))
    oldest = timedelta(seconds=queue.oldest_s or 0.0)
    if surplus <= 0 or oldest - known < LAG:
        return None
    entered = at - oldest
    if before is None or abs(entered - before.entered) > SAME:
        return Orphans(at, entered, surplus)
    return replace(before, reqs=min(before.reqs, surplus))


def leaked(orphans: Mapping[str, Orphans], at: datetime) -> dict[str, int]:
    """Return how many requests of each queue have leaked. `at`: time of the newest answer."""
    return {name: found.reqs for name, found in orphans.items() if at - found.since >= LEAKED_AFTER}


def living(connector: ConnectorSample, leaked_reqs: Mapping[str, int]) -> dict[str, QueueSample]:
    """Return the queues of an answer without leaked requests. Ages are those of hand-offs, where these are counted."""
    queues = {}
    for name, queue in connector.queues.items():
        counted = connector.handoffs.get(name)
        reqs = max(queue.reqs - leaked_reqs.get(name, 0), 0)
        oldest_s = queue.oldest_s if counted is None else counted.oldest_s or 0.0
        queues[name] = replace(queue, reqs=reqs, oldest_s=oldest_s if reqs else None)
    return queues
