"""A control connection between two network namespaces whose packets are lost while frames are under way."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import zmq
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.transport.address import Address
from pdpool_connector.transport.control import ControlLink, ControlServer
from pdpool_connector.transport.drops import Drops

from dev.shell import wait_for
from tests.integration.namespaces import HOSTS, wire

TIMEOUTS = Timeouts(keepalive_idle_s=1, keepalive_interval_s=1)
GOODBYE = f.Goodbye(version=f.VERSION_MAX, sender="0" * 32, reason="")
TURNS = SimpleNamespace(later=lambda _: None, recheck=lambda _: None)
LIBC = ctypes.CDLL(None, use_errno=True)


def enter(namespace: int) -> None:
    """Move this thread. Python 3.12 has `os.setns`."""
    if LIBC.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def inside(namespace: str) -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Enter a network namespace with this thread. The threads of the context start there, and stay there."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    enter(there)
    try:
        yield zmq.Context()
    finally:
        enter(here)
        os.close(here)
        os.close(there)


def test_unacknowledged_frame_ends_the_connection() -> None:
    with wire() as between, ExitStack() as undo:
        with inside(between.names[0]) as context:
            server = ControlServer(undo.enter_context(context), HOSTS[4][0], 0, Drops(), TURNS, timeouts=TIMEOUTS)
            undo.callback(server.close)
        with inside(between.names[1]) as context:
            at = Address(HOSTS[4][0], server.port)
            link = ControlLink(undo.enter_context(context), at, Drops(), TURNS, timeouts=TIMEOUTS)
            undo.callback(link.close)
        link.send(GOODBYE)
        link._flush()
        arrived: list[object] = []

        def received() -> str | None:
            arrived.extend(server.receive())
            return None if arrived else "nothing arrived"

        wait_for("the first frame", received, deadline_s=10, interval_s=0.02)
        between.cut()
        link.send(GOODBYE)
        link._flush()
        wait_for("the end of the connection", lambda: None if link.ended() else "open", deadline_s=15, interval_s=0.05)
