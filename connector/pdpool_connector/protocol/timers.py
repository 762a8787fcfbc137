"""Deadlines by name: set, move, cancel, and take those that are due. Pure: the caller brings the time."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Timers(Generic[Key]):
    """A heap of deadlines. A name has at most one; setting it again moves it.

    The heap holds numbers only: moved and cancelled entries stay in it until they surface, and must not keep alive what
    they were for.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[float, int]] = {}
        self._names: dict[int, Key] = {}
        self._heap: list[tuple[float, int]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, key: Key, when: float) -> None:
        """Make `key` due at `when`; equal times come due in the order in which they were set."""
        before = self._entries.get(key)
        if before is not None:
            del self._names[before[1]]
        self._serial = serial = self._serial + 1
        self._entries[key] = entry = (when, serial)
        self._names[serial] = key
        heapq.heappush(self._heap, entry)
        # Rebuilding bounds the heap by the live entries.
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def cancel(self, key: Key) -> None:
        """Forget `key`, if it is there."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            del self._names[entry[1]]

    def next(self) -> float | None:
        """When the earliest deadline is due; None when there is none."""
        heap = self._heap
        while heap and heap[0][1] not in self._names:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> Key | None:
        """Take the earliest name that is due at `now`; None when none is."""
        when = self.next()
        if when is None or when > now:
            return None
        key = self._names.pop(heapq.heappop(self._heap)[1])
        del self._entries[key]
        return key
