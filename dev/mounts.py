"""Removes mounts, so that folders can be deleted without touching the mounted files."""

import re
from pathlib import Path

from dev.shell import run


def below(folder: Path) -> list[Path]:
    """Return the mount points at or below a folder, innermost last."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # The kernel writes spaces and backslashes in paths as octal escapes.
        point = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), line.split()[4]))
        if point == folder or folder in point.parents:
            found.append(point)
    return found


def remove_below(folder: Path) -> int:
    """Unmount everything at or below a folder. Return the number of mounts.

    Raises:
        CommandError: a mount cannot be removed.
    """
    points = below(folder)
    for point in reversed(points):
        # Lazy: nothing uses them any more, but the kernel may still close files of a killed process.
        run("umount", "--lazy", "--no-canonicalize", point)
    return len(points)
