"""What the experiments are about: memory, data planes, events."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

MARK: Final = 0x5A
"""Every byte that the writer writes."""
CANARY: Final = 0xC5
LAYERS: Final = 2
PAGES: Final = 8
DEPTH: Final = 4
"""Writes under way at a time."""
SIZES: Final = {"small": 512, "large": 128 << 10}
"""Bytes of one item: writes of 16 KiB, which UCX sends eagerly, and of 4 MiB, which fill socket buffers."""


@dataclass(frozen=True)
class Geometry:
    """Memory of one side."""

    item_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the arena, aux row included."""
        return 2 * LAYERS * PAGES * self.item_bytes + 64


def geometry(size: str) -> Geometry:
    """By name of the size."""
    return Geometry(SIZES[size])


@dataclass(frozen=True)
class Plane:
    """Transfer backend and transport."""

    backend: str
    transport: str
    environment: Mapping[str, str] = field(default_factory=dict)


PLANES: Final = (
    Plane("local", "memory"),
    Plane("nixl", "memory", {"UCX_NET_DEVICES": "lo"}),
    Plane("nixl", "tcp", {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp"}),
    Plane("mooncake", "tcp"),
)
