"""A table of remembered ends, bounded in all and for each peer, whose rows expire."""

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

from pdpool_connector.protocol.timers import Timers

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedTable(Generic[Key, Value]):
    """At most `limit` rows, half of them for one peer. Each row has a timer (`timer`, its key).

    The owner of the timers calls `pop` when a row's timer is due.
    """

    def __init__(self, limit: int, timers: Timers[tuple[str, Hashable]], timer: str) -> None:
        self._limit, self._timers, self._timer = limit, timers, timer
        self._rows: dict[Key, tuple[Value, str]] = {}
        self._of_peer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    def count(self, peer: str) -> int:
        """How many rows are kept on account of `peer`."""
        return self._of_peer[peer]

    def full(self, peer: str, *, reserved: int = 0, reserved_of_peer: int = 0) -> bool:
        """Whether no further row fits, in all or for this peer, beside the reserved ones. "" is no peer."""
        of_peer = self._of_peer[peer] + reserved_of_peer
        return len(self._rows) + reserved >= self._limit or (peer != "" and of_peer >= self._limit // 2)

    def get(self, key: Key) -> Value | None:
        """The row under `key`, which stays; None where there is none."""
        row = self._rows.get(key)
        return None if row is None else row[0]

    def put(self, key: Key, value: Value, peer: str, expires: float) -> None:
        """Keep a new row on account of `peer`. The caller has asked `full` first."""
        self._rows[key] = (value, peer)
        self._of_peer[peer] += 1
        self._timers.set((self._timer, key), expires)

    def keep_until(self, key: Key, expires: float) -> None:
        """Move the expiry of a row that is there."""
        self._timers.set((self._timer, key), expires)

    def pop(self, key: Key) -> Value | None:
        """Take a row out; None where there is none."""
        value, peer = self._rows.pop(key, (None, ""))
        if value is None:
            return None
        self._timers.cancel((self._timer, key))
        self._of_peer[peer] -= 1
        if not self._of_peer[peer]:
            del self._of_peer[peer]
        return value
