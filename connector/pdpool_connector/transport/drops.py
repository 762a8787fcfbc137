"""What was dropped, counted by reason, and logged at a bounded rate."""

import logging
import time
from collections import Counter
from collections.abc import Callable

from pdpool_connector.protocol.frames import text

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
"""One log line for each reason in this time, however many frames were dropped."""

SUSPICIOUS = frozenset(
    {
        "malformed",
        "oversized",
        "version",
        "stranger",
        "mismatch",
        "unauthenticated",
        "unpaired",
        "registration",
        "misfit",
        "unencodable",
    }
)
"""Worth a warning: what correct processes never give, and `unpaired`, which they give only where prefill has taken them
for lost. The others come with repetition and with peers that leave."""


class Drops:
    """Counter by reason. Used by the owner thread alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, float] = {}

    def note(self, reason: str, detail: str) -> None:
        """Count one; `reason` must come from a small set, for it labels a metric."""
        self._counts[reason] += 1
        now = self._clock()
        if now - self._logged.get(reason, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged[reason] = now
            level = logging.WARNING if reason in SUSPICIOUS else logging.INFO
            log.log(level, "dropped (%s, %d so far): %.200s", reason, self._counts[reason], text(detail))

    def counts(self) -> dict[str, int]:
        """Totals by reason."""
        return dict(self._counts)
