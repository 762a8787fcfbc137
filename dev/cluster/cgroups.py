"""The root cgroup of each node, in version 1 and version 2 of the kernel's hierarchies."""

from collections.abc import Iterator
from pathlib import Path

from dev.cluster.layout import NODES

# Controllers that a kubelet needs in its root cgroup under the unified hierarchy.
CONTROLLERS = ("cpu", "cpuset", "memory", "pids", "hugetlb")


def missing_controllers() -> list[str]:
    """Return controllers that the unified hierarchy has, but does not enable for the groups below its root."""
    if _mounted("cgroup"):
        return []
    (root,) = _mounted("cgroup2")
    offered = (root / "cgroup.controllers").read_text().split()
    given = (root / "cgroup.subtree_control").read_text().split()
    return [name for name in CONTROLLERS if name in offered and name not in given]


def switch_controllers(names: list[str], sign: str) -> None:
    """Enable (`+`) or disable (`-`) controllers for the groups below the unified root.

    Raises:
        OSError: the kernel refused. For example, another group uses the controller.
    """
    (root,) = _mounted("cgroup2")
    (root / "cgroup.subtree_control").write_text(" ".join(f"{sign}{name}" for name in names))


def make() -> None:
    """Create the root cgroup of each node in the hierarchies that the runtime uses."""
    # If both versions exist, the runtime uses version 1.
    for hierarchy in _mounted("cgroup") or _mounted("cgroup2"):
        for node in NODES:
            group = hierarchy / node.cgroup
            group.mkdir(exist_ok=True)
            _fill_cpuset(hierarchy, group)


def remove() -> None:
    """Remove the nodes' cgroups. Their processes must have ended."""
    for root in present():
        folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
        for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
            folder.rmdir()


def present() -> Iterator[Path]:
    """Yield the existing root cgroups. In hybrid mode the runtime also creates some in the unified hierarchy."""
    for hierarchy in _mounted("cgroup") + _mounted("cgroup2"):
        for node in NODES:
            if (hierarchy / node.cgroup).is_dir():
                yield hierarchy / node.cgroup


def _fill_cpuset(hierarchy: Path, group: Path) -> None:
    """Fill a cpuset. In version 1, a new cpuset is empty and then accepts no process."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (hierarchy / name).exists() and not (group / name).read_text().strip():
            (group / name).write_text((hierarchy / name).read_text())


def _mounted(kind: str) -> list[Path]:
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return sorted({Path(words[1]) for words in lines if words[2] == kind})
