"""Checks that host memory exists.

UCX reports a transfer over CMA as done though `process_vm_writev` has failed for some of its addresses. So memory that
is not mapped is refused before it is registered.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .regions import LayoutError, Region


def refuse_unmapped(regions: Iterable[Region]) -> None:
    """Raise LayoutError for a host region that this process cannot read and write all of (proc_pid_maps(5)).

    Regions of a device are not checked: their addresses are not in that table.
    """
    mapped = _mapped()
    for region in regions:
        if region.device is not None:
            continue
        if not any(start <= region.address and region.end <= end for start, end in mapped):
            raise LayoutError(
                f"region at {region.address:#x} with {region.nbytes} bytes is not memory that this process can read "
                "and write: keep the array or mapping that it lies in until the connector is closed, and set `device` "
                "for memory of a GPU"
            )


def _mapped() -> list[tuple[int, int]]:
    """Ranges of readable and writable addresses; neighbours are joined."""
    found: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        bounds, rights = line.split(maxsplit=2)[:2]
        if not rights.startswith("rw"):
            continue
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if found and found[-1][1] == start:
            start, _ = found.pop()
        found.append((start, end))
    return found
