"""Whether memory is there at all.

UCX calls a transfer over CMA done though `process_vm_writev` has failed for some of its addresses, so what is not
mapped must be refused before it is registered.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .memory import LayoutError, Region


def refuse_unmapped(regions: Iterable[Region]) -> None:
    """Raise LayoutError for a region that this process cannot read and write all of (proc_pid_maps(5))."""
    mapped = _mapped()
    for region in regions:
        if not any(start <= region.address and region.end <= end for start, end in mapped):
            raise LayoutError(
                f"region at {region.address:#x} with {region.nbytes} bytes is not memory that this process can read "
                "and write: keep the array or mapping that it lies in until the connector is closed"
            )


def _mapped() -> list[tuple[int, int]]:
    """Stretches of readable and writable addresses, those that touch as one."""
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
