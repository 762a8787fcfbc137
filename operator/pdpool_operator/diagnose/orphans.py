"""Requests that an engine keeps in a hand-off queue although their hand-off has ended.

The engine shows its queues, and the connector counts its hand-offs in the same queues:

    orphaned(q)  <=>  the engine shows more requests in q than the connector has hand-offs in it,
                      and its oldest one is LAG or more older than every hand-off in q of all ranks

    leaked(q)    <=>  q has been orphaned for LEAKED_AFTER, with the same oldest request, in at least two of three
                      samples. The connector's count may be 0.1 s older than the queue, so some samples show as many
                      in both

An engine notices the end of a hand-off in a turn of its loop. So nothing is orphaned while the loop does not run. A
request waits until all ranks have ended its hand-off, and until failed ones are settled. So nothing is orphaned while
a rank does not answer, or has unsettled hand-offs.

Their number is the least surplus of that time: what a queue had more than the connector, in each of those samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ..observe.samples import ConnectorSample, QueueSample, RankSample

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
    seen: int = 1
    """Samples that showed them."""
    missed: int = 0
    """Samples that had the same oldest request, and as many hand-offs as requests."""


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
    if sample.connector is None or any(one is None or one.unsettled for one in connectors):
        return {}
    found = {}
    for name, shown in sample.connector.engine_queues.items():
        known_s = max(_oldest_s(connector, name) for connector in connectors if connector is not None)
        handoffs = sample.connector.queues.get(name)
        now = None if handoffs is None else _step(before.get(name), shown, handoffs, known_s, sample.at)
        if now is not None:
            found[name] = now
    return found


def _oldest_s(connector: ConnectorSample, queue: str) -> float:
    handoffs = connector.queues.get(queue)
    return (handoffs.oldest_s or 0.0) if handoffs is not None else 0.0


def _step(
    before: Orphans | None, shown: QueueSample, handoffs: QueueSample, known_s: float, at: datetime
) -> Orphans | None:
    surplus, oldest = shown.reqs - handoffs.reqs, timedelta(seconds=shown.oldest_s or 0.0)
    if oldest - timedelta(seconds=known_s) < LAG:
        return None
    entered = at - oldest
    same = before if before is not None and abs(entered - before.entered) <= SAME else None
    if surplus > 0:
        return Orphans(at, entered, surplus) if same is None else _shown_again(same, surplus)
    return replace(same, missed=same.missed + 1) if same is not None and same.missed < same.seen else None


def _shown_again(before: Orphans, surplus: int) -> Orphans:
    return replace(before, reqs=min(before.reqs, surplus), seen=before.seen + 1)


def leaked(orphans: Mapping[str, Orphans], at: datetime) -> dict[str, int]:
    """Return how many requests of each queue have leaked. `at`: time of the newest answer."""
    return {
        name: found.reqs
        for name, found in orphans.items()
        if at - found.since >= LEAKED_AFTER and found.seen >= 2 * found.missed
    }
