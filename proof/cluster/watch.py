"""Reads the cluster again and again in a thread while a block runs."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

import urllib3.exceptions

from dev.shell import CommandError

ANSWER_S: Final = 5.0
"""Longest wait for one answer, in seconds. The API server may be frozen."""
UNREACHABLE: Final = (CommandError, OSError, urllib3.exceptions.HTTPError, json.JSONDecodeError)
_REQUESTS_A_READ: Final = 4
"""Most requests that one read sends."""


class Watch:
    """Calls each read while the block runs. Times are seconds since the watch was made.

    Args:
        name: Of the thread.
        reads: Called one after the other. One that raises an error of `UNREACHABLE` is tried again at the next look.
        look_s: Pause between looks, in seconds.
    """

    def __init__(self, name: str, reads: Sequence[Callable[[], None]], look_s: float) -> None:
        self._reads = tuple(reads)
        self._look_s = look_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self._began = time.monotonic()
        self._failure: Exception | None = None

    @property
    def now_s(self) -> float:
        """Seconds since the watch was made."""
        return round(time.monotonic() - self._began, 1)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(len(self._reads) * _REQUESTS_A_READ * ANSWER_S + 10)
        if self._failure and error is None:
            raise self._failure

    def _run(self) -> None:
        while not self._stop.wait(self._look_s):
            for read in self._reads:
                try:
                    read()
                except UNREACHABLE:
                    continue
                except Exception as error:  # noqa: BLE001 -- raised by the block's end, in the thread of its user
                    self._failure = error
                    return
