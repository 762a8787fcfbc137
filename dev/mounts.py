"""Take away mounts, so that folders can be removed without reaching through them."""

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
    """Unmount everything at or below a folder; return how many mounts that were.

    Raises:
        CommandError: a mount cannot be taken away.
    """
    points = below(folder)
    for point in reversed(points):
        # Lazy: nothing uses them any more, but the kernel may still be closing files of a killed process.
        run("umount", "--lazy", "--no-canonicalize", point)
    return len(points)
