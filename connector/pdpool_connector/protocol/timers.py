"""Deadlines by name: set, move, cancel, and take those that are due. Pure: the caller brings the time."""

import heapq
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
_Entry = tuple[float, int]

_SLOT_S: Final = 0.125
"""A power of two, so that an entry is never before the begin of its slot."""
_FAR: Final = 2.0**40


class Timers(Generic[Key]):
    """Deadlines in slots of an eighth of a second, and a heap of those whose turn is near. A name has at most one;
    setting it again moves it.

    Most deadlines are cancelled long before they are due, and tens of thousands may wait (ends that are remembered).
    What is cancelled leaves its slot at once, so that no call has to sweep through all that wait. What takes longest is
    that a slot's turn comes near, which is as long as deadlines are in it.

    The heap holds numbers only: cancelled entries stay in it until they surface or are more than what is alive, and
    must not keep alive what they were for.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._names: dict[int, Key] = {}
        self._slots: dict[float, dict[int, _Entry]] = {}
        """Entries that are not in the heap, by number of the slot and by their own."""
        self._numbers: list[float] = []
        """A heap of the slots' numbers; some may be of slots that are gone."""
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
        """Take the earliest name that is due at `now`; None when none is."""
        when = self.next()
        if when is None or when > now:
            return None
        key = self._names.pop(heapq.heappop(self._heap)[1])
        del self._entries[key]
        return key

    def _add_number(self, number: float) -> None:
        heapq.heappush(self._numbers, number)
        # Slots are few where deadlines are minutes: 2400 in five of them, whatever the number of deadlines.
        if len(self._numbers) > 2 * len(self._slots) + 64:
            self._numbers = sorted(self._slots)
