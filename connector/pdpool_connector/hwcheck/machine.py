"""What this machine has: GPUs, RDMA devices and their GIDs, the limit on locked memory, shared memory.

Everything is read from /proc and /sys, so that a machine without drivers or tools gives an answer too.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from pdpool_connector.backends.memlock import memlock_bytes

ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
"""What the kernel shows for an entry of the GID table that is not in use."""


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device, as /sys/class/infiniband shows it.

    `link_layer`: "InfiniBand" or "Ethernet" (RoCE). `gids`: (index, GID, type) of the entries in use; the type is
    "IB/RoCE v1", "RoCE v2" or "" where the kernel does not say.
    """

    device: str
    port: int
    active: bool
    link_layer: str
    gids: tuple[tuple[int, str, str], ...]


@dataclass(frozen=True)
class Machine:
    """What was found. `memlock_bytes`: RLIMIT_MEMLOCK of this process, None for no limit."""

    gpus: tuple[str, ...]
    rdma: tuple[RdmaPort, ...]
    verbs_devices: tuple[str, ...]
    memlock_bytes: int | None
    shm_bytes: int

    @property
    def rdma_ready(self) -> bool:
        """Whether a port is active and this process can open its device."""
        return bool(self.verbs_devices) and any(port.active for port in self.rdma)


def look(root: Path = Path("/")) -> Machine:
    """Read the machine's hardware.

    Args:
        root: where proc, sys and dev are mounted; another one in tests.
    """
    return Machine(
        gpus=_gpus(root / "proc/driver/nvidia/gpus"),
        rdma=_rdma(root / "sys/class/infiniband"),
        verbs_devices=_names(root / "dev/infiniband", "uverbs*"),
        memlock_bytes=memlock_bytes(),
        shm_bytes=_free_bytes(root / "dev/shm"),
    )


def _gpus(folder: Path) -> tuple[str, ...]:
    """Model of each NVIDIA GPU, from its information file."""
    models = []
    for file in sorted(folder.glob("*/information")):
        lines = dict(line.split(":", 1) for line in _text(file).splitlines() if ":" in line)
        models.append(lines.get("Model", "unknown GPU").strip())
    return tuple(models)


def _rdma(folder: Path) -> tuple[RdmaPort, ...]:
    return tuple(
        RdmaPort(
            device=port.parent.parent.name,
            port=int(port.name),
            active="ACTIVE" in _text(port / "state"),
            link_layer=_text(port / "link_layer"),
            gids=_gids(port),
        )
        for port in sorted(folder.glob("*/ports/*"))
    )


def _gids(port: Path) -> tuple[tuple[int, str, str], ...]:
    entries = []
    for file in sorted((port / "gids").glob("*"), key=lambda file: int(file.name)):
        gid = _text(file)
        if gid and gid != ZERO_GID:
            entries.append((int(file.name), gid, _text(port / "gid_attrs/types" / file.name)))
    return tuple(entries)


def _names(folder: Path, pattern: str) -> tuple[str, ...]:
    return tuple(sorted(one.name for one in folder.glob(pattern)))


def _text(file: Path) -> str:
    """The text of a small file; "" where it cannot be read, as the type of a GID entry that is not in use."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _free_bytes(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
