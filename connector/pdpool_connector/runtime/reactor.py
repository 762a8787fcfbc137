"""The owner of a connector's state: one loop over sockets, timers and posted calls, one turn after another.

The thread that has the turn owns all state. Mostly it is the reactor's own thread. While that sleeps, another thread
may take a turn for a call of its own (`step`). That saves two switches between threads, which take longer than most
turns. Calls that arrive during a turn are left to the thread that has it.

All calls in a turn must return within about a millisecond. A call that raises is counted and logged; the loop goes on.
The reactor's thread sleeps on descriptors alone, and uses zmq's sockets in turns only.
"""

import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import zmq

from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.timers import Timers
from pdpool_connector.transport.control import readable

log = logging.getLogger(__name__)

POSTED_PER_TURN = 1024
"""Posted calls taken in one turn, so that sockets and timers get theirs."""
POSTED_PER_STEP = 16
"""The same in a turn of another thread."""

Call = Callable[[], None]
Socket = zmq.Socket[Any]
Readable = Socket | int


class Reactor:
    """`after_turn` is called at the end of each turn, `at_rest` before the reactor's thread sleeps, `at_end` once, last
    of all. `torn` is called when an exception that ends the program has cut a turn of another thread's short.
    """

    def __init__(
        self,
        name: str,
        *,
        after_turn: Call,
        at_rest: Call,
        at_end: Call,
        torn: Call,
        timeouts: Timeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = clock
        """The connector's clock: seconds."""
        timeouts = timeouts or Timeouts()
        self._idle_s, self._lag_window_s = timeouts.loop_idle_s, timeouts.loop_lag_window_s
        self._after_turn, self._at_rest, self._at_end, self._torn = after_turn, at_rest, at_end, torn
        self._turn = threading.Lock()
        self._turn.acquire()  # there are no turns before `start`
        self._taken = False
        """Whether a thread has the turn."""
        self._sleeps_until = 0.0
        self._posted: deque[Call] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Threads may still post after the loop has ended, so the descriptor lives as long as this object.
        weakref.finalize(self, os.close, self._wake)
        self._woken = False
        self._poll = select.epoll()
        self._readers: dict[int, tuple[Readable, Call]] = {}
        self._unread: set[int] = set()
        """Sockets with something to read that their descriptors do not announce any more."""
        self.watch(self._wake, self._on_wake)
        self._timers: Timers[Hashable] = Timers()
        self._due: dict[Hashable, Call] = {}
        self._soon: deque[Call] = deque()
        self._later: list[Call] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.faults = 0
        self._beat = self.now()
        self._slowest: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError when none is left; then it may be tried again."""
        self._turn.release()
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread left
            self._turn.acquire()
            raise

    @property
    def running(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """End after what is posted already; True when the thread has ended within the time."""
        if not self.running:
            return True
        self.post(self._stop)
        self._thread.join(timeout_s)
        return not self.running

    def post(self, call: Call) -> None:
        """Have `call` run in a turn, in order of posting. From any thread; returns at once."""
        self._posted.append(call)
        if not self._taken:
            self._wake_up()

    def step(self, call: Call) -> None:
        """As `post`, and while no thread has the turn, take one for it at once. From any thread that can spare 1 ms."""
        self._posted.append(call)
        if self._woken or self._taken:
            return  # a turn that is due or under way takes it
        if not self._turn.acquire(blocking=False):
            return  # the thread that has it looks at posted calls when it has released it
        busy = self._taken = True
        try:
            begun = self.now()
            self._run_posted(POSTED_PER_STEP)
            self._finish(begun)
            busy = bool(self._unread) or self._next_due() < self._sleeps_until
        except BaseException:
            # KeyboardInterrupt, or another exception of a signal handler, may come between any two steps.
            self._posted.appendleft(self._torn)
            raise
        finally:
            self._taken = False
            self._turn.release()
            if busy or self._posted:
                self._wake_up()

    def watch(self, source: Readable, call: Call) -> None:
        """Call when `source` has something to read. In a turn, or before `start`."""
        number = _descriptor(source)
        self._readers[number] = (source, call)
        self._poll.register(number, select.EPOLLIN)
        if not isinstance(source, int):
            self.recheck(source)

    def unwatch(self, source: Readable) -> None:
        """Stop watching; to be called before `source` is closed."""
        number = _descriptor(source)
        self._poll.unregister(number)
        self._unread.discard(number)
        del self._readers[number]

    def recheck(self, socket: Socket) -> None:
        """Look whether a watched socket has something to read: any use of it may take the news from its descriptor."""
        if readable(socket):
            self._unread.add(_descriptor(socket))

    def at(self, key: Hashable, when: float, call: Call) -> None:
        """Call at `when` on the monotonic clock; replaces what `key` stood for. In a turn, as all that follow."""
        self._timers.set(key, when)
        self._due[key] = call

    def cancel(self, key: Hashable) -> None:
        """Forget a timer, if it is there."""
        self._timers.cancel(key)
        self._due.pop(key, None)

    def soon(self, call: Call) -> None:
        """Call once what was posted has been done, still before `after_turn`."""
        self._soon.append(call)

    def later(self, call: Call) -> None:
        """Call at the end of the present turn, after `after_turn`."""
        self._later.append(call)

    def lag(self) -> float:
        """How late the loop is or lately was, in seconds: its longest recent turn, or the one it is stuck in."""
        now = self.now()
        when, length = self._slowest
        recent = length if now - when < self._lag_window_s else 0.0
        return max(recent, now - self._beat - self._idle_s, 0.0)

    def guard(self, call: Call) -> None:
        """Run a call; its exception is counted and logged, and ends nothing else."""
        try:
            call()
        except Exception:
            self.faults += 1
            log.exception("a call in a turn of the connector failed")

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            asleep_s = 0.0 if self._posted else max(self._sleeps_until - self.now(), 0.0)
            ready = self._poll.poll(asleep_s)
            with self._turn:
                self._taken = True
                self._take_turn(ready)
                self._taken = False
        self._turn.acquire()  # there are no turns any more
        self.guard(self._at_end)

    def _take_turn(self, ready: list[tuple[int, int]]) -> None:
        begun = self.now()
        unread, self._unread = self._unread, set()
        for number in unread.union(number for number, _ in ready):
            self._read(number)
        self._run_posted(POSTED_PER_TURN)
        while (key := self._timers.pop_due(begun)) is not None:
            self.guard(self._due.pop(key))
        self._finish(begun)
        self.guard(self._at_rest)
        if self._unread:
            self._sleeps_until = 0.0
        else:
            self._sleeps_until = min(self._next_due(), begun + self._idle_s)

    def _read(self, number: int) -> None:
        # A call may close sockets whose turn is still to come.
        if (reader := self._readers.get(number)) is None:
            return
        source, call = reader
        self.guard(call)
        if not isinstance(source, int) and self._readers.get(number) is reader:
            self.recheck(source)

    def _run_posted(self, most: int) -> None:
        self._woken = False  # before the look: what is posted from now on wakes again
        while self._posted and most:
            most -= 1
            self.guard(self._posted.popleft())

    def _finish(self, begun: float) -> None:
        while self._soon:
            self.guard(self._soon.popleft())
        self.guard(self._after_turn)
        later, self._later = self._later, []
        for call in later:
            self.guard(call)
        now = self.now()
        length = now - begun
        when, slowest = self._slowest
        if length >= slowest or now - when >= self._lag_window_s:
            self._slowest = (now, length)
        self._beat = now

    def _next_due(self) -> float:
        when = self._timers.next()
        return float("inf") if when is None else when

    def _wake_up(self) -> None:
        # One wake-up does for all that is posted before the loop looks.
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake, 1)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)


def _descriptor(source: Readable) -> int:
    return source if isinstance(source, int) else source.fileno()
