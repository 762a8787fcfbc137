"""How calls of real data planes are made to fail for real, in a process whose peer they serve: nothing is faked.

Mooncake's server refuses a write outside the memory that its own process has registered. So writes fail that
go to the half of each region which a decode has left out. NIXL checks that when a peer is paired, so there a
connection is ended under the transfer, as a network does it.
"""

import contextlib
import os
import socket
from collections.abc import Sequence, Set
from pathlib import Path

from pdpool_connector.backends.mooncake_session import MooncakeSession
from pdpool_connector.layout.regions import Block

REASONS = {"nixl": "nixl[A-Za-z]+Error", "mooncake": "Mooncake reports a failed transfer"}
"""What the backend says of such a failure, by backend (a pattern)."""


def register_half(of_bytes: int) -> None:
    """From now on, Mooncake of this process registers the first half of each block of `of_bytes` bytes."""
    whole = MooncakeSession.register

    def register(session: MooncakeSession, blocks: Sequence[Block]) -> None:
        halves = [one._replace(nbytes=one.nbytes // 2) if one.nbytes == of_bytes else one for one in blocks]
        whole(session, halves)

    MooncakeSession.register = register


def end_connections(but: Set[int]) -> int:
    """End the TCP connections of this process, but those from or to these ports; how many ends that were."""
    ended = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since the listing, no socket, or not connected
            ours = os.dup(int(entry.name))
            try:
                ended += _end(ours, but)
            finally:
                os.close(ours)
    return ended


def _end(descriptor: int, but: Set[int]) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return False
        if {connection.getsockname()[1], connection.getpeername()[1]} & but:
            return False
        connection.shutdown(socket.SHUT_RDWR)
        return True
