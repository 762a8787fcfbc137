"""A probe of the port on which a Mooncake process listens. Mooncake's own request to that port waits for 60 s.

The format is that of Mooncake 0.3.13 (`transfer_metadata_plugin.cpp`, `common.h`; checked on the wire): a length as 8
bytes, little endian, then as many bytes. The first is the kind, the rest is JSON. The answer has the same form. The
process then closes its side and waits for us to close ours.
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

    False means that no process listens there, or that it is not Mooncake.
    """
    deadline = time.monotonic() + timeout_s
    message = bytes([_PROBE]) + _QUESTION
    answer = b""
    try:
        with socket.create_connection(_address(session), timeout_s) as door:
            door.settimeout(max(deadline - time.monotonic(), 1e-3))
            door.sendall(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
            # To the end: closed with bytes unread, the connection would fail for the other side.
            while len(answer) < _ANSWER_BYTES and (piece := door.recv(_ANSWER_BYTES)):
                answer += piece
                door.settimeout(max(deadline - time.monotonic(), 1e-3))
    except TimeoutError:
        return None
    except (OSError, ValueError, OverflowError):  # the session is the peer's text, and may be no address
        return False
    return answer[_LENGTH_BYTES : _LENGTH_BYTES + 1] == bytes([_PROBE])


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
    """Shut down every connection of this process to `session`, also those that Mooncake opened."""
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
