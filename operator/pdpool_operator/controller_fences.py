"""Tells engines of peers that have ended, as often as it takes, and remembers what was told."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from .api.reasons import Reason
from .observe.lives import Lives
from .observe.model import ObservedPod, ObservedPool, PodLife, RankSample
from .observe.sampler import Sampler
from .plan.fences import Fencing, Unproven, plan_fences
from .plan.model import Event, EventType, Fence
from .runtime.engines import Engines, Told

AGAIN = timedelta(seconds=15)
"""A fence that was given shows at the next look, or when the last connections have ended at the holder's end."""
PATIENCE = timedelta(seconds=30)
"""How long a hold must have been without hope of proof before it is told: pods are met one after the other."""

Whom = tuple[str, int, str]
"""UID of the holder's pod, rank, incarnation of the peer."""
Hold = tuple[str, str]
"""Name of the holder's pod, incarnation of the peer."""


class Fencer:
    """Decides by `plan_fences` from what the sampler and the kubelets say now."""

    def __init__(
        self,
        engines: Engines,
        sampler: Sampler,
        lives: Lives,
        now: Callable[[], datetime],
        count: Callable[[str], None],
    ) -> None:
        self._engines, self._sampler, self._lives = engines, sampler, lives
        self._now, self._count = now, count
        self._given: dict[Whom, datetime] = {}
        self._unproven: dict[str, dict[Hold, datetime]] = {}
        """Since when, by UID of the pool."""
        self._shown: dict[str, tuple[Unproven, ...]] = {}

    def due(self, pool: ObservedPool) -> bool:
        """Whether some pod of the pool is to be told something, or people are."""
        fencing = self._plan(pool)
        return bool(fencing.fences) or fencing.unproven != self._shown.get(pool.pool.metadata.uid, ())

    def plan(self, pool: ObservedPool) -> Fencing:
        """What to tell the pods of a pool now, and which of their holds have been without hope for a while.

        The caller does the one and shows the other.
        """
        fencing = self._plan(pool)
        self._shown[pool.pool.metadata.uid] = fencing.unproven
        return fencing

    def gone(self, pool_uid: str) -> None:
        """There is no such pool any more."""
        self._shown.pop(pool_uid, None)
        self._unproven.pop(pool_uid, None)

    def _plan(self, pool: ObservedPool) -> Fencing:
        pods = _pods(pool)
        looks = {target.pod_uid: self._sampler.newest(target.pod_uid) for target in self._sampler.targets()}
        fencing = plan_fences(pods, looks, self._lives_of(looks))
        self._forget(pods, looks)
        due = tuple(fence for fence in fencing.fences if self._is_due(fence))
        return Fencing(due, self._lasting(pool.pool.metadata.uid, fencing.unproven))

    async def give(self, fences: Sequence[Fence]) -> tuple[Event, ...]:
        """Tell them all; the events that say what came of it."""
        told = await asyncio.gather(*(self._engines.fence(fence) for fence in fences))
        for one in told:
            self._count(one.outcome)
            if one.outcome != "unanswered":
                self._given[_whom(one.fence)] = self._now()
        return tuple(event for one in told if (event := _event(one)) is not None)

    def _lives_of(self, looks: Mapping[str, Mapping[int, RankSample]]) -> dict[str, PodLife]:
        named = {
            hold.pod_uid
            for ranks in looks.values()
            for sample in ranks.values()
            if sample.connector is not None
            for hold in sample.connector.held_for
        }
        return {uid: life for uid in named if (life := self._lives.of(uid)) is not None}

    def _is_due(self, fence: Fence) -> bool:
        given = self._given.get(_whom(fence))
        return given is None or self._now() - given >= AGAIN

    def _lasting(self, pool_uid: str, unproven: Sequence[Unproven]) -> tuple[Unproven, ...]:
        now, before = self._now(), self._unproven.get(pool_uid, {})
        since = {(one.holder, one.hold.incarnation): now for one in unproven}
        since |= {key: before[key] for key in since if key in before}
        self._unproven[pool_uid] = since
        return tuple(one for one in unproven if now - since[one.holder, one.hold.incarnation] >= PATIENCE)

    def _forget(self, pods: Sequence[ObservedPod], looks: Mapping[str, Mapping[int, RankSample]]) -> None:
        """What was given to these pods, and is held no more."""
        for pod in pods:
            held = {
                (pod.uid, rank, hold.incarnation)
                for rank, sample in looks.get(pod.uid, {}).items()
                if sample.connector is not None
                for hold in sample.connector.held_for
            }
            for whom in [whom for whom in self._given if whom[0] == pod.uid and whom not in held]:
                del self._given[whom]
        for whom in [whom for whom in self._given if whom[0] not in looks]:
            del self._given[whom]


def _pods(pool: ObservedPool) -> list[ObservedPod]:
    return [i.pod for i in pool.instances if i.pod is not None and i.controller_uid == pool.pool.metadata.uid]


def _whom(fence: Fence) -> Whom:
    return fence.pod_uid, fence.rank, fence.incarnation


def _event(told: Told) -> Event | None:
    fence = told.fence
    what = f"{fence.pod} rank {fence.rank}: process {fence.incarnation[:8]} of {fence.peer} has ended"
    if told.outcome == "given":
        message = f"{what} (container {fence.container_id}), what is held for it may be used again"
        return Event(EventType.NORMAL, Reason.FENCED_PEER, message)
    if told.outcome == "refused":
        return Event(EventType.WARNING, Reason.FENCE_REFUSED, f"{what}, but that is refused: {told.words}")
    return None
