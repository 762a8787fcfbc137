"""Finds and ends the cluster's processes. It asks the kernel, because files may be stale after a crash."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dev.cluster import cgroups
from dev.cluster.layout import MARKER, NODES, State
from dev.shell import wait_for

SHIM = "containerd-shim-runc-v2"


@dataclass(frozen=True)
class Process:
    """A process that carries the cluster's marker."""

    pid: int
    command: str

    @property
    def is_shim(self) -> bool:
        """Whether the process is a container shim. Shims outlive the container runtime, as on any node."""
        return SHIM in self.command.split(" ")[0]


def marked(state: State) -> list[Process]:
    """Return the processes started for this cluster, except this one."""
    wanted = f"{MARKER}={state.root}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(Process(int(folder.name), command))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def kill_strays(state: State) -> list[Process]:
    """Kill the processes that a crashed supervisord left, except shims. The new runtime takes over their containers."""
    strays = [p for p in marked(state) if not p.is_shim]
    _kill([p.pid for p in strays])
    return strays


def kill_everything(state: State) -> int:
    """Kill every process of the cluster and of its pods. Return their number.

    Raises:
        TimeoutError: some did not end.
    """
    killed: set[int] = set()

    def left() -> str | None:
        pids = {p.pid for p in marked(state)} | set(pod_processes())
        _kill(pids)
        killed.update(pids)
        return f"processes {sorted(pids)}" if pids else None

    wait_for("the cluster's processes end", left, deadline_s=30, interval_s=0.1)
    return len(killed)


def pod_processes(node: str = "") -> Iterator[int]:
    """Yield the processes in the pods' cgroups.

    Args:
        node: name of a node, for those of its pods only.
    """
    groups = {one.cgroup for one in NODES if not node or one.name == node}
    for folder in cgroups.present():
        if folder.name not in groups:
            continue
        for file in folder.rglob("cgroup.procs"):
            try:
                yield from (int(line) for line in file.read_text().split())
            except OSError:
                # The group was removed meanwhile, or is threaded: then its parent lists the processes.
                continue


def _kill(pids: set[int] | list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
