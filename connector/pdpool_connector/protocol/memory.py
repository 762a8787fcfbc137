"""What prefill remembers of hand-offs that have ended: verdicts for late frames, and halves that never met."""

from collections import Counter, deque
from dataclasses import dataclass

from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.outcome import Cause


@dataclass(slots=True)
class Tombstone:
    """The end of an attempt, kept to answer late frames. `cause` None means done."""

    attempt: AttemptId
    room: int
    sibling: int
    cause: Cause | None
    message: str
    bytes_moved: int
    retry_s: float
    acknowledged: bool = False


class Graveyard:
    """Tombstones by attempt, bounded in all and for each peer; they leave by their deadline only.

    Forgetting must not resurrect: an attempt's number grows with each attempt of its decode, so for each peer the
    highest forgotten number is kept as a floor, and an attempt at or below it that is not known is never new. The floor
    also stands in for tombstones that find no room. Attempts that decode numbered earlier but that arrive only after
    a later one was forgotten are refused by it, which costs a retry and never safety.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[AttemptId, Tombstone] = {}
        self._of_peer: Counter[str] = Counter()
        self._floor: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, attempt: AttemptId) -> Tombstone | None:
        """The tombstone of `attempt`, if it is remembered."""
        return self._rows.get(attempt)

    def full(self, peer: str, *, reserved: int = 0, reserved_of_peer: int = 0) -> bool:
        """True when no further end could be remembered, in all or for this peer, once the reserved ones have come."""
        return len(self._rows) + reserved >= self._limit or self._of_peer[peer] + reserved_of_peer >= self._limit // 2

    def stale(self, attempt: AttemptId) -> bool:
        """True when an attempt that is not known can only be one that has been forgotten."""
        return attempt.number <= self._floor.get(attempt.decode, -1)

    def bury(self, tombstone: Tombstone) -> bool:
        """Remember an end. False when there is no room: then the floor keeps it from rising."""
        attempt = tombstone.attempt
        if self.full(attempt.decode):
            self._raise_floor(attempt)
            return False
        self._rows[attempt] = tombstone
        self._of_peer[attempt.decode] += 1
        return True

    def forget(self, attempt: AttemptId) -> None:
        """Its deadline has come."""
        del self._rows[attempt]
        self._of_peer[attempt.decode] -= 1
        if not self._of_peer[attempt.decode]:
            del self._of_peer[attempt.decode]
        self._raise_floor(attempt)

    def forget_peer(self, peer: str) -> bool:
        """Drop the floor of a peer that is long gone; False when tombstones of it are still here."""
        if self._of_peer[peer]:
            return False
        self._floor.pop(peer, None)
        return True

    def _raise_floor(self, attempt: AttemptId) -> None:
        self._floor[attempt.decode] = max(attempt.number, self._floor.get(attempt.decode, -1))


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
    and its other half waits for its own deadline.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[tuple[int, int], deque[Missed]] = {}
        self._expiry: deque[tuple[float, tuple[int, int]]] = deque()

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._rows.values())

    def remember(self, key: tuple[int, int], missed: Missed) -> None:
        """Keep an ended half until `missed.expires`, which must not decrease from call to call."""
        if len(self._expiry) < self._limit:
            self._rows.setdefault(key, deque()).append(missed)
            self._expiry.append((missed.expires, key))

    def meet(self, key: tuple[int, int], request_id: str, *, now: float) -> Missed | None:
        """Take the half that the newcomer `request_id` belongs to, if one has ended."""
        self.expire(now)
        rows = self._rows.get(key)
        if rows is None:
            return None
        found = next((row for row in rows if row.request_id == request_id), rows[0])
        rows.remove(found)
        if not rows:
            del self._rows[key]
        return found

    def expire(self, now: float) -> None:
        """Forget what is due."""
        while self._expiry and self._expiry[0][0] <= now:
            _, key = self._expiry.popleft()
            rows = self._rows.get(key)
            if rows and rows[0].expires <= now:
                rows.popleft()
                if not rows:
                    del self._rows[key]

    @property
    def next_expiry(self) -> float | None:
        """When the oldest is due; None when there is none."""
        return self._expiry[0][0] if self._expiry else None
