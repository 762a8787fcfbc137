"""Sends whose pages are not ready: they wait outside the state machine, so that an abort leaves nothing in flight.

A send waits here until its `ready` returns True; sends of one hand-off keep their order. One thread looks at all of
them, and sleeps while there are none.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from pdpool_connector.protocol.events import AbortTransfer, Event, SendPages
from pdpool_connector.protocol.status import Cause

log = logging.getLogger(__name__)

MAX_WAITING: Final = 65_536
"""Sends that wait at a time. An engine that sends layer by layer has some 100 for each of its running requests."""

Ready = Callable[[], bool]


class _Waiting(NamedTuple):
    send: SendPages
    ready: Ready | None


class ReadyQueue:
    """For any thread.

    Args:
        post: Passes an event to the state machine.
        interval_s: Pause between two looks at what waits, in seconds.
    """

    def __init__(self, post: Callable[[Event], object], interval_s: float) -> None:
        self._post, self._interval_s = post, interval_s
        self._changed = threading.Condition()
        self._waiting: dict[int, deque[_Waiting]] = {}
        """By handle. An entry without sends: its last one is being posted."""
        self._count = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, send: SendPages, ready: Ready | None) -> None:
        """Post a send, at once if its pages are ready and no earlier send of its hand-off waits.

        Raises:
            RuntimeError: Too many sends wait already.
        """
        with self._changed:
            behind = send.handle in self._waiting
        if not behind:
            is_ready = ready is None or self._look(send.handle, ready)
            if is_ready:
                self._post(send)
            if is_ready is not False:
                return
        with self._changed:
            if self._count >= MAX_WAITING:
                raise RuntimeError(f"{MAX_WAITING} sends wait for their pages already, which is the limit: abort some")
            if not self._closed:
                self._waiting.setdefault(send.handle, deque()).append(_Waiting(send, ready))
                self._count += 1
                self._wake()

    def drop(self, handle: int) -> None:
        """The hand-off has ended: forget its sends. Nothing of them was read."""
        with self._changed:
            self._count -= len(self._waiting.pop(handle, ()))

    def close(self, timeout_s: float) -> bool:
        """Forget everything, and end the thread. Returns False when `ready` of an engine still blocks it."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._count = 0
            self._changed.notify()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pdpool-ready", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                handles = list(self._waiting)
            for handle in handles:
                self._post_ready(handle)
            with self._changed:
                if not self._closed:
                    self._changed.wait(self._interval_s)

    def _post_ready(self, handle: int) -> None:
        """Post the sends of one hand-off, in order, up to the first that is not ready."""
        while (waiting := self._first(handle)) is not None:
            if waiting.ready is not None and not self._look(handle, waiting.ready):
                return
            with self._changed:
                sends = self._waiting.get(handle)
                if not sends or sends[0] is not waiting:
                    return  # it was dropped meanwhile
                sends.popleft()
                self._count -= 1
            self._post(waiting.send)  # before the entry goes: a later send of this hand-off must come behind

    def _first(self, handle: int) -> _Waiting | None:
        with self._changed:
            sends = self._waiting.get(handle)
            if sends is not None and not sends:
                del self._waiting[handle]
            return sends[0] if sends else None

    def _look(self, handle: int, ready: Ready) -> bool | None:
        """Whether the pages are ready. None: `ready` has raised, and the hand-off is given up."""
        try:
            return bool(ready())
        except Exception as error:
            log.exception("ready of a send failed")
            self.drop(handle)
            message = f"ready() of a send raised {type(error).__name__}: {error}"
            self._post(AbortTransfer(handle, message, Cause.INTERNAL))
            return None
