"""Workers that take keys from the queue and reconcile them, one key at a time each."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from .api import ApiError, ConflictError, NotFoundError, NotLeaderError
from .metrics import Metrics
from .queue import WorkQueue

RECONCILE_TIMEOUT_S = 60.0

log = logging.getLogger(__name__)


class ObjectKey(Protocol):
    """What logs and metrics want to know of a key."""

    @property
    def kind(self) -> str:
        """Kind of the object."""

    @property
    def namespace(self) -> str:
        """Its namespace."""

    @property
    def name(self) -> str:
        """Its name."""

    def __hash__(self) -> int: ...


K = TypeVar("K", bound=ObjectKey)


@dataclass(frozen=True, slots=True)
class Result:
    """What a reconcile came to."""

    again_s: float | None = None
    """Look again after so many seconds, whatever happens."""
    failed: bool = False
    """Something was refused: look again after the back-off, if that is earlier."""


async def work(queue: WorkQueue[K], reconcile: Callable[[K], Awaitable[Result]], metrics: Metrics) -> None:
    """Reconcile keys until the queue is closed. A fault with one object is logged and tried again later; it never stops
    the others.
    """
    while (key := await queue.get()) is not None:
        started = time.monotonic()
        try:
            outcome = await _once(queue, key, reconcile)
        finally:
            queue.done(key)
        metrics.reconciles.labels(key.kind, outcome).inc()
        metrics.reconcile_seconds.labels(key.kind).observe(time.monotonic() - started)


async def _once(queue: WorkQueue[K], key: K, reconcile: Callable[[K], Awaitable[Result]]) -> str:
    where = {"kind": key.kind, "namespace": key.namespace, "object": key.name}
    try:
        async with asyncio.timeout(RECONCILE_TIMEOUT_S):
            result = await reconcile(key)
    except (ConflictError, NotFoundError) as faster:
        delay = queue.retry(key)
        log.info("somebody else was faster, looking again in %.1f s: %s", delay, faster, extra=where)
        return "conflict"
    except (ApiError, NotLeaderError, TimeoutError) as error:
        delay = queue.retry(key)
        log.warning("reconcile failed, again in %.1f s: %s", delay, error or "timeout", extra=where)
        return "error"
    except Exception:
        delay = queue.retry(key)
        log.exception("reconcile failed, again in %.1f s", delay, extra=where)
        return "error"
    if result.failed:
        queue.retry(key)
    else:
        queue.forget(key)
    if result.again_s is not None:
        queue.add_after(key, result.again_s)
    return "refused" if result.failed else "ok"
