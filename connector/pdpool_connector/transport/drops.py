"""Counts dropped frames by reason, and logs them at a bounded rate."""

import logging
import time
from collections import Counter
from collections.abc import Callable

from pdpool_connector.protocol.frames import text
from pdpool_connector.protocol.timeouts import Timeouts

log = logging.getLogger(__name__)

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
"""Reasons worth a warning: correct processes never cause them, but for `unpaired`, which a decode causes that prefill
has declared lost. The others come with repeated frames and with peers that leave."""


class Drops:
    """Counter by reason. Used by the owner thread alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, timeouts: Timeouts | None = None) -> None:
        self._clock = clock
        self._log_every_s = (timeouts or Timeouts()).drop_log_s
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, float] = {}

    def note(self, reason: str, detail: str) -> None:
        """Count one; `reason` must come from a small set, for it labels a metric."""
        self._counts[reason] += 1
        now = self._clock()
        if now - self._logged.get(reason, -self._log_every_s) >= self._log_every_s:
            self._logged[reason] = now
            level = logging.WARNING if reason in SUSPICIOUS else logging.INFO
            log.log(level, "dropped (%s, %d so far): %.200s", reason, self._counts[reason], text(detail))

    def counts(self) -> dict[str, int]:
        """Totals by reason."""
        return dict(self._counts)
