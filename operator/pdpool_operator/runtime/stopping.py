"""Orderly shutdown: SIGTERM and SIGINT set an event, and waiting code ends when it is set."""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Signals:
    """SIGTERM and SIGINT set `stop`."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop

    def install(self) -> None:
        """Replace the present signal handlers."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on, number)

    def _on(self, number: signal.Signals) -> None:
        log.info("%s: stopping", number.name)
        self._stop.set()


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Run `work` to its end, or cancel it once `stop` is set. Return whether it ended; raise what it raises."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait([working, stopping])
    if working.cancelled():
        return False
    working.result()
    return True
