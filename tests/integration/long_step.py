"""A forward step that takes the thread of a scheduler, and most of the interpreter's lock, until its next command."""

import select
import sys
import time

LOOK_EVERY = 20_000


def compute(within_s: float) -> dict[str, float | bool]:
    """Work in pure Python until stdin has a line. `at`: when that was; `ended`: whether it came in time."""
    deadline = time.monotonic() + within_s
    ended, total = False, 0
    while not ended and time.monotonic() < deadline:
        for number in range(LOOK_EVERY):
            total += number
        ended = bool(select.select([sys.stdin], [], [], 0)[0])
    return {"ended": ended, "at": time.monotonic()}
