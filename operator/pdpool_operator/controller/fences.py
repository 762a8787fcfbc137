"""Sends fences to engines: proofs that a peer has ended. Repeats them as needed and remembers which were sent."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
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
from ..plan.model import Event, EventType, Fence, Whom
from ..runtime.engines import Engines, Told
from ..status.chain import find

AGAIN = timedelta(seconds=15)
"""Time after which a fence that had no effect is sent again. It doubles with each try.

The effect of a fence shows at the next sample, or when the holder's last connections to the peer have closed.
"""
AT_LATEST = timedelta(minutes=10)
PATIENCE = timedelta(seconds=30)
"""How long a hold must have been without possible proof before it is reported. Pods are not observed all at once."""

Hold = tuple[str, int, str]
"""Name of the holder's pod, rank, incarnation of the peer."""
Looks = Mapping[str, Mapping[int, RankSample]]
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
        self._given: dict[Whom, _Given] = {}
        self._pools: dict[Key, _Pool] = {}

    def look(self, pools: Mapping[Key, ObservedPool]) -> list[Key]:
        """Decide again; return the pools that need a fence sent or a new status."""
        looks = self._sampler.samples()
        self._pools = {key: self._decide(key, pool, looks) for key, pool in pools.items()}
        self._forget(looks)
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
        given = self._given.get(fence.whom)
        return given is None or self._now() - given.at >= given.wait

    async def give(self, fences: Sequence[Fence]) -> tuple[Event, ...]:
        """Send all fences; return the events that describe the results."""
        return tuple(event for one in await self.send(fences) if (event := _event(one)) is not None)

    async def send(self, fences: Sequence[Fence]) -> Sequence[Told]:
        """Send all fences; return the results."""
        told = await asyncio.gather(*(self._engines.fence(fence) for fence in fences))
        for one in told:
            self._count(one.outcome)
            whom = one.fence.whom
            wait = min(2 * self._given[whom].wait, AT_LATEST) if whom in self._given else AGAIN
            self._given[whom] = _Given(self._now(), wait)
        return told

    def _decide(self, key: Key, pool: ObservedPool, looks: Looks) -> "_Pool":
        fencing = plan_fences(_pods(pool), looks, self._lives.of, self._nodes.of)
        before, uid, now = self._pools.get(key), pool.pool.metadata.uid, self._now()
        if before is None or before.uid != uid:
            before = None
        # Holds that the status already shows have waited under the previous operator.
        fresh = now if before is not None or not _told(pool) else now - PATIENCE
        since = {_hold(one): fresh for one in fencing.unproven}
        if before is not None:
            since |= {hold: at for hold, at in before.since.items() if hold in since}
        lasting = tuple(one for one in fencing.unproven if now - since[_hold(one)] >= PATIENCE)
        return _Pool(uid, fencing.fences, since, lasting, before.shown if before is not None else ())

    def _forget(self, looks: Looks) -> None:
        """Forget fences for memory that is no longer held."""
        held = {
            (uid, rank, hold.incarnation)
            for uid, ranks in looks.items()
            for rank, sample in ranks.items()
            if sample.connector is not None
            for hold in sample.connector.held_for
        }
        self._given = {whom: given for whom, given in self._given.items() if whom in held}


@dataclass(frozen=True, slots=True)
class _Given:
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


def _told(pool: ObservedPool) -> bool:
    """Whether the pool's status already reports holds without possible proof."""
    condition = find(pool.pool.status.conditions, ConditionType.HOLDS_PROVABLE)
    return condition is not None and condition.status is ConditionStatus.FALSE


def _hold(one: Unproven) -> Hold:
    return one.holder, one.rank, one.hold.incarnation


def _event(told: Told) -> Event | None:
    fence = told.fence
    what = f"{fence.pod} rank {fence.rank}: process {fence.incarnation[:8]} of {fence.peer} has ended"
    if told.outcome == "given":
        message = f"{what} ({fence.proof}), the memory held for it may be reused"
        return Event(EventType.NORMAL, Reason.FENCED_PEER, message)
    if told.outcome == "refused":
        return Event(
            EventType.WARNING, Reason.FENCE_REFUSED, f"{what}, but the connector refused the fence: {told.words}"
        )
    return None
