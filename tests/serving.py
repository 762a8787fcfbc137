"""An HTTP server inside the test, for tests that stand in for a foreign API, and addresses for pods."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

_numbers = itertools.count()


def pod_address() -> str:
    """One of loopback that is not in use, not even by another run of the same test: pods have fixed ports."""
    process = os.getpid()
    return f"127.{100 + next(_numbers) % 150}.{process >> 8 & 255}.{process & 255}"


@asynccontextmanager
async def serving(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Have `handle` answer every request on a port of its own; yields the URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await stop_serving(runner)


async def stop_serving(runner: web.AppRunner) -> None:
    """Close a server of which another process may be a client.

    asyncio forgets to close a connection that it accepts while its server closes.
    """
    async with asyncio.timeout(10):
        while accepting := [one for one in asyncio.all_tasks() if _accepts(one)]:
            await asyncio.wait(accepting)
    await runner.cleanup()


def _accepts(task: asyncio.Task[object]) -> bool:
    return task.get_coro().__qualname__.endswith("_accept_connection2")
