"""Prefill's checksums where decode reads: what is announced of a sampled attempt carries the sum of its pages.

The pages are hashed on a thread of their own before decode is told of them, so such an announcement goes out later by
as much. The machine holds them for exposed from the moment that it had them announced, and waits for decode's word.
"""

from collections.abc import Callable
from functools import partial

import msgspec

from pdpool_connector.layout.checksum import PageSum, sampled
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.exchange import Exchange
from pdpool_connector.protocol.frames import PAGE_ID_BYTES, AttemptId
from pdpool_connector.runtime.hashing import Hasher
from pdpool_connector.runtime.validation import unpacked


class Announcements:
    """Owner thread. `post` has a call made on it."""

    def __init__(self, rate: float, post: Callable[[Callable[[], None]], None]) -> None:
        self._rate, self._hasher = rate, Hasher(post)
        self._sums: dict[AttemptId, dict[int, int | None]] = {}
        """Of sampled attempts, by the announcement's sequence; None while it is being taken."""

    def send(self, frame: f.Computed, exchange: Exchange, page_sum: PageSum, say: Callable[[f.Computed], None]) -> None:
        """Have `say` called with the announcement: at once, or once its sum is known. Repeats wait for the first."""
        sums = self._sums.get(frame.attempt)
        chosen = not frame.sequence and not self._hasher.busy and sampled(frame.attempt.number, self._rate)
        if sums is None and chosen:
            sums = self._sums[frame.attempt] = {}
        if sums is None:
            say(frame)
        elif frame.sequence not in sums:
            offer = exchange.open
            at = (frame.start - offer.prefix_pages) * PAGE_ID_BYTES
            pages = unpacked(frame.pages)
            names = unpacked(offer.pages[at : at + len(frame.pages)])
            if self._hasher.submit(partial(page_sum, pages, names), partial(self._summed, frame, say)):
                sums[frame.sequence] = None
            else:
                say(frame)
        elif (known := sums[frame.sequence]) is not None:
            say(msgspec.structs.replace(frame, checksum=known))

    def ended(self, attempt: AttemptId) -> None:
        """The attempt has ended: nothing of it is kept."""
        self._sums.pop(attempt, None)

    def close(self) -> None:
        """See `Hasher`."""
        self._hasher.close()

    def _summed(self, frame: f.Computed, say: Callable[[f.Computed], None], found: int | None) -> None:
        sums = self._sums.get(frame.attempt)
        if sums is None:
            return
        if found is None:
            del sums[frame.sequence]  # a repeat has it tried again
            say(frame)
        else:
            sums[frame.sequence] = found
            say(msgspec.structs.replace(frame, checksum=found))
