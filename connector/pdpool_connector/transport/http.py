"""HTTP in a thread of its own: serves the bootstrap registry and the admin endpoint, and runs clients of others."""

import asyncio
import errno
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from aiohttp import web

from pdpool_connector.protocol.timeouts import Timeouts

MAX_CONNECTIONS = 512
"""To one port, and a few more when many arrive at the same moment. Further connections are closed at once: they would
take the descriptors that the control channel needs."""
MAX_BODY_BYTES = 16 * 1024
"""Of a request; a longer one is refused with status 413."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Page:
    """What GET of a path answers: called in the server's thread for each request, so it must not block."""

    content_type: str
    body: Callable[[], bytes]


class Asked(NamedTuple):
    """A request with a body.

    Attributes:
        body: The whole body.
        remote: IP address of the client.
        authorization: Value of the header Authorization; "" if there is none.
    """

    body: bytes
    remote: str
    authorization: str = ""


class Reply(NamedTuple):
    """An HTTP status, and a body of JSON."""

    status: int
    body: bytes


Handler = Callable[[Asked], Reply]
"""Called in the server's thread, so it must not block."""
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""What aiohttp calls for a request."""

NOT_SERVED: Final = (
    "this is a process of pdpool's connector, and an engine with another transfer backend cannot be paired with it"
)
"""For engines that ask for a page of their own registry: they put the text into their logs."""


class HttpServer:
    """Serves a set of paths on each port; other paths answer 404, other methods 405. Runs coroutines beside that."""

    def __init__(self, host: str, timeouts: Timeouts | None = None) -> None:
        self._host = host
        self._timeouts = timeouts or Timeouts()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pdpool-http", daemon=True)
        self._runners: list[web.AppRunner] = []
        self._servers: list[asyncio.Server] = []
        self._sockets: list[Path] = []
        self._stopped: Future[None] | None = None
        self._thread.start()

    def serve(
        self, port: int, pages: Mapping[str, Page], handlers: Mapping[tuple[str, str], Handler] | None = None
    ) -> int:
        """Listen on `port` (0 = any) and return it; `handlers` by method and path. Raises OSError if it cannot bind."""
        work = self._serve(port, pages, handlers or {})
        return self.submit(work).result(self._timeouts.http_start_s)

    def serve_socket(self, path: Path, handlers: Mapping[tuple[str, str], Handler]) -> None:
        """Listen on a Unix socket that only this user may connect to. Raises OSError if it cannot bind.

        A socket that a former process left at the path is removed; one that is still served raises OSError.
        """
        work = self._serve_socket(path, handlers)
        self.submit(work).result(self._timeouts.http_start_s)

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine in the server's thread, from any thread; `close` cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop listening and end the thread. Idempotent; the next call completes one that was interrupted."""
        if self._stopped is None:
            self._stopped = self.submit(self._stop())
        # Of the first call: a second stop would cancel it, and be cancelled by it.
        self._stopped.result(self._timeouts.http_start_s)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self._timeouts.http_start_s)
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _serve(self, port: int, pages: Mapping[str, Page], handlers: Mapping[tuple[str, str], Handler]) -> int:
        accept = await self._accept(pages, handlers)
        server = await self._loop.create_server(accept, self._host, port, backlog=128, start_serving=False)
        for listener in server.sockets:
            # Inherited by what it accepts. asyncio itself waits without end, even to close, for a client to read.
            unread_ms = round(self._timeouts.http_unread_s * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        await server.start_serving()
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _serve_socket(self, path: Path, handlers: Mapping[tuple[str, str], Handler]) -> None:
        accept = await self._accept({}, handlers)
        await asyncio.to_thread(_remove_left_behind, path)
        server = await self._loop.create_unix_server(accept, path, backlog=16, start_serving=False)
        await asyncio.to_thread(path.chmod, 0o600)
        await server.start_serving()
        self._servers.append(server)
        self._sockets.append(path)

    async def _accept(
        self, pages: Mapping[str, Page], handlers: Mapping[tuple[str, str], Handler]
    ) -> Callable[[], asyncio.Protocol]:
        """What makes a connection's protocol for these paths."""
        silent: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        timeouts = self._timeouts

        @web.middleware
        async def note_request(request: web.Request, handler: Answer) -> web.StreamResponse:
            if (deadline := silent.pop(request.protocol, None)) is not None:
                deadline.cancel()
            try:
                return await handler(request)
            except web.HTTPNotFound:
                return web.Response(status=404, text=f"{request.path} is not served here: {NOT_SERVED}")

        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[note_request])
        for path, page in pages.items():
            app.router.add_get(path, _show(page))
        for (method, path), handler in handlers.items():
            app.router.add_route(method, path, _handle(handler, timeouts.http_body_s))
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=0.5,
            keepalive_timeout=timeouts.http_idle_s,
        )
        await runner.setup()
        self._runners.append(runner)
        http = runner.server
        assert http is not None  # there is one once it is set up

        def accept() -> asyncio.Protocol:
            if len(http.connections) >= MAX_CONNECTIONS:
                return _TurnedAway()
            connection = http()
            silent[connection] = self._loop.call_later(timeouts.http_first_s, cut_off, connection)
            return connection

        def cut_off(connection: web.RequestHandler) -> None:
            del silent[connection]
            connection.force_close()

        return accept

    async def _stop(self) -> None:
        # asyncio forgets to close a connection that it has accepted and not yet handed over when its server is closed.
        for server in self._servers:
            for listener in server.sockets:
                self._loop.remove_reader(listener.fileno())
        for _ in range(3):
            await asyncio.sleep(0)
        for server in self._servers:
            server.close()
        for runner in self._runners:
            await runner.cleanup()
        for path in self._sockets:
            path.unlink(missing_ok=True)
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0)


class _TurnedAway(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _remove_left_behind(path: Path) -> None:
    """Remove a Unix socket on which no process listens any more. Raises OSError where one still does."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
    raise OSError(errno.EADDRINUSE, f"admin socket {path} is served by another process")


def _show(page: Page) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=page.body(), headers={"Content-Type": page.content_type})

    return answer


def _handle(handler: Handler, body_s: float) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(body_s):
                body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        reply = handler(Asked(body, request.remote or "", request.headers.get("Authorization", "")))
        return web.Response(status=reply.status, body=reply.body, headers={"Content-Type": "application/json"})

    return answer
