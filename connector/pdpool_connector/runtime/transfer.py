"""What an engine holds of one hand-off."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pdpool_connector.layout.memory import KVMemory
from pdpool_connector.protocol.events import AbortTransfer, Event, OpenAttempt, SendPages
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.status import Phase, TransferStatus
from pdpool_connector.runtime.validation import as_aux_row, as_whole, pack_pages, pack_state

log = logging.getLogger(__name__)

Post = Callable[[Event], object]


class Transfer:
    """One hand-off. `status` is an immutable snapshot, read without a lock; every method returns at once.

    `attempts`: the attempts of decode's that it consists of, as far as they are known here: one, or one for each part;
    their text form finds it in the logs of both sides, once both have come. `prefill`: where decode opened it, "" at
    prefill. `opened_at`, `failed_at`: when, on the monotonic clock.
    """

    def __init__(self, handle: int, room: int, request_id: str, post: Post) -> None:
        self._handle = handle
        self._post = post
        self.room = room
        self.request_id = request_id
        self.prefill = ""
        self.status = TransferStatus(phase=Phase.WAITING)
        self.attempts: tuple[AttemptId, ...] = ()
        self.opened_at = time.monotonic()
        self.failed_at: float | None = None
        self._attached: list[Callable[[], None]] = []
        self._waiting: list[Callable[[], None]] = []
        self._attach_lock = threading.Lock()

    def abort(self, message: str = "") -> None:
        """Give it up, at any time and as often as you like; an ended hand-off stays as it ended.

        The pages may be given back only when `status.releasable` says so.
        """
        self._post(AbortTransfer(self._handle, str(message)))

    def attach(self, release: Callable[[], None]) -> None:
        """Have `release` called once, when the hand-off has become releasable, however it ended; now if it has already.

        For what goes with a request beside its pages and may still be touched until then: a prefetch of a hierarchical
        cache, staging memory. It is called in the connector's own thread or in one that calls it, and must
        neither block nor raise: what it raises is logged, and keeps no other from being called. Where pages are held
        until the process ends, so is this.
        """
        with self._attach_lock:
            if not self._over:
                self._attached.append(release)
                return
        self._call(release)

    async def wait_ended(self) -> TransferStatus:
        """Wait, in a program on asyncio, until it is DONE or FAILED; return how. Cancelling the wait gives nothing up.

        It is bounded by the hand-off's own deadline. The pages may still be held: see `wait_released`.
        """
        return await self._until(self._wait)

    async def wait_released(self) -> TransferStatus:
        """Wait until the pages may be given back; return how it ended. A hold has no deadline: bound the wait."""
        return await self._until(self.attach)

    async def _until(self, watch: Callable[[Callable[[], None]], None]) -> TransferStatus:
        loop = asyncio.get_running_loop()
        come = asyncio.Event()

        def tell() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(come.set)

        watch(tell)
        try:
            await come.wait()
        finally:
            with self._attach_lock:
                for calls in (self._waiting, self._attached):
                    if tell in calls:
                        calls.remove(tell)
        return self.status

    def _wait(self, tell: Callable[[], None]) -> None:
        with self._attach_lock:
            if not self.status.ended:
                self._waiting.append(tell)
                return
        self._call(tell)

    def settle(self, status: TransferStatus) -> None:
        """For the connector: take the new status, tell who waits for it, and release what is attached."""
        self.status = status
        if not status.ended:
            return
        calls: list[Callable[[], None]] = []
        with self._attach_lock:
            calls, self._waiting = self._waiting, []
            if self._over:
                calls, self._attached = calls + self._attached, []
        for call in calls:
            self._call(call)

    @property
    def _over(self) -> bool:
        return self.status.ended and self.status.releasable

    def _call(self, release: Callable[[], None]) -> None:
        try:
            release()
        except Exception:
            log.exception("what is attached to %r could not be released", self)

    def __repr__(self) -> str:
        """For logs."""
        return f"<{type(self).__name__} room={self.room} request_id={self.request_id!r} {self.status.phase}>"


class PrefillTransfer(Transfer):
    """Prefill's end of a hand-off: pages go out by `send`."""

    def __init__(self, handle: int, room: int, request_id: str, post: Post, memory: KVMemory) -> None:
        super().__init__(handle, room, request_id, post)
        self._memory = memory
        self._complete = False

    def send(
        self,
        pages: NDArray[np.int32],
        *,
        start: SupportsIndex,
        last: bool = False,
        aux_slot: SupportsIndex | None = None,
        state: NDArray[np.int32] | None = None,
    ) -> None:
        """Send logical pages `start` .. `start + len(pages)` of the request, which lie in `pages` (int32 page ids).

        Sends follow each other without gaps. They may begin before decode is known; they then wait. Pages that decode
        holds already (`status.prefix_pages`) may be sent or left out. The last send carries the aux row and ends where
        decode's pages end; it may be empty. Without `aux_slot` decode's row stays as it was, though decode is DONE: an
        engine that reads it must always send one. `state`, int32 ids of items of the state pool, goes with the last
        send too, as many items as decode has offered. The content must not change until the status is releasable.

        Raises ValueError for ids outside the memory, for an aux slot or state without `last`, and for a send after the
        last; TypeError for what is no integer.
        """
        if self._complete:
            raise ValueError(f"send() after the send with last=True of room {self.room}: open() another hand-off")
        if aux_slot is not None and not last:
            raise ValueError(f"aux_slot={aux_slot} is given without last=True: the aux row goes with the last pages")
        if state is not None and not last:
            raise ValueError("state is given without last=True: it goes with the last pages")
        packed, items = pack_pages(pages, self._memory), pack_state(state, self._memory)
        row = None if aux_slot is None else as_aux_row(aux_slot, self._memory)
        params = SendPages(self._handle, packed, as_whole("start", start), bool(last), row, items)
        self._complete = params.last
        self._post(params)


class DecodeTransfer(Transfer):
    """Decode's end of a hand-off: pages arrive, and the status says when."""

    def __init__(self, params: OpenAttempt, post: Post, give_back: Callable[[OpenAttempt], None]) -> None:
        super().__init__(params.handle, params.room, params.request_id, post)
        self._wish, self._give_back = params, give_back
        self.prefill = params.prefill

    def settle(self, status: TransferStatus) -> None:
        """As `Transfer.settle`; what was offered may be offered again before anybody reads so in the status."""
        if status.ended and status.releasable:
            self._give_back(self._wish)
        super().settle(status)
