"""What the kernel knows of a process's TCP connections: which of them lead to nobody any more.

When a process dies, the kernel goes on delivering what it had sent. Our end of such a connection closes only after all
of it was read, so a process without such ends has received everything that any dead process of this host had sent.
"""

import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_LISTEN = 0x0A
_NOT_ACCEPTED = frozenset({0x01, 0x03, 0x08})
"""ESTABLISHED, SYN_RECV, CLOSE_WAIT: without an owner, a connection in one of these waits to be accepted."""
_MAPPED = bytes(10) + b"\xff\xff"
"""First 12 bytes of an IPv4 address in IPv6 form (RFC 4291, 2.5.5.2)."""

End = tuple[bytes, int]
"""IP address and port."""
Connection = tuple[End, End]
"""Our end and the other."""


class _Row(NamedTuple):
    local: End
    remote: End
    state: int
    inode: int


def ownerless_connections(pid: int) -> int:
    """How many TCP connections of process `pid` have another end that no process owns, or that cannot be seen.

    An end is seen when it lies in the same network namespace. 0 proves that nothing is under way to us from any process
    of this namespace that has exited. Raises OSError when the process has gone or is another user's.
    """
    rows = [*_rows(pid, "tcp"), *_rows(pid, "tcp6")]
    ours = _inodes(pid)
    owners = {(row.local, row.remote): row.inode for row in rows}
    return sum(
        row.inode in ours and row.state != _LISTEN and not owners.get((row.remote, row.local), 0) for row in rows
    )


def connections(pid: int) -> frozenset[Connection]:
    """TCP connections of process `pid` with others, and those of its network namespace that nobody has accepted yet.

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
