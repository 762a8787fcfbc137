"""Finds out by measurement how bytes reach a peer, where the library that moves them does not say.

Formula: a probe writes `PROBE_BYTES` to the peer while the kernel counts what each TCP connection of this process
sends (tcp(7), TCP_INFO). As many bytes to the peer's addresses mean TCP. Almost no bytes to any address mean
another transport: the kernel's copy (CMA) to a process of this host, or RDMA to another host if a device is open.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from pathlib import Path
from typing import Final, NamedTuple

from pdpool_connector.layout.process import ProcessName, boot_id

PROBE_BYTES: Final = 64 << 10
SLACK_BYTES: Final = 16 << 10
"""What the control traffic of a library and of the connector may add meanwhile."""
_BYTES_SENT: Final = slice(200, 208)
"""Place of `tcpi_bytes_sent` in `struct tcp_info` (linux/tcp.h), since Linux 4.19."""
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)
_OTHER_COPIERS: Final = ("/dev/xpmem", "/dev/knem")
"""Devices with which UCX may copy between processes instead of CMA."""


class Traffic(NamedTuple):
    """What this process has sent so far: by socket (remote address, bytes), and whether a device of RDMA is open."""

    sent: dict[int, tuple[str, int]]
    rdma: bool


def traffic() -> Traffic:
    """Count now. Does not block; a descriptor that is closed meanwhile is left out."""
    sent: dict[int, tuple[str, int]] = {}
    rdma = False
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):  # closed since the listing, no socket, or not connected
            target = str(entry.readlink())
            rdma = rdma or target.startswith("/dev/infiniband/")
            if target.startswith("socket:["):
                sent[int(target[8:-1])] = _sent(int(entry.name))
    return Traffic(sent, rdma)


def transport_of(before: Traffic, after: Traffic, peer: ProcessName | None, *, device: bool) -> str | None:
    """The transport of a probe between the two counts: "tcp", "cma", "rdma", or "" where it is none that is known.

    device: whether memory of a device takes part. Within one host CUDA IPC or staging may then carry it, which no
    counter shows, so it is "".

    None: there was too much other traffic, or the peer does not name its process.
    """
    if peer is None:
        return None
    addresses = {_plain(address) for address in peer.addresses}
    to_peer = to_others = 0
    for inode, (address, count) in after.sent.items():
        grown = count - before.sent.get(inode, ("", 0))[1]
        if address in addresses:
            to_peer += grown
        else:
            to_others += grown
    if PROBE_BYTES <= to_peer < PROBE_BYTES + SLACK_BYTES:
        return "tcp"
    if to_peer + to_others >= SLACK_BYTES:
        return None
    if peer.boot_id != boot_id():
        return "rdma" if after.rdma else ""
    others = device or after.rdma or any(Path(device).exists() for device in _OTHER_COPIERS)
    return "" if others else "cma"


def _sent(descriptor: int) -> tuple[str, int]:
    # One of our own for the same socket: the other may be closed and become another's at any moment.
    ours = os.dup(descriptor)
    try:
        if not stat.S_ISSOCK(os.fstat(ours).st_mode):
            raise OSError("no socket any more")
        with socket.socket(fileno=os.dup(ours)) as connection:
            if connection.family not in _FAMILIES or connection.type != socket.SOCK_STREAM:
                raise OSError("no TCP connection")
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT.stop)
            return _plain(connection.getpeername()[0]), int.from_bytes(info[_BYTES_SENT], "little")
    finally:
        os.close(ours)


def _plain(address: str) -> str:
    """An address without scope, IPv4 as such where it is mapped into IPv6."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
