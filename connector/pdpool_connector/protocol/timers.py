"""Deadlines by name: set, move, cancel, and take those that are due. Pure: the caller brings the time."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Timers(Generic[Key]):
    """A heap of deadlines. A name has at most one; setting it again moves it."""

    def __init__(self) -> None:
        self._when: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._when)

    def set(self, key: Key, when: float) -> None:
        """Make `key` due at `when`; equal times come due in the order in which they were set."""
        self._serial += 1
        self._when[key] = (when, self._serial)
        heapq.heappush(self._heap, (when, self._serial, key))
        # Moved and cancelled entries stay in the heap until they surface; rebuilding bounds it by the live ones.
        if len(self._heap) > 2 * len(self._when) + 64:
            self._heap = [(at, serial, name) for name, (at, serial) in self._when.items()]
            heapq.heapify(self._heap)

    def cancel(self, key: Key) -> None:
        """Forget `key`, if it is there."""
        self._when.pop(key, None)

    def next(self) -> float | None:
        """When the earliest deadline is due; None when there is none."""
        while self._heap and self._stale(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Key | None:
        """Take the earliest name that is due at `now`; None when none is."""
        when = self.next()
        if when is None or when > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._when[key]
        return key

    def _stale(self, entry: tuple[float, int, Key]) -> bool:
        when, serial, key = entry
        return self._when.get(key) != (when, serial)
