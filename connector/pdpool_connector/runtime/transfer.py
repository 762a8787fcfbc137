"""What an engine holds of one hand-off."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pdpool_connector.layout.memory import KVMemory
from pdpool_connector.protocol.events import AbortTransfer, Event, SendPages
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.outcome import Cause, Phase, TransferStatus

log = logging.getLogger(__name__)

Post = Callable[[Event], object]
RefusalCause = Literal[Cause.REFUSED, Cause.TOO_LONG]
"""What an engine may say of a request that it does not take."""
MAX_REQUEST_ID = 256
FEW = 32
"""Up to so many numbers a list is searched faster than an array."""


class Transfer:
    """One hand-off. `status` is an immutable snapshot, read without a lock; every method returns at once.

    `attempts`: the attempts of decode's that it consists of, as far as they are known here: one, or one for each part;
    their text form finds it in the logs of both sides. `opened_at`, `failed_at`: when, on the monotonic clock.
    """

    def __init__(self, handle: int, room: int, request_id: str, post: Post) -> None:
        self._handle = handle
        self._post = post
        self.room = room
        self.request_id = request_id
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
        self._post(AbortTransfer(self._handle, message))

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

    async def ended(self) -> TransferStatus:
        """Wait, in a program on asyncio, until it is DONE or FAILED; return how. Cancelling the wait gives nothing up.

        It is bounded by the hand-off's own deadline. The pages may still be held: see `released`.
        """
        return await self._until(self._wait)

    async def released(self) -> TransferStatus:
        """Wait until the pages may be given back; return how it ended. A hold has no deadline: bound the wait."""
        return await self._until(self.attach)

    async def _until(self, watch: Callable[[Callable[[], None]], None]) -> TransferStatus:
        loop = asyncio.get_running_loop()
        come = asyncio.Event()

        def tell() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(come.set)

        watch(tell)
        await come.wait()
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

    def send(
        self,
        pages: NDArray[np.int32],
        *,
        start: int,
        last: bool = False,
        aux_slot: int | None = None,
        state: NDArray[np.int32] | None = None,
    ) -> None:
        """Send logical pages `start` .. `start + len(pages)` of the request, which lie in `pages` (int32 page ids).

        Sends follow each other without gaps. They may begin before decode is known; they then wait. Pages that decode
        holds already (`status.prefix_pages`) may be sent or left out. The last send carries the aux row and ends where
        decode's pages end; it may be empty. `state`, int32 ids of items of the state pool, goes with it too, as many
        items as decode has offered. The content must not change until the status is releasable.

        Raises ValueError for ids outside the memory, and for an aux slot or state without `last`.
        """
        if start < 0:
            raise ValueError(f"start={start} is negative")
        if aux_slot is not None and not last:
            raise ValueError(f"aux_slot={aux_slot} is given without last=True: the aux row goes with the last pages")
        if aux_slot is not None:
            check_slot(aux_slot, self._memory)
        if state is not None and not last:
            raise ValueError("state is given without last=True: it goes with the last pages")
        packed, items = pack_pages(pages, self._memory), pack_state(state, self._memory)
        self._post(SendPages(self._handle, packed, start, last, aux_slot, items))


class DecodeTransfer(Transfer):
    """Decode's end of a hand-off: pages arrive, and the status says when."""


def pack_pages(pages: NDArray[np.int32], memory: KVMemory) -> bytes:
    """Page ids as the protocol carries them. Raises ValueError for what is no list of int32 ids within the memory."""
    return _pack("pages", pages, "pages", memory.pages)


def pack_state(state: NDArray[np.int32] | None, memory: KVMemory) -> bytes:
    """As `pack_pages`, for ids of state items; None is as good as an empty list."""
    return b"" if state is None else _pack("state", state, "state items", memory.state_items)


def _pack(field: str, ids: NDArray[np.int32], unit: str, limit: int) -> bytes:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.dtype != np.int32 and array.size):
        raise ValueError(f"{field} is a {array.ndim}-dimensional array of {array.dtype}: give one dimension of int32")
    if 0 < array.size <= FEW:
        known = array.tolist()
        lowest, highest = min(known), max(known)
    else:
        lowest, highest = (int(array.min()), int(array.max())) if array.size else (0, -1)
    if lowest < 0 or highest >= limit:
        has = f"{unit} 0..{limit - 1}" if limit else f"no {unit}"
        raise ValueError(f"{field} holds {lowest if lowest < 0 else highest}, the memory has {has}")
    return array.astype("<i4", copy=False).tobytes()


def check_slot(slot: int, memory: KVMemory) -> None:
    """Raise ValueError for an aux slot outside the memory."""
    if not 0 <= slot < memory.aux_rows:
        raise ValueError(f"aux_slot={slot}, the memory has aux rows 0..{memory.aux_rows - 1}")


def check_request(room: int, request_id: str, sibling: int, deadline_s: float) -> None:
    """Raise ValueError, naming the field, for what no frame can carry."""
    if not 0 <= room < 2**63:
        raise ValueError(f"room={room} is out of range: give 0 to 2**63 - 1")
    if len(request_id) > MAX_REQUEST_ID:
        raise ValueError(f"request_id has {len(request_id)} characters, at most {MAX_REQUEST_ID} are carried")
    if not 0 <= sibling < 2**31:
        raise ValueError(f"sibling={sibling} is out of range: give 0 to 2**31 - 1")
    if not 0 < deadline_s <= 86400:
        raise ValueError(f"deadline_s={deadline_s} is out of range: give more than 0 and at most 86400 seconds")


def check_reason(message: str) -> None:
    """Raise ValueError for a refusal that gives none."""
    if not message:
        raise ValueError("message is empty: say why the request is refused")
