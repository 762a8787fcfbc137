"""Asks one pod for all parts of a sample: its connectors, its engine's scheduler, perhaps the engine's `/metrics`.

Each rank has two sources: the connector, which answers also while the engine's scheduler is frozen, and the scheduler.
Pods that something else runs have a third one, the engine's `/metrics`. A source that misses its deadline is *unknown*.

All requests together are limited. Sources that missed their last deadline share a part of them, so that pods which hang
do not delay the samples of others.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import TypeVar

import aiohttp
from pydantic import ValidationError

from ..api.engine import EngineType
from ..api.names import Role, admin_url, engine_url
from ..engines import engine_of
from .connector_state import parse_state
from .engine_metrics import METRICS_BYTES, Sieve, parse_metrics
from .http import TIMED_OUT, ByteBudget, Unanswered, invalid, request
from .rank_samples import EngineAnswer, connector_samples, native_samples
from .samples import ConnectorSample, EngineSample, RankSample
from .targets import Target

TIMEOUT_S = 2.0
CONCURRENCY = 128
"""Concurrent requests, to all pods together."""
LATE_SHARE = 0.5
"""Share of them for sources that missed their last deadline."""
ANSWER_BYTES = 192 << 10
"""Limit of one answer. A rank with 500 peers needs about half of it. Parsing one answer takes at most 16 MiB."""
LOOK_BYTES = 2 << 20
"""Limit of all answers to one look at a pod: bounds what a look costs in memory and time."""

Answer = TypeVar("Answer")


class PodReader:
    """Samples pods. `on_answer` gets role, source and outcome of every request, for the count of samples."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        now: Callable[[], datetime],
        on_answer: Callable[[Role, str, str], None] = lambda *_: None,
        timeout_s: float = TIMEOUT_S,
        concurrency: int = CONCURRENCY,
    ) -> None:
        self._http, self._now, self._on_answer, self._timeout_s = http, now, on_answer, timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._late_slots = asyncio.Semaphore(max(1, int(concurrency * LATE_SHARE)))

    async def sample(
        self, target: Target, known: Collection[int] = (), late: set[str] | None = None
    ) -> list[RankSample]:
        """Sample each rank of one pod once. Never raises for an error of the pod.

        Args:
            target: the pod.
            known: its ranks at the last sample. The answers may show others.
            late: URLs that missed their last deadline. Updated.
        """
        late = set() if late is None else late
        asked_at, budget = self._now(), ByteBudget(LOOK_BYTES, ANSWER_BYTES)
        if not target.has_connector:
            return await self._sample_native(target, known, late, budget)
        ranks = max(1, len(known))
        (engines, error), connectors = await asyncio.gather(
            self._ask_engine(target, late, budget), self._ask_connectors(target, range(ranks), late, budget)
        )
        said = max((one.ranks for one, _ in connectors if one is not None), default=ranks)
        connectors = [*connectors[:said], *await self._ask_connectors(target, range(ranks, said), late, budget)]
        return connector_samples(EngineAnswer(target.pod_uid, asked_at, self._now(), engines or {}, error), connectors)

    async def _sample_native(
        self, target: Target, known: Collection[int], late: set[str], budget: ByteBudget
    ) -> list[RankSample]:
        """Sample a pod without pdpool's connector: the engine alone says which ranks there are."""
        asked_at, names = self._now(), engine_of(target.engine).metric_names
        metrics, metrics_error = None, ""
        asking = self._ask_engine(target, late, budget)
        if target.asks_metrics:
            (engines, error), (metrics, metrics_error) = await asyncio.gather(
                asking,
                self._ask(
                    target,
                    "metrics",
                    f"{engine_url(target.ip, target.port)}/metrics",
                    lambda body: parse_metrics(body, names, target.role),
                    late,
                    ByteBudget(METRICS_BYTES, METRICS_BYTES),
                    Sieve(names.all()),
                ),
            )
        else:
            engines, error = await asking
        answer = EngineAnswer(target.pod_uid, asked_at, self._now(), engines or {}, error)
        return native_samples(answer, metrics or {}, metrics_error, names, known)

    async def _ask_connectors(
        self, target: Target, ranks: Iterable[int], late: set[str], budget: ByteBudget
    ) -> list[tuple[ConnectorSample | None, str]]:
        urls = [f"{admin_url(target.ip, rank)}/v1/state" for rank in ranks]
        return await asyncio.gather(*(self._ask(target, "connector", url, parse_state, late, budget) for url in urls))

    async def _ask_engine(
        self, target: Target, late: set[str], budget: ByteBudget
    ) -> tuple[Mapping[int, EngineSample] | None, str]:
        url = f"{engine_url(target.ip, target.port)}{engine_of(target.engine).loads_path}"
        return await self._ask(
            target, "engine", url, lambda body: parse_loads(body, target.role, target.engine), late, budget
        )

    async def _ask(
        self,
        target: Target,
        source: str,
        url: str,
        parse: Callable[[bytes], Answer],
        late: set[str],
        budget: ByteBudget,
        sift: Callable[[bytes], bytes] = bytes,
    ) -> tuple[Answer | None, str]:
        """Return the answer of one source, or None and why there is none."""
        try:
            answer = parse(await self._get(url, late, budget, sift))
        except Unanswered as error:
            self._on_answer(target.role, source, error.outcome)
            return None, str(error)
        self._on_answer(target.role, source, "ok")
        return answer, ""

    async def _get(self, url: str, late: set[str], budget: ByteBudget, sift: Callable[[bytes], bytes]) -> bytes:
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


def parse_loads(body: bytes, role: Role, kind: EngineType) -> Mapping[int, EngineSample]:
    """Parse a scheduler's own report, by rank; raises Unanswered if it is invalid."""
    try:
        return engine_of(kind).parse_loads(body, role)
    except ValidationError as error:
        raise Unanswered(invalid(error)) from error
