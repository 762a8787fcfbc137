"""Workers that take keys from the queue and reconcile them, one key at a time each."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from .api import ApiError, ConflictError, NotLeaderError
from .metrics import Metrics
from .queue import WorkQueue

RECONCILE_TIMEOUT_S = 60.0
CONFLICT_RETRY_S = 0.2

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


Reconcile = Callable[[ObjectKey], Awaitable[float | None]]
"""Brings one object closer to what it should be; returns the seconds after which to look again, if any."""


async def work(queue: "WorkQueue[ObjectKey]", reconcile: Reconcile, metrics: Metrics) -> None:
    """Reconcile keys for ever. A fault with one object is logged and tried again later; it never stops the others."""
    while True:
        key = await queue.get()
        started = time.monotonic()
        try:
            outcome = await _once(queue, key, reconcile)
        finally:
            queue.done(key)
        metrics.reconciles.labels(key.kind, outcome).inc()
        metrics.reconcile_seconds.labels(key.kind).observe(time.monotonic() - started)


async def _once(queue: "WorkQueue[ObjectKey]", key: ObjectKey, reconcile: Reconcile) -> str:
    where = {"kind": key.kind, "namespace": key.namespace, "object": key.name}
    try:
        async with asyncio.timeout(RECONCILE_TIMEOUT_S):
            again = await reconcile(key)
    except ConflictError as conflict:
        log.info("somebody else was faster, looking again: %s", conflict, extra=where)
        queue.add_after(key, CONFLICT_RETRY_S)
        return "conflict"
    except (ApiError, NotLeaderError, TimeoutError) as error:
        delay = queue.retry(key)
        log.warning("reconcile failed, again in %.1f s: %s", delay, error or "timeout", extra=where)
        return "error"
    except Exception:
        delay = queue.retry(key)
        log.exception("reconcile failed, again in %.1f s", delay, extra=where)
        return "error"
    queue.forget(key)
    if again is not None:
        queue.add_after(key, again)
    return "ok"
