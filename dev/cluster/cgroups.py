"""The root cgroup of each node, in either version of the kernel's hierarchies."""

from collections.abc import Iterator
from pathlib import Path

from dev.cluster.layout import NODES

# What a kubelet asks of its root cgroup where there is one unified hierarchy.
CONTROLLERS = ("cpu", "cpuset", "memory", "pids", "hugetlb")


def missing_controllers() -> list[str]:
    """Return controllers that the unified hierarchy has and does not give to the groups below its root."""
    if _mounted("cgroup"):
        return []
    (root,) = _mounted("cgroup2")
    offered = (root / "cgroup.controllers").read_text().split()
    given = (root / "cgroup.subtree_control").read_text().split()
    return [name for name in CONTROLLERS if name in offered and name not in given]


def switch_controllers(names: list[str], sign: str) -> None:
    """Give (`+`) controllers to the groups below the unified root, or take them away (`-`).

    Raises:
        OSError: the kernel refuses, for example to take away what another group uses.
    """
    (root,) = _mounted("cgroup2")
    (root / "cgroup.subtree_control").write_text(" ".join(f"{sign}{name}" for name in names))


def make() -> None:
    """Make the root cgroup of each node in the hierarchies that the runtime uses."""
    # Where both versions exist the runtime uses the older one.
    for hierarchy in _mounted("cgroup") or _mounted("cgroup2"):
        for node in NODES:
            group = hierarchy / node.cgroup
            group.mkdir(exist_ok=True)
            _fill_cpuset(hierarchy, group)


def remove() -> None:
    """Remove the nodes' cgroups; their processes must be gone."""
    for root in present():
        folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
        for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
            folder.rmdir()


def present() -> Iterator[Path]:
    """Yield the root cgroups that exist; in hybrid mode the runtime makes some in the unified hierarchy too."""
    for hierarchy in _mounted("cgroup") + _mounted("cgroup2"):
        for node in NODES:
            if (hierarchy / node.cgroup).is_dir():
                yield hierarchy / node.cgroup


def _fill_cpuset(hierarchy: Path, group: Path) -> None:
    """A cpuset of the older version starts empty and then takes no process."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (hierarchy / name).exists() and not (group / name).read_text().strip():
            (group / name).write_text((hierarchy / name).read_text())


def _mounted(kind: str) -> list[Path]:
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return sorted({Path(words[1]) for words in lines if words[2] == kind})
