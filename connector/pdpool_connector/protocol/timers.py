"""Deadlines by name: set, move, cancel, and take those that are due. Pure: the caller gives the time."""

import heapq
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
_Entry = tuple[float, int]

_SLOT_S: Final = 0.125
"""A power of two, so that an entry is never before the begin of its slot."""
_FAR: Final = 2.0**40


class Timers(Generic[Key]):
    """Deadlines in slots of an eighth of a second, and a heap of those that are due soon. A name has at most one
    deadline; setting it again moves it.

    Most deadlines are cancelled long before they are due, and tens of thousands may wait (remembered ends). A cancelled
    deadline leaves its slot at once, so no call has to sweep all that wait. The longest call moves one slot into the
    heap, and takes as long as the slot has deadlines.

    The heap holds numbers only. Cancelled entries stay in it until they are at its top or outnumber live ones, and
    must not keep their names alive.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._names: dict[int, Key] = {}
        self._slots: dict[float, dict[int, _Entry]] = {}
        """Entries that are not in the heap, by number of the slot and by their own number."""
        self._numbers: list[float] = []
        """A heap of the numbers of slots, of which some may be gone."""
        self._heap: list[_Entry] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, key: Key, when: float) -> None:
        """Make `key` due at `when`; equal times come due in the order in which they were set."""
        self.cancel(key)
        self._serial = serial = self._serial + 1
        self._entries[key] = entry = (when, serial)
        self._names[serial] = key
        number = min(when, _FAR) // _SLOT_S
        slot = self._slots.get(number)
        if slot is None:
            self._slots[number] = {serial: entry}
            self._add_number(number)
        else:
            slot[serial] = entry

    def cancel(self, key: Key) -> None:
        """Forget `key`, if it is there."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        when, serial = entry
        del self._names[serial]
        number = min(when, _FAR) // _SLOT_S
        slot = self._slots.get(number)
        if slot is not None and slot.pop(serial, None) is not None and not slot:
            del self._slots[number]

    def next(self) -> float | None:
        """When the earliest deadline is due; None when there is none."""
        heap, names, numbers = self._heap, self._names, self._numbers
        while True:
            while heap and heap[0][1] not in names:
                heapq.heappop(heap)
            if not numbers or (heap and heap[0][0] < numbers[0] * _SLOT_S):
                return heap[0][0] if heap else None
            for entry in self._slots.pop(heapq.heappop(numbers), {}).values():
                heapq.heappush(heap, entry)
            if len(heap) > 2 * len(names) + 64:
                heap[:] = [entry for entry in heap if entry[1] in names]
                heapq.heapify(heap)

    def pop_due(self, now: float) -> Key | None:
        """Take the earliest name that is due at `now`; None when none is due."""
        when = self.next()
        if when is None or when > now:
            return None
        key = self._names.pop(heapq.heappop(self._heap)[1])
        del self._entries[key]
        return key

    def _add_number(self, number: float) -> None:
        heapq.heappush(self._numbers, number)
        # Deadlines of minutes need few slots: 2400 for five minutes, for any number of deadlines.
        if len(self._numbers) > 2 * len(self._slots) + 64:
            self._numbers = sorted(self._slots)
