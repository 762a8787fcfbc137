"""Samples every engine pod at regular intervals and low load, and keeps the newest sample of each rank.

Heavy scraping has starved engines. Therefore there is one look at a pod at a time, and intervals have jitter.
"""

import asyncio
import contextlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..api.names import Role
from .pod_reader import PodReader
from .samples import RankSample
from .targets import Target

INTERVAL_S = 3.0
JITTER = 0.2


@dataclass(eq=False, slots=True)
class _Pod:
    """A sampled pod, and its state."""

    target: Target
    due_at: float = 0.0
    looking: bool = True
    """A look at it is under way."""
    missed: bool = False
    """It became due during that look."""
    looked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a look has ended, or the pod is forgotten."""
    newest: dict[int, RankSample] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    """URLs that missed their last deadline."""


class Sampler:
    """Holds the list of engine pods to sample, and the newest samples.

    Only the reconcile of a pool sets the list of its pods, with `watch`. A pod that is no longer in it is forgotten.
    `on_samples` is called for every sampled pod, with one sample per rank.
    """

    def __init__(
        self,
        reader: PodReader,
        *,
        clock: Callable[[], float],
        on_samples: Callable[[Target, Sequence[RankSample]], None] = lambda *_: None,
        interval_s: float = INTERVAL_S,
        rng: random.Random | None = None,
    ) -> None:
        self._reader, self._clock, self._on_samples, self._interval_s = reader, clock, on_samples, interval_s
        self._rng = rng or random.Random()  # noqa: S311 - spreads requests, guards nothing
        self._pods: dict[str, _Pod] = {}
        """By UID."""
        self._due: list[tuple[float, int, _Pod]] = []
        """Heap of the next look at each pod. An entry counts if the pod's `due_at` has the same time."""
        self._numbers = itertools.count()
        self._changed = asyncio.Event()

    async def watch(self, namespace: str, pool: str, role: Role, targets: Iterable[Target]) -> None:
        """Replace the pool's pods by `targets`. Pods that are not in it are forgotten, with their samples.

        New pods are sampled before this returns, so that an operator that just started does not report them as unknown.
        """
        wanted = {target.pod_uid: target for target in targets}
        for uid, pod in list(self._pods.items()):
            target = pod.target
            if (target.namespace, target.pool, target.role) == (namespace, pool, role) and wanted.get(uid) != target:
                self._forget(uid)
        new = {uid: _Pod(target) for uid, target in wanted.items() if uid not in self._pods}
        self._pods |= new
        for pod in new.values():
            self._next(pod)
        self._changed.set()
        # Another reconcile may be taking the first sample of a pod now.
        under_way = [self._pods[uid].looked.wait() for uid in wanted if uid not in new]
        await asyncio.gather(*map(self._look, new.values()), *under_way)

    def target(self, pod_uid: str) -> Target | None:
        """Return what is sampled of a pod, or None."""
        pod = self._pods.get(pod_uid)
        return pod.target if pod is not None else None

    def samples(self) -> Mapping[str, Mapping[int, RankSample]]:
        """Return the newest sample of each rank of all sampled pods, by UID of the pod."""
        return {uid: pod.newest for uid, pod in self._pods.items()}

    def newest(self, pod_uid: str) -> Mapping[int, RankSample]:
        """Return the newest sample of each rank of a pod. A rank that was never sampled is absent."""
        pod = self._pods.get(pod_uid)
        return pod.newest if pod is not None else {}

    async def run(self) -> None:
        """Take samples for ever."""
        async with asyncio.TaskGroup() as looks:
            while True:
                self._changed.clear()
                while self._due and self._due[0][0] <= self._clock():
                    due, _, pod = heapq.heappop(self._due)
                    if pod.due_at != due or self._pods.get(pod.target.pod_uid) is not pod:
                        continue
                    if pod.looking:
                        pod.missed = True
                    else:
                        pod.looking = True
                        self._next(pod)
                        looks.create_task(self._look(pod))
                wait = self._due[0][0] - self._clock() if self._due else self._interval_s
                with contextlib.suppress(TimeoutError):  # the next pod is due
                    async with asyncio.timeout(max(0.01, wait)):
                        await self._changed.wait()

    def _next(self, pod: _Pod, after_s: float | None = None) -> None:
        """Put the next look at a pod on the heap: after the interval with jitter, or after so long."""
        if after_s is None:
            after_s = self._interval_s * (1 + JITTER * (2 * self._rng.random() - 1))
        pod.due_at = self._clock() + after_s
        heapq.heappush(self._due, (pod.due_at, next(self._numbers), pod))

    async def _look(self, pod: _Pod) -> None:
        try:
            samples = await self._reader.sample(pod.target, pod.newest.keys(), pod.late)
        finally:
            pod.looking = False
            if pod.missed:
                pod.missed = False
                self._next(pod, 0.0)
                self._changed.set()
            pod.looked.set()
        if self._pods.get(pod.target.pod_uid) is not pod:
            return  # the pod was removed meanwhile
        pod.newest = {sample.rank: sample for sample in samples}
        self._on_samples(pod.target, samples)

    def _forget(self, uid: str) -> None:
        self._pods.pop(uid).looked.set()
