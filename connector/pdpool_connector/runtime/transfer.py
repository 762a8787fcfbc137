"""One hand-off as its engine holds it."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import SupportsIndex

from pdpool_connector.layout.memory import KVMemory
from pdpool_connector.protocol.events import AbortTransfer, Event, OfferPages, OpenAttempt, OpenRequest, SendPages
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.status import JUST_OPENED, Cause, Phase, TransferStatus
from pdpool_connector.runtime.page_guard import PageGuard
from pdpool_connector.runtime.ready_queue import Ready, ReadyQueue
from pdpool_connector.runtime.validation import (
    AbortCause,
    Ids,
    as_abort_cause,
    as_aux_row,
    as_text,
    as_timeout,
    as_whole,
    pack_pages,
    pack_state,
)

log = logging.getLogger(__name__)

Post = Callable[[Event], object]


class HandoffError(Exception):
    """A hand-off has failed. `status` says why, and whether its pages may be given back."""

    def __init__(self, message: str, status: TransferStatus) -> None:
        super().__init__(message)
        self.status = status


class Transfer:
    """One hand-off. All methods are for any thread; all but the waits return at once.

    Attributes:
        status: Immutable snapshot, read without a lock.
        room, request_id: As `open` was given them.
        prefill: Bootstrap address that decode opened it with; "" at prefill.
        attempts: Decode's attempts that belong to it, as far as this side knows them: one, or one for each rank of
            decode. Their text form finds the hand-off in the logs of both sides.
        opened_at, failed_at: When, in seconds on the monotonic clock.
    """

    def __init__(self, handle: int, room: int, request_id: str, prefill: str, post: Post) -> None:
        self._handle = handle
        self._post = post
        self.room = room
        self.request_id = request_id
        self.prefill = prefill
        self.status = JUST_OPENED
        self.attempts: tuple[AttemptId, ...] = ()
        self.opened_at = time.monotonic()
        self.failed_at: float | None = None
        self._in_poll = False
        """For the connector, under its lock: the next `poll` returns this transfer."""
        self._lock = threading.Lock()
        self._attached: list[Callable[[], None]] = []
        self._waiting: list[threading.Event] = []

    def abort(self, message: str = "", cause: AbortCause = Cause.ABORTED) -> None:
        """Give the hand-off up, at any time and as often as you like; one that has ended stays as it ended.

        The pages may be given back only when `status.releasable` is True.

        Args:
            message: Why; the other side's engine receives it too.
            cause: `Cause.ABORTED`, `Cause.REFUSED`, `Cause.TOO_LONG` or `Cause.INVALID`. The last two are the client's
                fault.

        Raises:
            ValueError: The cause is none of these.
        """
        self._post(AbortTransfer(self._handle, as_text("message", message), as_abort_cause(cause)))

    def wait(self, timeout_s: float) -> TransferStatus:
        """Block until the hand-off is DONE or FAILED. Not for `on_change`, which runs in the connector's own thread.

        Args:
            timeout_s: Longest time to wait, in seconds.

        Returns:
            The status. The pages may still be held: see `wait_released`.

        Raises:
            TimeoutError: It has not ended within `timeout_s`; nothing is given up by that.
        """
        return self._wait(lambda status: status.ended, timeout_s, "has not ended")

    def wait_released(self, timeout_s: float) -> TransferStatus:
        """Block until the hand-off has ended and its pages may be given back.

        Args:
            timeout_s: Longest time to wait, in seconds. A hold has no deadline of its own.

        Returns:
            The status.

        Raises:
            TimeoutError: It is not releasable within `timeout_s`.
        """
        return self._wait(lambda status: status.over, timeout_s, "is not releasable")

    def raise_for_status(self) -> None:
        """Raise HandoffError if the hand-off has failed; return otherwise, also while it is under way."""
        status = self.status
        if status.phase is Phase.FAILED:
            message = f"room {self.room}, request {self.request_id!r} failed: {status.cause}: {status.message}"
            raise HandoffError(message, status)

    def _wait(self, over: Callable[[TransferStatus], bool], timeout_s: float, what: str) -> TransferStatus:
        deadline = time.monotonic() + as_timeout(timeout_s)
        changed = threading.Event()
        with self._lock:
            self._waiting.append(changed)
        try:
            while not over(status := self.status):
                if not changed.wait(max(deadline - time.monotonic(), 0.0)):
                    raise TimeoutError(f"room {self.room}, request {self.request_id!r} {what} within {timeout_s:g} s")
                changed.clear()
            return status
        finally:
            with self._lock:
                self._waiting.remove(changed)

    def _attach(self, release: Callable[[], None]) -> None:
        """Call `release` once the hand-off is releasable; now if it is already. It must neither block nor raise."""
        with self._lock:
            if not self.status.over:
                self._attached.append(release)
                return
        self._call(release)

    def _settle(self, status: TransferStatus) -> None:
        """For the connector: take the new status, wake threads that wait, and release what is attached."""
        with self._lock:
            self._before(status)
            self.status = status
            attached: list[Callable[[], None]] = []
            if status.over:
                attached, self._attached = self._attached, attached
            for changed in self._waiting:
                changed.set()
        for release in attached:
            self._call(release)

    @property
    def _unknown_to_peers(self) -> bool:
        """Whether no peer can know its memory."""
        return not self.attempts

    def _before(self, status: TransferStatus) -> None:
        """Hook of one side, with the lock: the status is about to become this."""

    def _call(self, release: Callable[[], None]) -> None:
        try:
            release()
        except Exception:
            log.exception("what is attached to %r could not be released", self)

    def __repr__(self) -> str:
        """For logs."""
        return f"<{type(self).__name__} room={self.room} request_id={self.request_id!r} {self.status.phase}>"


class PrefillTransfer(Transfer):
    """Prefill's end of a hand-off: `send` pages as they are computed."""

    def __init__(self, request: OpenRequest, post: Post, memory: KVMemory, queue: ReadyQueue) -> None:
        super().__init__(request.handle, request.room, request.request_id, "", post)
        self._memory = memory
        self._queue = queue
        self._complete = False

    def send(
        self,
        pages: Ids,
        *,
        start: SupportsIndex,
        last: bool = False,
        aux_slot: SupportsIndex | None = None,
        state: Mapping[str, Ids] | None = None,
        ready: Ready | None = None,
    ) -> None:
        """Send the next logical pages of the request. Sends may begin before decode is known; they wait for it.

        The content of the pages must not change until the status is releasable.

        Args:
            pages: Ids of the pages that hold logical pages `start` onward: one dimension, any integer type. Pages that
                decode holds already (`status.prefix_pages`) may be sent or left out.
            start: Number of the first logical page. Sends follow each other without gaps.
            last: Nothing follows. The last send ends where decode's pages end; it may have no pages.
            aux_slot: Row that decode's aux row is written from, with the last send. None: decode's row stays as it is.
            state: Ids of state items by name of the state pool, with the last send, as many as decode has offered.
            ready: Says whether the pages may be read; called without arguments, soon and often, in any thread. None:
                they may be read now. The send waits in the connector until it returns True. If the hand-off ends
                earlier, nothing is read. An exception from it fails the hand-off with `Cause.INTERNAL`.

        Raises:
            ValueError: An id lies outside prefill's memory, an aux slot or state comes without `last`, or this send
                comes after the last one.
            TypeError: An argument has another type.
            RuntimeError: Too many sends wait for their pages.
        """
        if self._complete:
            raise ValueError(f"send() after the send with last=True of room {self.room}: open() another hand-off")
        if aux_slot is not None and not last:
            raise ValueError(f"aux_slot={aux_slot} is given without last=True: the aux row goes with the last pages")
        if state is not None and not last:
            raise ValueError("state is given without last=True: it goes with the last pages")
        if ready is not None and not callable(ready):
            raise TypeError(f"ready={ready!r} cannot be called: give a function without arguments")
        send = SendPages(
            self._handle,
            pack_pages(pages, self._memory, "prefill"),
            as_whole("start", start),
            bool(last),
            as_aux_row(aux_slot, self._memory, "prefill", required=False),
            pack_state(state, self._memory, "prefill") if last else (),
        )
        self._queue.add(send, ready)
        self._complete = send.last
        if self.status.ended:
            self._queue.drop(self._handle)

    def _settle(self, status: TransferStatus) -> None:
        super()._settle(status)
        if status.ended:
            self._queue.drop(self._handle)


class DecodeTransfer(Transfer):
    """Decode's end of a hand-off: `offer` memory when there is some; the status says when the pages have landed."""

    def __init__(self, attempt: OpenAttempt, incarnation: str, post: Post, memory: KVMemory, guard: PageGuard) -> None:
        super().__init__(attempt.handle, attempt.room, attempt.request_id, attempt.prefill, post)
        self.attempts = (AttemptId(incarnation, attempt.handle),)
        self._memory = memory
        self._guard = guard
        self._offered = False

    def offer(
        self,
        pages: Ids,
        *,
        aux_slot: SupportsIndex | None = None,
        prefix_pages: SupportsIndex = 0,
        state: Mapping[str, Ids] | None = None,
    ) -> None:
        """Offer the memory that prefill writes to; once for each hand-off. Nothing happens if it has ended meanwhile.

        From now on the pages may be given back only when `status.releasable` is True.

        Args:
            pages: Ids of the pages that take logical pages `prefix_pages` onward: one dimension, any integer type, at
                most 2**19.
            aux_slot: Row that takes the aux row. None only where decode's memory has no aux rows.
            prefix_pages: Logical pages that decode holds already, from the first on; prefill need not send them.
            state: Ids of state items by name of the state pool, as many as prefill will send.

        Raises:
            ValueError: An id lies outside decode's memory, or belongs to the offer of another hand-off that is not
                releasable. Nothing is offered then; `offer` may be called again.
            TypeError: An argument has another type.
            RuntimeError: Memory was offered before.
        """
        offer = OfferPages(
            self._handle,
            pack_pages(pages, self._memory, "decode", target=True),
            as_whole("prefix_pages", prefix_pages),
            as_aux_row(aux_slot, self._memory, "decode", required=True),
            pack_state(state, self._memory, "decode", target=True),
        )
        with self._lock:
            if self._offered:
                raise RuntimeError(f"offer() of room {self.room} was called before: open() another hand-off")
            if self.status.ended:
                return
            self._guard.take(offer, self.room, self.request_id)
            self._offered = True
        self._post(offer)

    @property
    def _unknown_to_peers(self) -> bool:
        return not self._offered

    def _before(self, status: TransferStatus) -> None:
        """The memory may be offered again before any engine can read that in the status."""
        if status.over:
            self._guard.give_back(self._handle)
