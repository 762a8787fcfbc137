"""Small read-only HTTP servers in a thread of their own: bootstrap registry and admin endpoint."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

START_S = 5.0
"""How long binding a port may take."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a path answers: called in the server's thread for each request, so it must not block."""

    content_type: str
    body: Callable[[], bytes]


class HttpServer:
    """Serves GET for fixed paths, one set of them on each port; other paths answer 404."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pdpool-http", daemon=True)
        self._runners: list[web.AppRunner] = []
        self._thread.start()

    def serve(self, port: int, pages: Mapping[str, Page]) -> int:
        """Listen on `port` (0 = any) and return it. Raises OSError when it cannot be bound."""
        future = asyncio.run_coroutine_threadsafe(self._serve(port, pages), self._loop)
        return future.result(START_S)

    def close(self) -> None:
        """Stop listening and end the thread."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _serve(self, port: int, pages: Mapping[str, Page]) -> int:
        app = web.Application()
        for path, page in pages.items():
            app.router.add_get(path, _handler(page))
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, self._host, port)
        await site.start()
        return int(runner.addresses[0][1])

    async def _stop(self) -> None:
        for runner in self._runners:
            for site in list(runner.sites):
                await site.stop()
        # A connection that was accepted at the last moment is handed over in the next turns of the loop; cleaning up
        # before that would miss it.
        for _ in range(3):
            await asyncio.sleep(0)
        for runner in self._runners:
            await runner.cleanup()
        await asyncio.sleep(0)


def _handler(page: Page) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=page.body(), headers={"Content-Type": page.content_type})

    return answer
