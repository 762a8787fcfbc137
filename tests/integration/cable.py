"""A connection between two connectors that tests can cut, both ways or one, and what is asked over HTTP."""

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request

from pdpool_connector.transport.bootstrap import BOOTSTRAP_PATH
from pdpool_connector.transport.http import HttpServer, Page

from tests.integration.connector_peer import Side


def ask(address: str, path: str) -> dict:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
        return json.loads(answer.read())


def registered(bootstrap: str, within_s: float = 30.0):
    """What the registry says once all ranks are there."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return ask(bootstrap, BOOTSTRAP_PATH)
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 503 or time.monotonic() > deadline:
                    raise
        time.sleep(0.02)


class Cable:
    """A TCP connection to a prefill's control port that can be cut, and the bootstrap registry that leads to it.

    `deafen` cuts it in one direction, as when a network loses all packets of one side. Neither side notices, and what
    was sent meanwhile arrives late.
    """

    def __init__(self, prefill: Side) -> None:
        self.target = tuple(prefill.control.rsplit(":", 1))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.sockets: list[socket.socket] = []
        self.plugged = True
        self.refused = 0
        self._hears = {"prefill": threading.Event(), "decode": threading.Event()}
        self.heal()
        info = registered(prefill.bootstrap)
        (row,) = [row for row in info["ranks"] if row["incarnation"] == prefill.incarnation]
        row["control"] = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.http = HttpServer("127.0.0.1")
        page = Page("application/json", json.dumps(info).encode)
        self.bootstrap = f"127.0.0.1:{self.http.serve(0, {BOOTSTRAP_PATH: page})}"
        self.accepting = threading.Thread(target=self._accept, daemon=True)
        self.accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            if not self.plugged:
                self.refused += 1
                near.close()
                continue
            try:
                far = socket.create_connection(self.target)
            except OSError:  # the prefill has gone, and so does who calls it
                near.close()
                continue
            self.sockets += [near, far]
            for *ends, hearer in ((near, far, "prefill"), (far, near, "decode")):
                threading.Thread(target=self._pump, args=(*ends, self._hears[hearer]), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, heard: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                heard.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def deafen(self, side: str) -> None:
        """What is sent to `side` waits, the greeting of a new connection too; the other direction works."""
        self._hears[side].clear()

    def heal(self) -> None:
        """Both sides receive again, and first what they have missed."""
        for heard in self._hears.values():
            heard.set()

    def cut(self) -> None:
        for end in self.sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.accepting.join(10)  # what it has just accepted is to be closed, too
        self.listener.close()
        self.heal()
        self.cut()
        for end in self.sockets:
            end.close()
        self.http.close()
