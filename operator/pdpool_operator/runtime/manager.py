"""Workers that take keys from the queue and reconcile them, each one key at a time."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from .api_errors import ApiError, ConflictError, NotFoundError
from .metrics import Metrics
from .object_key import ObjectKey
from .queue import WorkQueue
from .write_budget import NotLeaderError

RECONCILE_TIMEOUT_S = 60.0

log = logging.getLogger(__name__)


K = TypeVar("K", bound=ObjectKey)


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a reconcile."""

    again_s: float | None = None
    """Reconcile again after so many seconds in any case."""
    failed: bool = False
    """The API server refused something: reconcile again after the back-off, if that is earlier."""


async def work(queue: WorkQueue[K], reconcile: Callable[[K], Awaitable[Result]], metrics: Metrics) -> None:
    """Reconcile keys until the queue is closed.

    An error with one object is logged and retried later. It never stops the others.
    """
    while (key := await queue.get()) is not None:
        started = time.monotonic()
        try:
            outcome = await _once(queue, key, reconcile)
        finally:
            queue.done(key)
        metrics.reconciles.labels(key.kind, outcome).inc()
        metrics.states.reconciled(key, outcome)
        metrics.reconcile_seconds.labels(key.kind).observe(time.monotonic() - started)


async def _once(queue: WorkQueue[K], key: K, reconcile: Callable[[K], Awaitable[Result]]) -> str:
    where = {"kind": key.kind, "namespace": key.namespace, "object": key.name}
    try:
        async with asyncio.timeout(RECONCILE_TIMEOUT_S):
            result = await reconcile(key)
    except (ConflictError, NotFoundError) as faster:
        delay = queue.retry(key)
        log.info("another writer was faster, retrying in %.1f s: %s", delay, faster, extra=where)
        return "conflict"
    except (ApiError, NotLeaderError, TimeoutError) as error:
        delay = queue.retry(key)
        log.warning("reconcile failed, retrying in %.1f s: %s", delay, error or "timeout", extra=where)
        return "error"
    except Exception:
        delay = queue.retry(key)
        log.exception("reconcile failed, retrying in %.1f s", delay, extra=where)
        return "error"
    if result.failed:
        queue.retry(key)
    else:
        queue.forget(key)
    if result.again_s is not None:
        queue.add_after(key, result.again_s)
    return "refused" if result.failed else "ok"
