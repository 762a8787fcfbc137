"""The ports of one connector: its control channel, its admin endpoint, its admin socket."""

import contextlib
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import zmq

from pdpool_connector.runtime.config import ConnectorConfig
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.transport.control import ControlServer
from pdpool_connector.transport.curve import CurveAuthenticator
from pdpool_connector.transport.drops import Drops
from pdpool_connector.transport.http import Handler, HttpServer, Page

Result = TypeVar("Result")


class Ports:
    """Opened by `open`, which may be tried again after a port was taken.

    Attributes:
        context: For all zmq sockets of the connector.
        control_port, admin_port: TCP ports; 0 until they are bound.
    """

    def __init__(self, config: ConnectorConfig, reactor: Reactor, drops: Drops) -> None:
        self._config, self._reactor, self._drops = config, reactor, drops
        self.context: zmq.Context[Any] = zmq.Context()
        self.control_port = self.admin_port = 0
        self._server: ControlServer | None = None
        self._http: HttpServer | None = None
        self._authenticator: CurveAuthenticator | None = None

    @property
    def control(self) -> ControlServer:
        """The control channel, once it is open."""
        assert self._server is not None
        return self._server

    @property
    def http(self) -> HttpServer:
        """The HTTP server, once it is open."""
        assert self._http is not None
        return self._http

    def submit(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Run a coroutine in the thread of the HTTP server."""
        return self.http.submit(work)

    def open(
        self,
        undo: contextlib.ExitStack,
        *,
        on_frames: Callable[[], None],
        on_connections: Callable[[], None],
        pages: Mapping[str, Page],
        changes: Mapping[tuple[str, str], Handler],
        drain: Mapping[tuple[str, str], Handler],
    ) -> None:
        """Bind all ports; `undo` closes them.

        Args:
            undo: Takes what closes the ports again.
            on_frames, on_connections: Called in turns of the reactor when the control channel has something to read.
            pages, changes: Of the admin endpoint.
            drain: Of the admin socket.

        Raises:
            OSError: A port or the socket cannot be bound.
        """
        config, timeouts = self._config, self._config.timeouts
        if config.curve and self._authenticator is None:
            # It stays where a port is taken: its own address is free again only some time after it was closed.
            self._authenticator = CurveAuthenticator(self.context, config.curve, timeouts.authenticator_close_s)
        key = config.curve[0] if config.curve else None
        host = config.listen_host
        server = ControlServer(self.context, host, config.control_port, self._drops, self._reactor, key, timeouts)
        self._server, self.control_port = server, server.port
        undo.callback(self._close_control, server)
        for socket, call in ((server.socket, on_frames), (server.monitor, on_connections)):
            self._reactor.watch(socket, call)
            undo.callback(self._reactor.unwatch, socket)
        self._http = http = HttpServer(host, timeouts)
        undo.callback(http.close)
        if config.admin_port is not None:
            self.admin_port = http.serve(config.admin_port, pages, changes)
        if config.admin_socket is not None:
            http.serve_socket(Path(config.admin_socket), drain)

    def _close_control(self, server: ControlServer) -> None:
        self.control_port = 0
        server.close()

    def close_control(self) -> None:
        """Close the control channel, in the last turn of the reactor."""
        if self._server is not None:
            self._server.close()

    def close_http(self) -> None:
        """Close the admin endpoint and the admin socket."""
        if self._http is not None:
            self._http.close()

    def close(self) -> None:
        """Close the rest, with what a start that was interrupted has left open."""
        if self._authenticator is not None:
            self._authenticator.close()
        self.context.destroy()
