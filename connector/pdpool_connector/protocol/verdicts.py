"""How attempts ended at prefill: remembered, said until decode acknowledges it, said again to whoever asks."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.outcome import Cause
from pdpool_connector.protocol.timers import Timers
from pdpool_connector.protocol.timing import Timing


@dataclass(slots=True)
class Tombstone:
    """The end of an attempt, kept to answer late frames. `cause` None means done."""

    attempt: AttemptId
    room: int
    sibling: int
    cause: Cause | None
    message: str
    bytes_moved: int = 0
    checksum: int | None = None
    retry_s: float = 0.0
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


class Verdicts:
    """The graveyard with a voice. `send(peer, frame type, about, **fields)` puts a frame on its way.

    Two timers of the machine's belong to each tombstone: "verdict" calls `tell`, "grave" calls `forget`.
    """

    def __init__(self, timing: Timing, timers: Timers[tuple[str, Hashable]], send: Callable[..., None]) -> None:
        self.graves = Graveyard(timing.max_tombstones)
        self._timing, self._timers, self._send = timing, timers, send

    def reach(self, tombstone: Tombstone, now: float) -> None:
        """An attempt has ended: remember how, and say so until decode acknowledges it."""
        tombstone.retry_s = self._timing.retry_first_s
        if self.graves.bury(tombstone):
            self._timers.set(("grave", tombstone.attempt), now + self._timing.verdict_s)
            self.tell(tombstone.attempt, now)
        else:
            self._say(tombstone)

    def tell(self, attempt: AttemptId, now: float) -> None:
        """Say how it ended, and, while nobody has acknowledged it, again later."""
        tombstone = self.graves.get(attempt)
        if tombstone is None:
            return
        self._say(tombstone)
        if not tombstone.acknowledged:
            self._timers.set(("verdict", attempt), now + tombstone.retry_s)
            tombstone.retry_s = min(2 * tombstone.retry_s, self._timing.retry_max_s)

    def answer(self, frame: f.AttemptFrame, now: float) -> bool:
        """Answer a frame about an attempt that is not live; False when it was never seen here."""
        if self.graves.get(frame.attempt) is not None:
            self.tell(frame.attempt, now)
        elif self.graves.stale(frame.attempt):
            self._say(forgotten(frame))
        else:
            return False
        return True

    def acknowledge(self, attempt: AttemptId, now: float) -> bool:
        """Decode has taken note; False when there is nothing that it could have taken note of."""
        tombstone = self.graves.get(attempt)
        if tombstone is None:
            return False
        if not tombstone.acknowledged:
            tombstone.acknowledged = True
            self._timers.cancel(("verdict", attempt))
            self._timers.set(("grave", attempt), now + self._timing.acked_s)
        return True

    def forget(self, attempt: AttemptId) -> None:
        """Its time is over."""
        self._timers.cancel(("verdict", attempt))
        self.graves.forget(attempt)

    def _say(self, tombstone: Tombstone) -> None:
        peer = tombstone.attempt.decode
        if tombstone.cause is None:
            self._send(peer, f.Done, tombstone, bytes_moved=tombstone.bytes_moved, checksum=tombstone.checksum)
        else:
            self._send(peer, f.Drained, tombstone, cause=tombstone.cause, message=tombstone.message)


def forgotten(frame: f.AttemptFrame) -> Tombstone:
    """What is said of an attempt that this process knows nothing of: at least it does not write for it."""
    return Tombstone(frame.attempt, frame.room, frame.sibling, Cause.FORGOTTEN, "prefill knows nothing of it")
