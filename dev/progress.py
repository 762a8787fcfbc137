"""Progress of a long wait: one rewritten line on a terminal, plain lines at intervals elsewhere."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

EVERY_S = 2.0
"""Time between checks of a blocking wait."""
APART_S = 1.5
"""Shortest time between two lines."""
UNCHANGED_S = 10.0
"""A line is repeated after this time where it cannot be rewritten."""
_START_OF_EMPTY_LINE = "\r\033[K"


class Progress:
    """The line of one wait. It begins with `lead` and ends with the seconds since this object was created.

    Args:
        lead: text before each line, for example an indent.
        stream: output; default: standard output.
        clock: returns monotonic seconds.
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
        """Show the current progress, unless the last line is too recent."""
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
        """Remove the line from a terminal, so that other output can follow."""
        if self._open:
            self._stream.write(_START_OF_EMPTY_LINE)
            self._stream.flush()
            self._open = False


@contextmanager
def ticking(progress: Progress, state: Callable[[], str]) -> Iterator[None]:
    """Show `state()` while the block runs. `state` must not raise, and nothing else may print meanwhile."""
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
