"""Asks engine pods what the operator's sampler asks, through the proxy of the API server.

Answers of pods are not trusted. They have the limits of the sampler.
"""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime

from pdpool_operator.api.names import ADMIN_PORT
from pdpool_operator.engines import engine_of
from pdpool_operator.engines.answers import MAX_RANKS
from pdpool_operator.observe.engine_metrics import METRICS_BYTES, Sieve
from pdpool_operator.observe.http import ByteBudget, Unanswered
from pdpool_operator.observe.pod_reader import ANSWER_BYTES, LOOK_BYTES
from pdpool_operator.observe.targets import Target
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.api_errors import ApiError
from pdpool_operator.runtime.resources import PODS, Object

from .recording import Answers

CONCURRENCY = 16
ANSWER_S = 3.0
"""Longest wait for one answer of a pod. Pods that hang must not stretch a look, because samples of 15 s are too old."""
ERROR_LETTERS = 500
"""Limit of the text of an error. A pod may have written it."""


class Questions:
    """Asks the pods of one namespace."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def ask(self, pod: str, target: Target, before: Answers | None) -> Answers:
        """Ask one pod by name. `before` has its answers of the last look: so many ranks are asked."""
        asked_at, budget = now(), ByteBudget(LOOK_BYTES, ANSWER_BYTES)
        loads = self._json(pod, target.port, engine_of(target.engine).loads_path, budget)
        if target.has_connector:
            ranks = max(1, len(before.connectors)) if before else 1
            connectors, engine = await asyncio.gather(self._connectors(pod, ranks, budget), loads)
            return Answers(asked_at, now(), connectors, engine)
        engine, metrics = await asyncio.gather(loads, self._metrics(pod, target))
        return Answers(asked_at, now(), [], engine, metrics)

    async def _connectors(self, pod: str, known: int, budget: ByteBudget) -> list[Object]:
        """Ask the connector of each rank. They report how many ranks there are, now or in the last look."""

        async def each(ranks: range) -> list[Object]:
            return await asyncio.gather(*(self._json(pod, ADMIN_PORT + rank, "/v1/state", budget) for rank in ranks))

        answers = await each(range(known))
        reported = max((ranks for one in answers if (ranks := _ranks(one))), default=known)
        return [*answers[:reported], *await each(range(known, reported))]

    async def _metrics(self, pod: str, target: Target) -> Object | None:
        if not target.asks_metrics:
            return None
        sieve = Sieve(engine_of(target.engine).metric_names.all())
        text, error = await self._get(pod, target.port, "/metrics", ByteBudget(METRICS_BYTES, METRICS_BYTES), sieve)
        return {"error": error} if error else {"text": text}

    async def _json(self, pod: str, port: int, path: str, budget: ByteBudget) -> Object:
        text, error = await self._get(pod, port, path, budget)
        try:
            return {"error": error} if error else {"body": json.loads(text)}
        except (ValueError, RecursionError) as invalid:
            return {"error": f"invalid: {invalid}"[:ERROR_LETTERS]}

    async def _get(
        self, pod: str, port: int, path: str, budget: ByteBudget, sift: Callable[[bytes], bytes] = bytes
    ) -> tuple[str, str]:
        """Return the text at a path of a pod, and why there is none."""
        url = f"{PODS.path(self._namespace, f'{pod}:{port}')}/proxy{path}"
        async with self._slots:
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await self._api.text(PODS, url, take=budget.counting(sift)), ""
            except TimeoutError:
                return "", f"no answer within {ANSWER_S:.0f} s"
            except (ApiError, Unanswered) as error:
                return "", str(error)[:ERROR_LETTERS]


def _ranks(answer: Object) -> int | None:
    """Return the number of ranks that a connector reports, if it is one."""
    body = answer.get("body")
    ranks = body.get("ranks") if isinstance(body, dict) else None
    return ranks if isinstance(ranks, int) and 1 <= ranks <= MAX_RANKS else None


def now() -> str:
    """Return the present time as text."""
    return datetime.now(UTC).isoformat()
