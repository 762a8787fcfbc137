"""Waits for conditions of threads and processes."""

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def until(condition: Callable[[], Value], seconds: float = 60.0) -> Value:
    """Return the condition's value once it is true; fail if it is not within so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds} s"
        time.sleep(0.005)
    return value
