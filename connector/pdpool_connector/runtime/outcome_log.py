"""Counts and logs how hand-offs end: in counters, in a histogram, and in one line of the log each.

The lines of both sides have the same `attempt=`, and `room=` and `request_id=`. A search for one of them in the logs of
all processes gives the life of a hand-off. Its end is one line at INFO, or at WARNING when it failed other than by an
abort. The rate of these lines is bounded. Every other step is one line at DEBUG.
"""

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.status import ABORTS, TransferStatus
from pdpool_connector.protocol.token_bucket import TokenBucket
from pdpool_connector.runtime.spans import Spans
from pdpool_connector.runtime.stats import Distribution
from pdpool_connector.runtime.transfer import Transfer

log = logging.getLogger(__name__)

RELEASE_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds. A live peer drains a chunk of 16 MiB in well below 0.1 s; the upper ones are holds."""
LINES_BURST: Final = 50
LINES_PER_SECOND: Final = 10.0
"""Lines about ends, for each level: what is beyond is counted in the next line that is written."""


class OutcomeLog:
    """See the module's docstring. Owner thread. `spans`: are ended with the hand-offs, if there are any."""

    def __init__(
        self, role: str, rank: int, spans: Spans | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._who, self._clock = f"{role} rank={rank}", clock
        self._spans = spans
        self._buckets = {
            level: TokenBucket(LINES_BURST, LINES_PER_SECOND, clock()) for level in (logging.INFO, logging.WARNING)
        }
        self._skipped: Counter[int] = Counter()
        """Lines of each level that were not written since the last one that was."""
        self._held: set[AttemptId] = set()
        self._release_counts = [0] * (len(RELEASE_BUCKETS) + 1)
        self._release_sum = 0.0
        self.outcomes: Counter[str] = Counter({"done": 0, "failed": 0, "aborted": 0})
        self.causes: Counter[str] = Counter()

    @property
    def releases(self) -> Distribution:
        """Seconds from a hand-off's failure to the release of its pages, of those that were released."""
        return Distribution(RELEASE_BUCKETS, tuple(self._release_counts), self._release_sum)

    def changed(self, transfer: Transfer, status: TransferStatus) -> None:
        """A hand-off is about to get a new status."""
        before = transfer.status
        if status.ended and not before.ended:
            self._ended(transfer, status)
        if status.cause is not None and status.releasable and not before.releasable:
            self._released(transfer)
        elif not status.ended and log.isEnabledFor(logging.DEBUG):
            log.debug("%s %s %s", self._who, Label(transfer), status.phase)

    def held(self, attempts: Sequence[AttemptId]) -> None:
        """The attempts whose pages are held now; each is logged once, when that begins."""
        now = set(attempts)
        for attempt in now - self._held:
            self._say(logging.WARNING, "%s attempt=%s held: its pages stay back until its peer is proved dead", attempt)
        self._held = now

    def _ended(self, transfer: Transfer, status: TransferStatus) -> None:
        if self._spans is not None:
            self._spans.end(transfer, status)
        seconds = self._clock() - transfer.opened_at
        if status.cause is None:
            self.outcomes["done"] += 1
            self._say(logging.INFO, "%s %s done: bytes=%d seconds=%.3f", Label(transfer), status.bytes_moved, seconds)
            return
        aborted = status.cause in ABORTS
        self.outcomes["aborted" if aborted else "failed"] += 1
        self.causes[status.cause.value] += 1
        transfer.failed_at = self._clock()
        self._say(
            logging.INFO if aborted else logging.WARNING,
            "%s %s %s: cause=%s pages=%s seconds=%.3f: %.300s",
            Label(transfer),
            "aborted" if aborted else "failed",
            status.cause,
            "released" if status.releasable else "held",
            seconds,
            status.message,
        )

    def _released(self, transfer: Transfer) -> None:
        assert transfer.failed_at is not None
        seconds = self._clock() - transfer.failed_at
        self._release_counts[bisect_left(RELEASE_BUCKETS, seconds)] += 1
        self._release_sum += seconds
        if not transfer.status.ended:
            return  # the line about its end says so
        self._say(logging.INFO, "%s %s released: %.3f s after it failed", Label(transfer), seconds)

    def _say(self, level: int, text: str, *values: object) -> None:
        if not log.isEnabledFor(level):
            return
        taken = self._buckets[level].take(self._clock())
        self._skipped[level] += not taken
        if taken or log.isEnabledFor(logging.DEBUG):
            skipped = self._skipped.pop(level)
            log.log(level, text + (f" ({skipped} like this not logged before)" if skipped else ""), self._who, *values)


class Label:
    """The names by which a hand-off is found in all logs; made only when a line is written."""

    __slots__ = ("_transfer",)

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def __str__(self) -> str:
        attempts = ",".join(map(str, self._transfer.attempts)) or "none"
        where = f" prefill={self._transfer.prefill}" if self._transfer.prefill else ""
        return f"attempt={attempts} room={self._transfer.room} request_id={self._transfer.request_id!r}{where}"
