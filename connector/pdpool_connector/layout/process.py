"""Which process of which host a peer is, so that another of the same host can see it end."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec


class ProcessName(msgspec.Struct, frozen=True, kw_only=True):
    """A process, for those who share its PID namespace. `started`: clock ticks since boot (proc_pid_stat(5))."""

    pid: int
    started: int
    boot_id: str
    pid_namespace: str


def this_process() -> ProcessName:
    """Our own name."""
    return ProcessName(
        pid=os.getpid(),
        started=_started(os.getpid()),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
    )


def open_process(name: ProcessName) -> int | None:
    """A pidfd, which becomes readable when the last thread of the process has ended; the caller closes it.

    None when it cannot be watched from here: another host or PID namespace, gone already, or no descriptor left.
    """
    here = this_process()
    if (name.boot_id, name.pid_namespace) != (here.boot_id, here.pid_namespace):
        return None
    try:
        pidfd = os.pidfd_open(name.pid)
    except (OSError, ValueError, OverflowError):
        return None
    # Asked after the pidfd was opened: a pid that was used again has another start.
    with contextlib.suppress(OSError):
        if _started(name.pid) == name.started:
            return pidfd
    os.close(pidfd)
    return None


def _started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
