"""Prefill's checksums where decode reads: what is announced of a sampled attempt carries the sum of its pages.

The pages are hashed on a thread of their own before decode is told of them, so such an announcement goes out later by
as much. The machine holds them for exposed from the moment that it had them announced, and waits for decode's word.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

import msgspec
import numpy as np

from pdpool_connector.layout.checksum import PageSum, sampled
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.exchange import Exchange
from pdpool_connector.protocol.frames import PAGE_ID_BYTES, AttemptId

log = logging.getLogger(__name__)

MAX_PENDING: Final = 8
"""Sums under way or queued; beyond them an attempt goes unchecked rather than late."""


class Announcements:
    """Owner thread, but for the hashing itself. `post` has a call made on the owner thread."""

    def __init__(self, rate: float, post: Callable[[Callable[[], None]], None]) -> None:
        self._rate, self._post = rate, post
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pdpool-check")
        self._sums: dict[AttemptId, dict[int, int | None]] = {}
        """Of sampled attempts, by the announcement's sequence; None while it is being taken."""
        self._pending = 0

    def send(self, frame: f.Computed, exchange: Exchange, page_sum: PageSum, say: Callable[[f.Computed], None]) -> None:
        """Have `say` called with the announcement: at once, or once its sum is known. Repeats wait for the first."""
        sums = self._sums.get(frame.attempt)
        chosen = not frame.sequence and self._pending < MAX_PENDING and sampled(frame.attempt.number, self._rate)
        if sums is None and chosen:
            sums = self._sums[frame.attempt] = {}
        if sums is None:
            say(frame)
        elif frame.sequence not in sums:
            offer = exchange.open
            at = (frame.start - offer.prefix_pages) * PAGE_ID_BYTES
            pages = np.frombuffer(frame.pages, "<i4").tolist()
            names = np.frombuffer(offer.pages[at : at + len(frame.pages)], "<i4").tolist()
            try:
                future = self._pool.submit(page_sum, pages, names)
            except RuntimeError:  # the system has no thread left
                say(frame)
                return
            sums[frame.sequence] = None
            self._pending += 1
            future.add_done_callback(lambda ended: self._post(partial(self._summed, frame, say, ended)))
        elif (known := sums[frame.sequence]) is not None:
            say(msgspec.structs.replace(frame, checksum=known))

    def ended(self, attempt: AttemptId) -> None:
        """The attempt has ended: nothing of it is kept."""
        self._sums.pop(attempt, None)

    def close(self) -> None:
        """Wait for the sum that is being taken, a few tenths of a second at most, and drop the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _summed(self, frame: f.Computed, say: Callable[[f.Computed], None], found: "Future[int]") -> None:
        self._pending -= 1
        sums = self._sums.get(frame.attempt)
        if sums is None or found.cancelled():
            return
        sums[frame.sequence] = found.result()
        say(msgspec.structs.replace(frame, checksum=found.result()))
