"""Checksums of sampled attempts, taken on a thread of their own."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

log = logging.getLogger(__name__)

MAX_PENDING: Final = 8
"""Sums under way or queued; beyond them an attempt goes unchecked rather than late."""

Then = Callable[[int | None], None]


class Hasher:
    """Owner thread, but for the hashing itself. `post` has a call made on the owner thread."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pdpool-check")
        self._pending = 0

    @property
    def busy(self) -> bool:
        """Whether nothing further should be given to it now."""
        return self._pending >= MAX_PENDING

    def submit(self, take: Callable[[], int], then: Then) -> bool:
        """Call `then` with the sum that `take` returns, or with None where it raised or was not called.

        Returns False when no thread is left: then neither is called.
        """
        try:
            future = self._pool.submit(take)
        except RuntimeError:
            return False
        self._pending += 1
        future.add_done_callback(lambda ended: self._post(partial(self._on_ended, ended, then)))
        return True

    def close(self) -> None:
        """Wait for the sum that is being taken, a few tenths of a second at most, and drop the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _on_ended(self, ended: "Future[int]", then: Then) -> None:
        self._pending -= 1
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            log.error("a checksum could not be taken: its attempt goes unchecked", exc_info=error)
        then(None if ended.cancelled() or error is not None else ended.result())
