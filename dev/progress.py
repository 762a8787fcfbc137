"""How a long wait stands: one line that is rewritten on a terminal, plain lines now and then elsewhere."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

EVERY_S = 2.0
"""Time between two looks at a wait that blocks."""
APART_S = 1.5
"""Shortest time between two lines."""
UNCHANGED_S = 10.0
"""After that a line is repeated where it cannot be rewritten."""
_START_OF_EMPTY_LINE = "\r\033[K"


class Progress:
    """The line of one wait. It begins with `lead` and ends with the seconds since this object was made.

    Args:
        lead: what comes before each line, for example an indent.
        stream: where it goes; default: standard output.
        clock: seconds that only grow.
    """

    def __init__(
        self, lead: str = "", stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lead = lead
        self._stream = stream or sys.stdout
        self._clock = clock
        self._began = self._shown_at = clock()
        self._shown = ""
        self._in_place = self._stream.isatty()
        self._open = False

    def show(self, text: str) -> None:
        """Show how it stands now, unless the last line is too young."""
        now = self._clock()
        age = now - self._shown_at
        if age < APART_S or (not self._in_place and text == self._shown and age < UNCHANGED_S):
            return
        self._shown, self._shown_at = text, now
        line = f"{self._lead}{text} [{now - self._began:.0f} s]"
        if self._in_place:
            # A line that wraps could not be rewritten.
            line = _START_OF_EMPTY_LINE + line[: shutil.get_terminal_size().columns - 1]
        self._stream.write(line if self._in_place else line + "\n")
        self._stream.flush()
        self._open = self._in_place

    def clear(self) -> None:
        """Remove the line from a terminal, so that something else can be written."""
        if self._open:
            self._stream.write(_START_OF_EMPTY_LINE)
            self._stream.flush()
            self._open = False


@contextmanager
def ticking(progress: Progress, state: Callable[[], str]) -> Iterator[None]:
    """Show `state()`, which must not raise, for as long as the block runs; nothing else may write meanwhile."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(EVERY_S):
            progress.show(state())

    thread = threading.Thread(target=tick, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        progress.clear()
