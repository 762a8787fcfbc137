"""The port at which a Mooncake process is greeted: asked by our own hands, because Mooncake's own waits for 60 s.

What is said there (`transfer_metadata_plugin.cpp` and `common.h` of Mooncake 0.3.13, seen to be so on the wire): a
length as 8 bytes, little endian, then that many bytes, of which the first is the kind and the rest is JSON. Whoever is
asked answers in the same form, closes its side and waits for us to close ours.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Final

_PROBE: Final = 3
_QUESTION: Final = b"{}\n"
_LENGTH_BYTES: Final = 8
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)
_ANSWER_BYTES: Final = 4096
"""More than any answer to a probe."""


def answers(session: str, timeout_s: float) -> bool | None:
    """Whether the process at `session` (host:port) answers; None if there was only silence for `timeout_s`.

    False means that nobody listens there, or that it is not Mooncake who does.
    """
    deadline = time.monotonic() + timeout_s
    message = bytes([_PROBE]) + _QUESTION
    said = b""
    try:
        with socket.create_connection(_address(session), timeout_s) as door:
            door.settimeout(max(deadline - time.monotonic(), 1e-3))
            door.sendall(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
            # To the end: closed with bytes unread, the connection would fail for the other side.
            while len(said) < _ANSWER_BYTES and (piece := door.recv(_ANSWER_BYTES)):
                said += piece
                door.settimeout(max(deadline - time.monotonic(), 1e-3))
    except TimeoutError:
        return None
    except (OSError, ValueError, OverflowError):  # the peer has told the session: it may be none that can be called
        return False
    return said[_LENGTH_BYTES : _LENGTH_BYTES + 1] == bytes([_PROBE])


@contextlib.contextmanager
def bounded(session: str, timeout_s: float) -> Iterator[None]:
    """Let what Mooncake asks at `session` in here fail after `timeout_s`, where it would wait for 60 s."""
    timer = threading.Timer(timeout_s, _cut, (session,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _cut(session: str) -> None:
    """Shut down every connection of this process that leads to `session`, whoever in the process has opened it."""
    host, port = _address(session)
    wanted = {entry[4][:2] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since the listing, no socket, or not connected
            _shut(int(entry.name), wanted)


def _shut(descriptor: int, wanted: Set[object]) -> None:
    # One of our own for the same socket: the other may be closed and become another's at any moment.
    ours = os.dup(descriptor)
    try:
        if not stat.S_ISSOCK(os.fstat(ours).st_mode):
            return
        with socket.socket(fileno=os.dup(ours)) as connection:
            if connection.family in _FAMILIES and connection.getpeername()[:2] in wanted:
                connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(ours)


def _address(session: str) -> tuple[str, int]:
    host, _, port = session.rpartition(":")
    return host.strip("[]"), int(port)
