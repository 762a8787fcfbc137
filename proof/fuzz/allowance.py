"""A bound on memory for each input: what is allocated must be in proportion to what was sent."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

FIXED, PER_BYTE = 256 * 1024, 64
"""Bytes that any input may cost, and bytes for each byte of it: objects of msgspec's cost some forty."""
EVERY = 64
"""One input of so many is measured: measuring slows Python down."""


class Allowance:
    """Measures now and then. Raises MemoryError where an input costs too much."""

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def for_input(self, data: bytes) -> Iterator[None]:
        """Inside, `data` is read."""
        self._count += 1
        if self._count % EVERY:
            yield
            return
        tracemalloc.start(1)
        try:
            yield
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        most = FIXED + PER_BYTE * len(data)
        if peak > most:
            raise MemoryError(f"{peak} bytes were allocated for an input of {len(data)}; {most} are allowed")
