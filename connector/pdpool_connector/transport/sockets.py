"""What the kernel knows of a process's TCP connections: where they lead, and who holds the other ends.

When a process dies, the kernel goes on delivering what it had sent. Our end of a connection to it closes only after all
of that was read. So a process without such connections has received everything that the dead process had sent.
"""

import ipaddress
from collections.abc import Iterable, Set
from pathlib import Path
from typing import NamedTuple

from pdpool_connector.layout.process import started_at

_LISTEN = 0x0A
_NOT_ACCEPTED = frozenset({0x01, 0x03, 0x08})
"""ESTABLISHED, SYN_RECV, CLOSE_WAIT: without an owner, a connection in one of these waits to be accepted."""
_MAPPED = bytes(10) + b"\xff\xff"
"""First 12 bytes of an IPv4 address in IPv6 form (RFC 4291, 2.5.5.2)."""

_ANY = (bytes(4), bytes(16))
"""A socket that listens there takes connections to every address."""

End = tuple[bytes, int]
"""IP address and port."""
Connection = tuple[End, End]
"""Our end and the other."""


class _Row(NamedTuple):
    local: End
    remote: End
    state: int
    inode: int


class Holder(NamedTuple):
    """A process that has a socket open; `started` in clock ticks since boot (proc_pid_stat(5))."""

    pid: int
    started: int


def other_ends(pid: int) -> list[frozenset[Holder]]:
    """Who holds the other end of each TCP connection of process `pid`, but for those with itself.

    A connection that is not accepted yet counts too: it may carry bytes of a dead process. Empty for an end that no
    process holds any more, or that cannot be seen: in another network namespace, or held by another user's process. A
    socket outlives who opened it in processes that were forked off. Raises OSError when the process has gone or is
    another user's.
    """
    rows = [*_rows(pid, "tcp"), *_rows(pid, "tcp6")]
    ours = _inodes(pid)
    sockets = {(row.local, row.remote): row.inode for row in rows}
    doors = {row.local for row in rows if row.state == _LISTEN and row.inode in ours}
    mine = [row for row in rows if row.state != _LISTEN and (row.inode in ours or _comes_in(row, doors))]
    others = [sockets.get((row.remote, row.local), 0) for row in mine]
    others = [inode for inode in others if inode not in ours]
    holders = _holders(frozenset(others) - {0})
    return [frozenset(holders.get(inode, ())) for inode in others]


def connections(pid: int) -> frozenset[Connection]:
    """TCP connections of process `pid` with others, and those of its network namespace that are not accepted yet.

    One of them is in the table until `pid` has closed it, however long the other end is gone. Raises OSError as above.
    """
    rows = [*_rows(pid, "tcp"), *_rows(pid, "tcp6")]
    inodes = _inodes(pid)
    ours = {(row.local, row.remote) for row in rows if row.state != _LISTEN and row.inode in inodes}
    waiting = {(row.local, row.remote) for row in rows if not row.inode and row.state in _NOT_ACCEPTED}
    return frozenset((local, remote) for local, remote in ours | waiting if (remote, local) not in ours)


def leading_to(addresses: Iterable[str], table: Iterable[Connection]) -> frozenset[Connection]:
    """The connections whose other end has one of these IP addresses."""
    wanted = {ipaddress.ip_address(one).packed.removeprefix(_MAPPED) for one in addresses}
    return frozenset(connection for connection in table if connection[1][0] in wanted)


def _comes_in(row: _Row, doors: Set[End]) -> bool:
    """Whether this is a connection to one of these listening sockets that may not be in anybody's hands yet."""
    address, port = row.local
    return row.state in _NOT_ACCEPTED and any((at, port) in doors for at in (address, *_ANY))


def _holders(inodes: frozenset[int]) -> dict[int, set[Holder]]:
    """Which processes have these sockets open, as far as we may look."""
    found: dict[int, set[Holder]] = {}
    for entry in Path("/proc").iterdir() if inodes else ():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            held = _inodes(pid) & inodes
            holder = Holder(pid, started_at(pid))
        except OSError:
            continue  # gone meanwhile, or another user's
        for inode in held:
            found.setdefault(inode, set()).add(holder)
    return found


def _inodes(pid: int) -> set[int]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue  # closed since the listing
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def _rows(pid: int, table: str) -> list[_Row]:
    """Rows of /proc/<pid>/net/tcp or tcp6 (proc_pid_net(5)); a kernel without IPv6 has no tcp6."""
    path = Path(f"/proc/{pid}/net/{table}")
    if not path.exists():
        return []
    lines = path.read_text(encoding="ascii").splitlines()[1:]
    fields = [line.split() for line in lines]
    return [_Row(_end(row[1]), _end(row[2]), int(row[3], 16), int(row[9])) for row in fields]


def _end(text: str) -> End:
    """An address as 32-bit words in host order, little endian on every machine that NIXL and Mooncake support."""
    words, _, port = text.partition(":")
    raw = bytes.fromhex(words)
    address = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return address.removeprefix(_MAPPED), int(port, 16)
