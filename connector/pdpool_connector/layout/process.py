"""Which process of which host a peer is, so that another of the same host can see it end."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
from pathlib import Path
from typing import Annotated

import ifaddr
import msgspec

MAX_ADDRESSES = 256
_Text = Annotated[str, msgspec.Meta(max_length=64)]


class ProcessName(msgspec.Struct, frozen=True, kw_only=True):
    """A process: its number in its PID namespace, and where it runs.

    Args:
        pid: Its number in `pid_namespace`.
        started: When it began, in clock ticks since boot (proc_pid_stat(5)).
        container_started: The same of process 1 of its PID namespace; None if that cannot be read.
        addresses: IP addresses of its network namespace.
        pod_uid: Of its Kubernetes pod, "" outside of one.
    """

    pid: int
    started: int
    boot_id: str
    pid_namespace: str
    container_started: int | None = None
    network_namespace: str = ""
    addresses: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAX_ADDRESSES)] = ()
    pod_uid: _Text = ""

    def __post_init__(self) -> None:
        """Check that the addresses are some. Raises ValueError."""
        for one in self.addresses:
            ipaddress.ip_address(one)

    @property
    def container(self) -> str:
        """One run of one container: another text for each, also within one pod. "" if that is not known.

        Containers that share a PID namespace have the same one, over their restarts too.
        """
        if self.container_started is None:
            return ""
        return f"{self.boot_id} {self.pid_namespace} {self.container_started}"

    def addresses_seen_by(self, other: ProcessName) -> frozenset[str]:
        """Those under which a connection of `other` can lead to it. Loopback is a network namespace's own."""
        if (self.boot_id, self.network_namespace) == (other.boot_id, other.network_namespace):
            return frozenset(self.addresses)
        return frozenset(one for one in self.addresses if not ipaddress.ip_address(one).is_loopback)


def this_process(pod_uid: str = "") -> ProcessName:
    """Our own name."""
    return ProcessName(
        pid=os.getpid(),
        started=started_at(os.getpid()),
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        container_started=_started_if_shown(1),
        network_namespace=str(Path("/proc/self/ns/net").readlink()),
        addresses=_addresses(),
        pod_uid=pod_uid,
    )


def boot_id() -> str:
    """Of the running kernel: another one after each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def pid_namespace() -> str:
    """In which numbers of processes mean the same."""
    return str(Path("/proc/self/ns/pid").readlink())


def _addresses() -> tuple[str, ...]:
    """All IP addresses that are up here; none if there are more than `MAX_ADDRESSES`."""
    found = {ip.ip if isinstance(ip.ip, str) else ip.ip[0] for one in ifaddr.get_adapters() for ip in one.ips}
    return tuple(sorted(found)) if len(found) <= MAX_ADDRESSES else ()


def _started_if_shown(pid: int) -> int | None:
    """As `started_at`; None where /proc hides other users' processes."""
    try:
        return started_at(pid)
    except OSError:
        return None


def open_process(name: ProcessName) -> int | None:
    """A pidfd, which becomes readable when the last thread of the process has ended; the caller closes it.

    None when it cannot be watched from here: another host or PID namespace, ended already, or no descriptor left.
    """
    try:
        if (name.boot_id, name.pid_namespace) != (boot_id(), pid_namespace()):
            return None
        pidfd = os.pidfd_open(name.pid)
    except (OSError, ValueError, OverflowError):
        return None
    # Asked after the pidfd was opened: a pid that was used again has another start.
    with contextlib.suppress(OSError):
        if started_at(name.pid) == name.started:
            return pidfd
    os.close(pidfd)
    return None


def is_gone(name: ProcessName) -> bool:
    """Whether the process has certainly ended; False where it cannot be watched from here."""
    if (name.boot_id, name.pid_namespace) != (boot_id(), pid_namespace()):
        return False
    try:
        pidfd = os.pidfd_open(name.pid)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    try:
        return has_ended(pidfd) or started_at(name.pid) != name.started
    except OSError:  # it went while we looked
        return True
    finally:
        os.close(pidfd)


def has_ended(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended, with every thread."""
    news = select.poll()
    news.register(pidfd, select.POLLIN)
    return bool(news.poll(0))


def started_at(pid: int) -> int:
    """When a process began, in clock ticks since boot (proc_pid_stat(5)). Raises OSError when it has ended."""
    return int(_stat(pid)[19])


def ancestors(pid: int) -> frozenset[tuple[int, int]]:
    """The ancestors of a process that still run, by number and start, as far as /proc shows them."""
    found: set[tuple[int, int]] = set()
    with contextlib.suppress(OSError):
        while (pid := int(_stat(pid)[1])) > 0:
            found.add((pid, started_at(pid)))
    return frozenset(found)


def _stat(pid: int) -> list[str]:
    """The fields of proc_pid_stat(5) behind the name, which may contain any text."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()
