"""Find and end the cluster's processes by what the kernel knows of them, not by files that a crash left behind."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
        """Whether it holds containers: those outlive the container runtime, as on any node."""
        return SHIM in self.command.split(" ")[0]


def marked(state: State) -> list[Process]:
    """Return the processes started for this cluster, this one excepted."""
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
    """Kill what a crashed supervisord may have left, except shims, whose containers the new runtime takes over."""
    strays = [p for p in marked(state) if not p.is_shim]
    _kill([p.pid for p in strays])
    return strays


def kill_everything(state: State) -> int:
    """Kill every process of the cluster and of its pods; return how many there were.

    Raises:
        TimeoutError: some would not go.
    """
    killed: set[int] = set()

    def left() -> str | None:
        pids = {p.pid for p in marked(state)} | set(pod_processes())
        _kill(pids)
        killed.update(pids)
        return f"processes {sorted(pids)}" if pids else None

    wait_for("the cluster's processes end", left, deadline_s=30, interval_s=0.1)
    return len(killed)


def pod_processes() -> Iterator[int]:
    """Yield the processes in the pods' cgroups."""
    for folder in _cgroups():
        for file in folder.rglob("cgroup.procs"):
            try:
                yield from (int(line) for line in file.read_text().split())
            except OSError:
                # The group was removed meanwhile, or is a threaded one, whose processes its parent lists.
                continue


def make_cgroups() -> None:
    """Make the root cgroup of each node in every hierarchy."""
    for hierarchy in _hierarchies():
        for node in NODES:
            group = hierarchy / node.cgroup
            group.mkdir(exist_ok=True)
            # A cpuset of the older hierarchy starts empty and then takes no process.
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (group / name).exists() and not (group / name).read_text().strip():
                    (group / name).write_text((hierarchy / name).read_text())


def remove_cgroups() -> None:
    """Remove the nodes' cgroups; their processes must be gone."""
    for root in _cgroups():
        for folder in sorted(_folders(root), key=lambda path: len(path.parts), reverse=True):
            folder.rmdir()


def _folders(root: Path) -> list[Path]:
    return [root, *(path for path in root.rglob("*") if path.is_dir())]


def _cgroups() -> Iterator[Path]:
    # In hybrid mode the runtime makes groups in the unified hierarchy too.
    for hierarchy in _mounted("cgroup") + _mounted("cgroup2"):
        for node in NODES:
            if (hierarchy / node.cgroup).is_dir():
                yield hierarchy / node.cgroup


def _hierarchies() -> list[Path]:
    # Where both exist the unified one has no controllers.
    return _mounted("cgroup") or _mounted("cgroup2")


def _mounted(kind: str) -> list[Path]:
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return sorted({Path(words[1]) for words in lines if words[2] == kind})


def _kill(pids: set[int] | list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
