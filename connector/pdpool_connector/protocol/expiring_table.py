"""What is remembered for a while for whoever may come back for it, bounded in all and for each peer."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeVar

from pdpool_connector.protocol.timers import Timers

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass(slots=True)
class _Row(Generic[Value]):
    value: Value
    peer: str
    expires: float


class ExpiringTable(Generic[Key, Value]):
    """Rows that leave when they are taken, or `keep_s` seconds after they came; at most `limit`, half of it for a peer.

    The machine's timer `timer` has its owner call `expire`.
    """

    def __init__(
        self, limit: int, keep_s: float, timers: Timers[tuple[str, Hashable]], timer: tuple[str, Hashable]
    ) -> None:
        self._limit, self._keep_s, self._timers, self._timer = limit, keep_s, timers, timer
        self._rows: dict[Key, _Row[Value]] = {}
        """In the order in which they expire."""
        self._of_peer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: Key) -> Value | None:
        """A row that stays; None where there is none."""
        row = self._rows.get(key)
        return None if row is None else row.value

    def put(self, key: Key, value: Value, peer: str, now: float) -> bool:
        """Keep a row on account of `peer`, or of nobody (""); False when it is there or there is no room for it."""
        its_share = bool(peer) and self._of_peer[peer] >= self._limit // 2
        if key in self._rows or its_share or len(self) >= self._limit:
            return False
        expires = now + self._keep_s
        if not self._rows:
            self._timers.set(self._timer, expires)
        self._rows[key] = _Row(value, peer, expires)
        self._of_peer[peer] += 1
        return True

    def pop(self, key: Key) -> Value | None:
        """Take a row out; None where there is none."""
        row = self._rows.pop(key, None)
        if row is None:
            return None
        self._of_peer[row.peer] -= 1
        if not self._of_peer[row.peer]:
            del self._of_peer[row.peer]
        return row.value

    def expire(self, now: float) -> list[tuple[Key, Value]]:
        """Take out what is due, and have the timer come back for the rest."""
        due = list(takewhile(lambda item: item[1].expires <= now, self._rows.items()))
        for key, _ in due:
            self.pop(key)
        if self._rows:
            self._timers.set(self._timer, next(iter(self._rows.values())).expires)
        return [(key, row.value) for key, row in due]
