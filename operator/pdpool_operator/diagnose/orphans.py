"""Requests that an engine keeps in a hand-off queue although their hand-off has ended.

The engine shows its queues, and the connector counts its hand-offs in the same queues:

    orphaned(q)  <=>  the engine shows more requests in q than the connector has hand-offs in it,
                      and its oldest one is LAG or more older than every hand-off in q of all ranks,
                      and than every hold

    leaked(q)    <=>  q has been orphaned for LEAKED_AFTER, with the same oldest request

An engine notices the end of a hand-off in a turn of its loop. So nothing is orphaned while the loop does not run. A
request waits until all ranks have ended its hand-off. So nothing is orphaned while a rank does not answer.

Their number is the least surplus of that time: what a queue had more than the connector, at every sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ..observe.model import ConnectorSample, QueueSample, RankSample

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
    before: Mapping[str, Orphans], sample: RankSample, ranks: Sequence[RankSample]
) -> dict[str, Orphans]:
    """Return the orphans of each queue of a rank after one more look.

    Args:
        before: After the last look.
        sample: The rank's answer. Its engine's loop runs.
        ranks: Samples of all ranks of the instance, from the same look.
    """
    connectors = [rank.connector for rank in ranks]
    if sample.connector is None or None in connectors:
        return {}
    found = {}
    for name, handoffs in sample.connector.handoffs.items():
        queue = sample.connector.queues.get(name)
        known_s = max(_oldest_s(connector, name) for connector in connectors if connector is not None)
        if queue is not None and (now := _step(before.get(name), queue, handoffs, known_s, sample.at)) is not None:
            found[name] = now
    return found


def _oldest_s(connector: ConnectorSample, queue: str) -> float:
    """Return the age of the oldest hand-off of a queue, or of the oldest hold."""
    handoffs = connector.handoffs.get(queue)
    oldest_s = handoffs.oldest_s if handoffs is not None else None
    return max(oldest_s or 0.0, connector.held_oldest_s or 0.0)


def _step(
    before: Orphans | None, queue: QueueSample, handoffs: QueueSample, known_s: float, at: datetime
) -> Orphans | None:
    surplus, oldest = queue.reqs - handoffs.reqs, timedelta(seconds=queue.oldest_s or 0.0)
    if surplus <= 0 or oldest - timedelta(seconds=known_s) < LAG:
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
