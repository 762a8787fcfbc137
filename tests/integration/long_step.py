"""A forward step that takes the thread of a scheduler, and most of the interpreter's lock, until its next order."""

import select
import sys
import time

LOOK_EVERY = 20_000


def compute(within_s: float) -> dict[str, float | bool]:
    """Work in pure Python until there is a line at stdin; when that was, and whether it came in time."""
    deadline = time.monotonic() + within_s
    told, total = False, 0
    while not told and time.monotonic() < deadline:
        for number in range(LOOK_EVERY):
            total += number
        told = bool(select.select([sys.stdin], [], [], 0)[0])
    return {"told": told, "at": time.monotonic()}
