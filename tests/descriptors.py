"""What a process holds of arenas and of other processes."""

import gc
from pathlib import Path


def descriptors() -> int:
    """How many arenas and processes the test's own process has open; other descriptors are other threads' matter."""
    gc.collect()
    return sum(_counts(path) for path in Path("/proc/self/fd").iterdir())


def _counts(path: Path) -> bool:
    try:
        name = str(path.readlink())
    except FileNotFoundError:  # of a thread that has closed it since
        return False
    return "memfd:pdpool" in name or name == "anon_inode:[pidfd]"
