"""Bounds how often something is done: a burst at once, then so many a second."""


class TokenBucket:
    """Holds at most `burst` tokens, and gains `per_s` a second."""

    def __init__(self, burst: int, per_s: float, now: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._tokens, self._filled = float(burst), now

    def take(self, now: float, leave: int = 0) -> bool:
        """Take one token if that leaves `leave` of them. Return whether it was taken."""
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._per_s)
        self._filled = now
        if self._tokens < 1 + leave:
            return False
        self._tokens -= 1
        return True
