"""Requests that an engine keeps in a hand-off queue although their hand-off has ended.

The engine shows its queues, and the connector counts its hand-offs in the same queues:

    orphaned(q)  <=>  the engine's oldest request in q is LAG or more older than every hand-off in q of all ranks

    leaked(q)    <=>  q has been orphaned for LEAKED_AFTER, with the same oldest request. In the mean of these samples,
                      the engine showed more than half a request more in q than the connector had hand-offs in it

The connector's count may be 0.1 s older than the queue. So single samples are wrong by some requests, and their mean is
not. Rounded, it is the number of leaked requests.

An engine notices the end of a hand-off in a turn of its loop. So nothing is orphaned while the loop does not run. A
request waits until all ranks have ended its hand-off, and until failed ones are settled. So nothing is orphaned while
a rank does not answer, or has unsettled hand-offs.
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
    """Time of the first sample with the same oldest request."""
    entered: datetime
    """When the oldest of them entered the queue."""
    surplus: int
    """Requests that the engine showed, less the connector's hand-offs: the sum over all samples."""
    samples: int = 1


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
    oldest = timedelta(seconds=shown.oldest_s or 0.0)
    if not shown.reqs or oldest - timedelta(seconds=known_s) < LAG:
        return None
    entered, surplus = at - oldest, shown.reqs - handoffs.reqs
    if before is None or abs(entered - before.entered) > SAME:
        return Orphans(at, entered, surplus)
    return replace(before, surplus=before.surplus + surplus, samples=before.samples + 1)


def leaked(orphans: Mapping[str, Orphans], at: datetime) -> dict[str, int]:
    """Return how many requests of each queue have leaked. `at`: time of the newest answer."""
    return {
        name: max(round(found.surplus / found.samples), 1)
        for name, found in orphans.items()
        if at - found.since >= LEAKED_AFTER and 2 * found.surplus > found.samples
    }
