"""Sends fences to engines: proofs that a peer has ended. Repeats them as needed and remembers which were sent."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..api.base import ConditionStatus
from ..api.reasons import ConditionType, Reason
from ..observe.keys import Key
from ..observe.lives import Lives
from ..observe.model import ObservedPod, ObservedPool
from ..observe.pod_nodes import PodNodes
from ..observe.sampler import Sampler
from ..observe.samples import RankSample
from ..plan.fences import Fencing, Unproven, plan_fences
from ..plan.model import Event, EventType, Fence, HoldKey
from ..status.chain import find
from .engines import Engines, FenceResult

AGAIN = timedelta(seconds=15)
"""Time after which a fence that had no effect is sent again. It doubles with each try.

The effect of a fence shows at the next sample, or when the holder's last connections to the peer have closed.
"""
AT_LATEST = timedelta(minutes=10)
PATIENCE = timedelta(seconds=30)
"""How long a hold must have been without possible proof before it is reported. Pods are not observed all at once."""

Hold = tuple[str, int, str]
"""Name of the holder's pod, rank, incarnation of the peer."""
Samples = Mapping[str, Mapping[int, RankSample]]
"""By UID of the pod, then by rank."""


class Fencer:
    """Decides with `plan_fences` from samples and kubelet reports, once a second for all pools."""

    def __init__(
        self,
        engines: Engines,
        sampler: Sampler,
        lives: Lives,
        nodes: PodNodes,
        now: Callable[[], datetime],
        count: Callable[[str], None],
    ) -> None:
        self._engines, self._sampler, self._lives, self._nodes = engines, sampler, lives, nodes
        self._now, self._count = now, count
        self._sent: dict[HoldKey, _Sent] = {}
        self._pools: dict[Key, _Pool] = {}

    def pools_due(self, pools: Mapping[Key, ObservedPool]) -> list[Key]:
        """Decide again; return the pools that need a fence sent or a new status."""
        samples = self._sampler.samples()
        self._pools = {key: self._decide(key, pool, samples) for key, pool in pools.items()}
        self._forget(samples)
        return [
            key for key, mine in self._pools.items() if mine.lasting != mine.shown or any(map(self.due, mine.fences))
        ]

    def take(self, key: Key, pool: ObservedPool) -> Fencing:
        """Return the decisions on a pool: fences to send now, and holds without possible proof.

        The caller sends the fences and shows the holds in the status.
        """
        mine = self._pools.get(key)
        if mine is None or mine.uid != pool.pool.metadata.uid:
            mine = self._pools[key] = self._decide(key, pool, self._sampler.samples())
        mine.shown = mine.lasting
        return Fencing(tuple(filter(self.due, mine.fences)), mine.lasting)

    def due(self, fence: Fence) -> bool:
        """Whether a fence was never sent, or so long ago that it is sent again."""
        sent = self._sent.get(fence.hold_key)
        return sent is None or self._now() - sent.at >= sent.wait

    async def send(self, fences: Sequence[Fence]) -> Sequence[FenceResult]:
        """Send all fences; return the results."""
        results = await asyncio.gather(*(self._engines.fence(fence) for fence in fences))
        for one in results:
            self._count(one.outcome)
            hold = one.fence.hold_key
            wait = min(2 * self._sent[hold].wait, AT_LATEST) if hold in self._sent else AGAIN
            self._sent[hold] = _Sent(self._now(), wait)
        return results

    def _decide(self, key: Key, pool: ObservedPool, samples: Samples) -> "_Pool":
        fencing = plan_fences(_pods(pool), samples, self._lives.of, self._nodes.of)
        before, uid, now = self._pools.get(key), pool.pool.metadata.uid, self._now()
        if before is None or before.uid != uid:
            before = None
        # Holds that the status already shows have waited under the previous operator.
        fresh = now if before is not None or not _shows_unproven(pool) else now - PATIENCE
        since = {_hold(one): fresh for one in fencing.unproven}
        if before is not None:
            since |= {hold: at for hold, at in before.since.items() if hold in since}
        lasting = tuple(one for one in fencing.unproven if now - since[_hold(one)] >= PATIENCE)
        return _Pool(uid, fencing.fences, since, lasting, before.shown if before is not None else ())

    def _forget(self, samples: Samples) -> None:
        """Forget fences for memory that is no longer held."""
        held = {
            (uid, rank, hold.incarnation)
            for uid, ranks in samples.items()
            for rank, sample in ranks.items()
            if sample.connector is not None
            for hold in sample.connector.held_for
        }
        self._sent = {hold: sent for hold, sent in self._sent.items() if hold in held}


@dataclass(frozen=True, slots=True)
class _Sent:
    """A fence that was sent, or that failed to be sent."""

    at: datetime
    wait: timedelta
    """Time until it is sent again, if it has had no effect."""


@dataclass(slots=True)
class _Pool:
    """Decisions on one pool."""

    uid: str
    fences: tuple[Fence, ...]
    since: Mapping[Hold, datetime]
    """When each hold without possible proof was first seen."""
    lasting: tuple[Unproven, ...]
    shown: tuple[Unproven, ...]
    """The part of it that the status shows."""


def _pods(pool: ObservedPool) -> list[ObservedPod]:
    return [one.pod for one in pool.own if one.pod is not None]


def _shows_unproven(pool: ObservedPool) -> bool:
    """Whether the pool's status already reports holds without possible proof."""
    condition = find(pool.pool.status.conditions, ConditionType.HOLDS_PROVABLE)
    return condition is not None and condition.status is ConditionStatus.FALSE


def _hold(one: Unproven) -> Hold:
    return one.holder, one.rank, one.hold.incarnation


def fence_events(results: Iterable[FenceResult]) -> tuple[Event, ...]:
    """Return the events that describe the results. A fence without an answer has none: it is sent again."""
    return tuple(event for one in results if (event := _event(one)) is not None)


def _event(result: FenceResult) -> Event | None:
    fence = result.fence
    what = f"{fence.pod} rank {fence.rank}: process {fence.incarnation[:8]} of {fence.peer} has ended"
    if result.outcome == "given":
        message = f"{what} ({fence.proof}), the memory held for it may be reused"
        return Event(EventType.NORMAL, Reason.FENCED_PEER, message)
    if result.outcome == "refused":
        message = f"{what}, but the connector refused the fence: {result.words}"
        return Event(EventType.WARNING, Reason.FENCE_REFUSED, message)
    return None
