"""What the longest turns of a connector's loop are made of."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Clocks = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the loop's own thread, which began at `begun` (monotonic seconds); the rest in milliseconds."""

    begun: float
    wall: float
    cpu: float
    """In which it ran, but for `collected`."""
    queued: float
    """In which it could have run, and other threads or processes had the cores."""
    collected: float
    """In which the interpreter collected garbage, in whichever thread: none of the process's others runs then."""

    @property
    def waited(self) -> float:
        """The rest: it waited, for the GIL mostly."""
        return max(self.wall - self.cpu - self.queued - self.collected, 0.0)


def longest(turns: list[Turn], window_s: float) -> list[Turn]:
    """The longest turn of each window of time."""
    found: dict[float, Turn] = {}
    for turn in turns:
        window = turn.begun // window_s
        if window not in found or turn.wall > found[window].wall:
            found[window] = turn
    return list(found.values())


def parts(turns: list[Turn]) -> str:
    """Means of turns and of what they are made of."""
    rows = [(turn.wall, turn.cpu, turn.collected, turn.queued, turn.waited) for turn in turns]
    wall, cpu, collected, queued, waited = np.mean(rows, axis=0)
    return (
        f"{wall:.1f} ms on average, of which CPU {cpu:.1f}, collecting garbage {collected:.1f}, "
        f"waiting for a core {queued:.1f}, for the GIL {waited:.1f}"
    )


class Watch:
    """Notes each turn until `end`, at a cost of some 5 us."""

    def __init__(self, connector: Any) -> None:  # noqa: ANN401 - reaches into both kinds
        self._reactor = connector._reactor
        self._inner: Callable[[object], None] = self._reactor._take_turn
        self._notes: list[tuple[Clocks, Clocks]] = []
        self._file = -1
        self._collected_s = self._collected_here_s = self._since = 0.0
        gc.callbacks.append(self._on_collection)
        self._reactor._take_turn = self._take_turn

    def end(self) -> list[Turn]:
        """All turns since the begin."""
        self._reactor._take_turn = self._inner
        gc.callbacks.remove(self._on_collection)
        turns = []
        for before, after in self._notes:
            wall, cpu, queued, collected, here = (
                (late - early) * 1e3 for early, late in zip(before, after, strict=True)
            )
            turns.append(Turn(before[0], wall, max(cpu - here, 0.0), queued, collected))
        return turns

    def _take_turn(self, ready: object) -> None:
        before = self._clocks()
        self._inner(ready)
        self._notes.append((before, self._clocks()))

    def _clocks(self) -> Clocks:
        if self._file < 0:  # in the loop's own thread
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        queued_ns = int(os.pread(self._file, 64, 0).split()[1])
        return time.monotonic(), time.thread_time(), queued_ns / 1e9, self._collected_s, self._collected_here_s

    def _on_collection(self, phase: str, info: object) -> None:
        del info
        now = time.monotonic()
        if phase == "start":
            self._since = now
            return
        self._collected_s += now - self._since
        if threading.current_thread() is self._reactor._thread:
            self._collected_here_s += now - self._since
