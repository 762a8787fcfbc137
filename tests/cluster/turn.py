"""The lock by which users of the local cluster share it, or have it alone."""

import contextlib
import fcntl
from collections.abc import Iterator
from typing import IO

from dev.paths import cache_dir
from dev.shell import wait_for

TURN_S = 1800
"""Longest wait for other users, in seconds: all tests of the whole stack, or of operators, on a slow machine."""


@contextlib.contextmanager
def turn(how: int, deadline_s: float = TURN_S) -> Iterator[IO[str]]:
    """Hold the lock by which tests and drills share the cluster (`LOCK_SH`) or use it alone (`LOCK_EX`).

    Raises:
        TimeoutError: others hold it.
    """
    path = cache_dir() / "cluster-tests.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:

        def busy() -> str | None:
            return None if taken(lock, how) else f"other tests or drills hold {lock.name}"

        wait_for("a turn on the cluster", busy, deadline_s=deadline_s)
        yield lock


def taken(lock: IO[str], how: int) -> bool:
    """Take an open lock, or change how it is held. Return whether that succeeded."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
