"""The owner thread: one loop over sockets, timers and posted calls, in which all state of a connector lives.

Whatever it calls must return within a millisecond or so. A call that raises is counted and logged; the loop goes on.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import zmq

from pdpool_connector.protocol.timers import Timers

log = logging.getLogger(__name__)

IDLE_S = 0.25
"""Longest sleep: how old the published snapshot of an idle connector can be."""
LAG_WINDOW_S = 5.0
"""The longest turn of the last such time counts as lag."""
POSTED_PER_TURN = 1024
"""Posted calls taken in one turn, so that sockets and timers get theirs."""

Call = Callable[[], None]
Readable = zmq.Socket[Any] | int


class Reactor:
    """Runs calls on its own thread. `after_turn` is called at the end of each turn, `at_end` once, last of all."""

    def __init__(self, name: str, after_turn: Call, at_end: Call) -> None:
        self._after_turn = after_turn
        self._at_end = at_end
        self._posted: deque[Call] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Whoever still posts may do so after the thread has ended, so the descriptor lives as long as this object.
        weakref.finalize(self, os.close, self._wake)
        self._poller = zmq.Poller()
        self._readers: dict[Readable, Call] = {}
        self.watch(self._wake, self._on_wake)
        self._woken = False
        self._timers: Timers[Hashable] = Timers()
        self._due: dict[Hashable, Call] = {}
        self._later: list[Call] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.faults = 0
        self._beat = time.monotonic()
        self._slowest: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End after what is posted already; True when the thread has ended within the time."""
        if not self._thread.is_alive():
            return True
        self.post(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def post(self, call: Call) -> None:
        """Have `call` run on the owner thread, in order of posting. From any thread; returns at once."""
        self._posted.append(call)
        # One wake-up does for all that is posted before the loop looks: it clears the flag first and looks then.
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake, 1)

    def watch(self, socket: Readable, call: Call) -> None:
        """Call when `socket` has something to read. Owner thread, or before `start`."""
        self._poller.register(socket, zmq.POLLIN)
        self._readers[socket] = call

    def unwatch(self, socket: Readable) -> None:
        """Stop watching."""
        self._poller.unregister(socket)
        del self._readers[socket]

    def at(self, key: Hashable, when: float, call: Call) -> None:
        """Call at `when` on the monotonic clock; replaces what `key` stood for."""
        self._timers.set(key, when)
        self._due[key] = call

    def cancel(self, key: Hashable) -> None:
        """Forget a timer, if it is there."""
        self._timers.cancel(key)
        self._due.pop(key, None)

    def later(self, call: Call) -> None:
        """Call at the end of the present turn. Owner thread."""
        self._later.append(call)

    def lag(self) -> float:
        """How late the loop is or lately was, in seconds: its longest recent turn, or the one it is stuck in."""
        now = time.monotonic()
        when, length = self._slowest
        recent = length if now - when < LAG_WINDOW_S else 0.0
        return max(recent, now - self._beat - IDLE_S, 0.0)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            ready = self._poller.poll(self._timeout_ms())
            begun = time.monotonic()
            for socket, _ in ready:
                # A call may close sockets that are still in this turn's list.
                if (reader := self._readers.get(socket)) is not None:
                    self.guard(reader)
            self._run_posted()
            self._run_due(begun)
            later, self._later = self._later, []
            for call in later:
                self.guard(call)
            self.guard(self._after_turn)
            self._note_turn(begun)
        self.guard(self._at_end)

    def guard(self, call: Call) -> None:
        """Run a call; its exception is counted and logged, and ends nothing else."""
        try:
            call()
        except Exception:
            self.faults += 1
            log.exception("a call on the connector's owner thread failed")

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _run_posted(self) -> None:
        self._woken = False
        for _ in range(min(len(self._posted), POSTED_PER_TURN)):
            self.guard(self._posted.popleft())
        if self._posted:
            os.eventfd_write(self._wake, 1)

    def _run_due(self, now: float) -> None:
        while (key := self._timers.pop_due(now)) is not None:
            self.guard(self._due.pop(key))

    def _timeout_ms(self) -> int:
        when = self._timers.next()
        seconds = IDLE_S if when is None else min(max(when - time.monotonic(), 0.0), IDLE_S)
        return int(seconds * 1000 + 0.999)

    def _note_turn(self, begun: float) -> None:
        now = time.monotonic()
        length = now - begun
        when, slowest = self._slowest
        if length >= slowest or now - when >= LAG_WINDOW_S:
            self._slowest = (now, length)
        self._beat = now
