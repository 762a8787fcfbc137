"""How attempts ended at prefill: remembered, and sent to decode until decode acknowledges it."""

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final

import msgspec

from pdpool_connector.protocol.bounded_table import BoundedTable
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.timers import Timers

EXPIRY: Final = "tombstone"
REPEAT: Final = "result"
"""Kinds of the two timers of a tombstone: it expires, and its result is sent again. The key is the attempt."""


class Tombstone(msgspec.Struct, gc=False):
    """The end of an attempt. `cause`: None when everything has landed.

    A busy prefill has 100 000 of these, so the garbage collector does not look at them.
    """

    attempt: AttemptId
    room: int
    cause: Cause | None
    message: str
    bytes_moved: int = 0
    checksum: int | None = None
    retry_s: float = 0.0
    acknowledged: bool = False

    def result(self) -> dict[str, object]:
        """Fields of the `Ended` frame that carries it."""
        return {
            "cause": self.cause or "",
            "settled": True,
            "message": self.message,
            "bytes_moved": self.bytes_moved,
            "checksum": self.checksum,
        }


class TombstoneTable:
    """Tombstones by attempt, bounded in all and for each decode.

    A forgotten attempt must not begin again when a late frame of it arrives. Attempt numbers of one decode only grow,
    so the table keeps the highest forgotten number of each decode as a floor. An unknown attempt at or below the floor
    is never new. The floor also replaces tombstones for which there is no room. An attempt whose first frame arrives
    only after a later attempt was forgotten is refused by the floor; that costs a retry and is safe. An attempt that is
    under way is in a table of its own and never compared with the floor.
    """

    def __init__(self, timeouts: Timeouts, timers: Timers[tuple[str, Hashable]]) -> None:
        self._timeouts, self._timers = timeouts, timers
        self._rows: BoundedTable[AttemptId, Tombstone] = BoundedTable(timeouts.max_tombstones, timers, EXPIRY)
        self._floor: dict[str, int] = {}
        self._unacknowledged: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, attempt: AttemptId) -> Tombstone | None:
        """The end of `attempt`, while it is remembered."""
        return self._rows.get(attempt)

    def unacknowledged(self, peers: Iterable[str]) -> int:
        """How many remembered ends these decodes have not acknowledged."""
        return sum(self._unacknowledged[peer] for peer in peers)

    def full(self, decode: str, *, reserved: int, reserved_of_peer: int) -> bool:
        """Whether no further end fits, once the reserved ones have come."""
        return self._rows.full(decode, reserved=reserved, reserved_of_peer=reserved_of_peer)

    def forgotten(self, attempt: AttemptId) -> bool:
        """Whether an attempt that is in no table can only be one that has ended and is forgotten."""
        return attempt.number <= self._floor.get(attempt.decode, -1)

    def add(self, tombstone: Tombstone, now: float, *, reserved: int, reserved_of_peer: int) -> None:
        """Remember an end, or, where there is no room beside the reserved ones, raise the floor."""
        attempt = tombstone.attempt
        if self.full(attempt.decode, reserved=reserved, reserved_of_peer=reserved_of_peer):
            self._raise_floor(attempt)
            return
        self._rows.put(attempt, tombstone, attempt.decode, now + self._timeouts.result_s)
        self._unacknowledged[attempt.decode] += 1
        tombstone.retry_s = self._timeouts.retry_first_s
        self.repeat_later(tombstone, now)

    def repeat_later(self, tombstone: Tombstone, now: float) -> None:
        """The result was sent: send it again after a while, unless it is acknowledged by then."""
        if not tombstone.acknowledged:
            self._timers.set((REPEAT, tombstone.attempt), now + tombstone.retry_s)
            tombstone.retry_s = min(2 * tombstone.retry_s, self._timeouts.retry_max_s)

    def acknowledge(self, attempt: AttemptId, now: float) -> bool:
        """Decode has the result. False when no end of this attempt is remembered."""
        tombstone = self._rows.get(attempt)
        if tombstone is None:
            return False
        if not tombstone.acknowledged:
            self._stop_repeating(tombstone)
            self._rows.keep_until(attempt, now + self._timeouts.acked_s)
        return True

    def expire(self, attempt: AttemptId) -> None:
        """Forget an end whose time is over."""
        tombstone = self._rows.pop(attempt)
        if tombstone is not None:
            self._stop_repeating(tombstone)
            self._raise_floor(attempt)

    def forget_peer(self, peer: str) -> bool:
        """Drop the floor of a decode that is long gone. False while ends of it are still remembered."""
        if self._rows.count(peer):
            return False
        self._floor.pop(peer, None)
        return True

    def _stop_repeating(self, tombstone: Tombstone) -> None:
        if tombstone.acknowledged:
            return
        tombstone.acknowledged = True
        decode = tombstone.attempt.decode
        self._timers.cancel((REPEAT, tombstone.attempt))
        self._unacknowledged[decode] -= 1
        if not self._unacknowledged[decode]:
            del self._unacknowledged[decode]

    def _raise_floor(self, attempt: AttemptId) -> None:
        self._floor[attempt.decode] = max(attempt.number, self._floor.get(attempt.decode, -1))
