"""The time of this process. It does not jump when the clock of its node is set.

Ages of samples, queues and verdicts are differences of this time. With a jump of a minute, each request that waits
would seem to have waited for that minute. Engines that work would be called stuck.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

SLEW = 0.1
"""Share by which the time runs faster or slower until it agrees with the node's clock. No limit is off by more."""
LARGEST_S = 3600.0
"""A larger difference is taken over at once: at this share, it would last for many hours."""


class SteadyClock:
    """Follows the node's clock without its jumps. It never goes back by less than `LARGEST_S`.

    Args:
        wall: The node's clock, in seconds since 1970.
        monotonic: Seconds that only run forward.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._shown_s, self._at = wall(), monotonic()

    def __call__(self) -> datetime:
        """Return the present time."""
        at, wall_s = self._monotonic(), self._wall()
        elapsed_s = at - self._at
        off_s = wall_s - (self._shown_s + elapsed_s)
        if abs(off_s) <= LARGEST_S:
            off_s = min(max(off_s, -SLEW * elapsed_s), SLEW * elapsed_s)
        self._shown_s, self._at = self._shown_s + elapsed_s + off_s, at
        return datetime.fromtimestamp(self._shown_s, UTC)
