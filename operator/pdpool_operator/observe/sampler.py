"""Samples the hand-off queues of every engine rank at regular intervals and low load.

Each rank has two sources: the connector, which answers also while the engine's scheduler is frozen, and the engine's
scheduler. Pods that something else runs have a third one, the engine's `/metrics`. Heavy scraping has starved engines.
Therefore the sampler takes one sample per pod at a time, limits all requests together, and adds jitter. A source that
misses its deadline is *unknown*. Sources that missed their last one share a part of the requests, so that pods which
hang do not delay the samples of others. The newest sample of each rank is kept.
"""

import asyncio
import contextlib
import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import aiohttp
from pydantic import ValidationError

from ..api.engine import EngineType
from ..api.names import ENGINE_HTTP_PORT, Role, admin_url, engine_url
from ..api.pools import Pool
from ..engines import engine_of
from .connector_state import parse_state
from .engine_metrics import METRICS_BYTES, MetricsReading, Sieve, parse_metrics
from .http import TIMED_OUT, ByteBudget, Unanswered, invalid, request
from .model import ObservedInstance
from .rank_samples import EngineAnswer, connector_samples, native_samples
from .samples import ConnectorSample, EngineSample, RankSample

INTERVAL_S = 3.0
JITTER = 0.2
TIMEOUT_S = 2.0
CONCURRENCY = 128
"""Concurrent requests, to all pods together."""
LATE_SHARE = 0.5
"""Share of them for sources that missed their last deadline."""
ANSWER_BYTES = 192 << 10
"""Limit of one answer. A rank with 500 peers needs about half of it. Parsing one answer takes at most 16 MiB."""
LOOK_BYTES = 2 << 20
"""Limit of all answers to one look at a pod: bounds what a look costs in memory and time."""


@dataclass(frozen=True, slots=True)
class Target:
    """One engine pod to sample. `pool` is its pool's name."""

    namespace: str
    pool: str
    role: Role
    instance: int
    pod_uid: str
    ip: str
    engine: EngineType = EngineType.REFERENCE
    has_connector: bool = True
    """Every rank has pdpool's connector with its admin endpoint."""
    port: int = ENGINE_HTTP_PORT
    """Port of the engine's HTTP endpoints."""
    asks_metrics: bool = False
    """The engine's `/metrics` are read too. Only without a connector."""


def pool_targets(pool: Pool, instances: Iterable[ObservedInstance]) -> list[Target]:
    """Return the pods of a pool that are sampled: those that run, of its own instances."""
    meta, kind = pool.metadata, engine_of(pool.spec.engine.type)
    return [
        Target(
            meta.namespace,
            meta.name,
            pool.role,
            instance.index,
            pod.uid,
            pod.ip,
            kind.type,
            kind.has_connector(pool),
        )
        for instance in instances
        if instance.belongs_to(meta.uid) and (pod := instance.pod) and pod.ip and pod.phase == "Running"
    ]


@dataclass(frozen=True, slots=True)
class Look:
    """Result of a request to one source, for the count of samples."""

    role: Role
    source: str
    outcome: str


class Sampler:
    """Holds the list of engine pods to sample, and the newest samples.

    Only the reconcile of a pool sets the list of its pods, with `watch`. A pod that is no longer in it is forgotten.
    `on_look` is called for every request to a source, `on_samples` for every sampled pod with one sample per rank.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        clock: Callable[[], float],
        now: Callable[[], datetime],
        on_samples: Callable[[Target, Sequence[RankSample]], None] = lambda *_: None,
        on_look: Callable[[Look], None] = lambda _: None,
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        concurrency: int = CONCURRENCY,
        rng: random.Random | None = None,
    ) -> None:
        self._http = http
        self._clock = clock
        self._now = now
        self._on_samples = on_samples
        self._on_look = on_look
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._late_slots = asyncio.Semaphore(max(1, int(concurrency * LATE_SHARE)))
        self._rng = rng or random.Random()  # noqa: S311 - spreads requests, guards nothing
        self._targets: dict[str, Target] = {}
        self._due: list[tuple[float, str]] = []
        """Heap of the next look at each pod. An entry counts if `_due_at` has the same time."""
        self._due_at: dict[str, float] = {}
        self._looking: set[str] = set()
        self._missed: set[str] = set()
        """Pods that became due while a look at them was under way."""
        self._looked: dict[str, asyncio.Event] = {}
        self._newest: dict[str, dict[int, RankSample]] = {}
        self._late: dict[str, set[str]] = {}
        """URLs that missed their last deadline, by UID of the pod."""
        self._changed = asyncio.Event()

    async def watch(self, namespace: str, pool: str, role: Role, targets: Iterable[Target]) -> None:
        """Replace the pool's pods by `targets`. Pods that are not in it are forgotten, with their samples.

        New pods are sampled before this returns, so that an operator that just started does not report them as unknown.
        """
        wanted = {target.pod_uid: target for target in targets}
        for uid, target in list(self._targets.items()):
            if (target.namespace, target.pool, target.role) == (namespace, pool, role) and wanted.get(uid) != target:
                self._forget(uid)
        new = {uid: target for uid, target in wanted.items() if uid not in self._targets}
        for uid, target in new.items():
            self._targets[uid] = target
            self._next(uid)
            self._looking.add(uid)
            self._looked[uid] = asyncio.Event()
            self._late[uid] = set()
        self._changed.set()
        # Another reconcile may be taking the first sample of a pod now.
        under_way = [self._looked[uid].wait() for uid in wanted if uid not in new]
        await asyncio.gather(*(self._look(target) for target in new.values()), *under_way)

    def target(self, pod_uid: str) -> Target | None:
        """Return what is sampled of a pod, or None."""
        return self._targets.get(pod_uid)

    def looks(self) -> Mapping[str, Mapping[int, RankSample]]:
        """Return the newest sample of each rank of all sampled pods, by UID of the pod."""
        return {uid: self.newest(uid) for uid in self._targets}

    def newest(self, pod_uid: str) -> Mapping[int, RankSample]:
        """Return the newest sample of each rank of a pod. A rank that was never sampled is absent."""
        return self._newest.get(pod_uid, {})

    async def run(self) -> None:
        """Take samples for ever."""
        async with asyncio.TaskGroup() as looks:
            while True:
                self._changed.clear()
                while self._due and self._due[0][0] <= self._clock():
                    due, uid = heapq.heappop(self._due)
                    if self._due_at.get(uid) != due:
                        continue
                    if uid in self._looking:
                        self._missed.add(uid)
                    else:
                        self._next(uid)
                        self._looking.add(uid)
                        looks.create_task(self._look(self._targets[uid]))
                wait = self._due[0][0] - self._clock() if self._due else self._interval_s
                with contextlib.suppress(TimeoutError):  # the next pod is due
                    async with asyncio.timeout(max(0.01, wait)):
                        await self._changed.wait()

    def _next(self, uid: str, after_s: float | None = None) -> None:
        """Put the next look at a pod on the heap: after the interval with jitter, or after so long."""
        if after_s is None:
            after_s = self._interval_s * (1 + JITTER * (2 * self._rng.random() - 1))
        self._due_at[uid] = self._clock() + after_s
        heapq.heappush(self._due, (self._due_at[uid], uid))

    async def _look(self, target: Target) -> None:
        try:
            samples = await self.sample(target)
        finally:
            self._looking.discard(target.pod_uid)
            if target.pod_uid in self._missed:
                self._missed.discard(target.pod_uid)
                self._next(target.pod_uid, 0.0)
                self._changed.set()
            if looked := self._looked.get(target.pod_uid):
                looked.set()
        if self._targets.get(target.pod_uid) != target:
            return  # the pod was removed meanwhile
        self._newest[target.pod_uid] = {sample.rank: sample for sample in samples}
        self._on_samples(target, samples)

    async def sample(self, target: Target) -> list[RankSample]:
        """Sample each rank of one pod once. Never raises for an error of the pod.

        The connectors report how many ranks there are, now or at the last sample.
        """
        if not target.has_connector:
            return await self._sample_native(target)
        asked_at = self._now()
        known, budget = max(1, len(self.newest(target.pod_uid))), ByteBudget(LOOK_BYTES, ANSWER_BYTES)
        (engines, error), connectors = await asyncio.gather(
            self._ask_engine(target, budget), self._ask_connectors(target, range(known), budget)
        )
        said = max((one.ranks for one, _ in connectors if one is not None), default=known)
        connectors = [*connectors[:said], *await self._ask_connectors(target, range(known, said), budget)]
        return connector_samples(EngineAnswer(target.pod_uid, asked_at, self._now(), engines, error), connectors)

    async def _sample_native(self, target: Target) -> list[RankSample]:
        """Sample a pod without pdpool's connector: the engine alone says which ranks there are."""
        asked_at = self._now()
        (engines, error), (metrics, metrics_error) = await asyncio.gather(
            self._ask_engine(target, ByteBudget(LOOK_BYTES, ANSWER_BYTES)), self._ask_metrics(target)
        )
        answer = EngineAnswer(target.pod_uid, asked_at, self._now(), engines, error)
        names, known = engine_of(target.engine).metric_names, self.newest(target.pod_uid)
        return native_samples(answer, metrics, metrics_error, names, known)

    async def _ask_connectors(
        self, target: Target, ranks: Iterable[int], budget: ByteBudget
    ) -> list[tuple[ConnectorSample | None, str]]:
        return await asyncio.gather(*(self._ask_connector(target, rank, budget) for rank in ranks))

    async def _ask_connector(self, target: Target, rank: int, budget: ByteBudget) -> tuple[ConnectorSample | None, str]:
        try:
            sample = parse_state(await self._get(target, f"{admin_url(target.ip, rank)}/v1/state", budget))
        except Unanswered as error:
            self._on_look(Look(target.role, "connector", error.outcome))
            return None, str(error)
        self._on_look(Look(target.role, "connector", "ok"))
        return sample, ""

    async def _ask_engine(self, target: Target, budget: ByteBudget) -> tuple[Mapping[int, EngineSample], str]:
        try:
            url = f"{engine_url(target.ip, target.port)}{engine_of(target.engine).loads_path}"
            samples = parse_loads(await self._get(target, url, budget), target.role, target.engine)
        except Unanswered as error:
            self._on_look(Look(target.role, "engine", error.outcome))
            return {}, str(error)
        self._on_look(Look(target.role, "engine", "ok"))
        return samples, ""

    async def _ask_metrics(self, target: Target) -> tuple[Mapping[int, MetricsReading], str]:
        if not target.asks_metrics:
            return {}, ""
        names, budget = engine_of(target.engine).metric_names, ByteBudget(METRICS_BYTES, METRICS_BYTES)
        try:
            url = f"{engine_url(target.ip, target.port)}/metrics"
            found = parse_metrics(await self._get(target, url, budget, Sieve(names.all())), names, target.role)
        except Unanswered as error:
            self._on_look(Look(target.role, "metrics", error.outcome))
            return {}, str(error)
        self._on_look(Look(target.role, "metrics", "ok"))
        return found, ""

    async def _get(self, target: Target, url: str, budget: ByteBudget, sift: Callable[[bytes], bytes] = bytes) -> bytes:
        late = self._late.get(target.pod_uid, set())
        async with contextlib.AsyncExitStack() as slots:
            if url in late:
                await slots.enter_async_context(self._late_slots)
            # Before the deadline begins: other pods that hang must not count against this one.
            await slots.enter_async_context(self._slots)
            late.discard(url)
            try:
                status, body = await request(
                    self._http, "GET", url, timeout_s=self._timeout_s, budget=budget, sift=sift
                )
            except Unanswered as error:
                if error.outcome == TIMED_OUT:
                    late.add(url)
                raise
        if status != 200:
            raise Unanswered(f"http {status}")
        return body

    def _forget(self, uid: str) -> None:
        del self._targets[uid], self._due_at[uid], self._late[uid]
        self._missed.discard(uid)
        self._looked.pop(uid).set()
        self._newest.pop(uid, None)


def parse_loads(body: bytes, role: Role, kind: EngineType) -> Mapping[int, EngineSample]:
    """Parse a scheduler's own report, by rank; raises Unanswered if it is invalid."""
    try:
        return engine_of(kind).parse_loads(body, role)
    except ValidationError as error:
        raise Unanswered(invalid(error)) from error
