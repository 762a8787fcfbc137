"""Halves of hand-offs that ended before their other half came."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from pdpool_connector.protocol.outcome import Cause
from pdpool_connector.protocol.timers import Timers


@dataclass(frozen=True, slots=True)
class Missed:
    """Half of a hand-off that ended before its other half came; the half that comes is told why."""

    request_id: str
    cause: Cause
    message: str
    expires: float


class MissedHalves:
    """Ended halves by room and sibling, oldest first, each to be met once.

    The router posts both halves of a request at the same time, so the halves of one room match in order; an equal
    request id on both sides is better evidence and goes first. Bounded: beyond `limit` an ended half is not remembered,
    and its other half waits for its own deadline. The machine's timer ("missed", this) calls `expire`.
    """

    def __init__(self, limit: int, keep_s: float, timers: Timers[tuple[str, Hashable]]) -> None:
        self._limit, self._keep_s, self._timers = limit, keep_s, timers
        self._rows: dict[tuple[int, int], deque[Missed]] = {}
        self._expiry: deque[tuple[float, tuple[int, int]]] = deque()

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._rows.values())

    def remember(self, key: tuple[int, int], request_id: str, cause: Cause, message: str, now: float) -> None:
        """Keep an ended half for a while."""
        if len(self._expiry) >= self._limit:
            return
        expires = now + self._keep_s
        self._rows.setdefault(key, deque()).append(Missed(request_id, cause, message, expires))
        self._expiry.append((expires, key))
        self._timers.set(("missed", self), self._expiry[0][0])

    def meet(self, key: tuple[int, int], request_id: str) -> Missed | None:
        """Take the half that the newcomer `request_id` belongs to, if one has ended."""
        rows = self._rows.get(key)
        if rows is None:
            return None
        found = next((row for row in rows if row.request_id == request_id), rows[0])
        rows.remove(found)
        if not rows:
            del self._rows[key]
        return found

    def expire(self, now: float) -> None:
        """Forget what is due, and come back for the rest."""
        while self._expiry and self._expiry[0][0] <= now:
            _, key = self._expiry.popleft()
            rows = self._rows.get(key)
            if rows and rows[0].expires <= now:
                rows.popleft()
                if not rows:
                    del self._rows[key]
        if self._expiry:
            self._timers.set(("missed", self), self._expiry[0][0])
