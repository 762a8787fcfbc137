"""How many hand-offs are in each state and queue, since when the oldest, and how many have left: in constant time."""

from collections import Counter
from collections.abc import Mapping
from typing import Generic, TypeVar

State = TypeVar("State")


class Census(Generic[State]):
    """Counts kept as hand-offs move. Each state belongs to labels (its own name, and a queue that spans states).

    A label's members stand in order of entry, so that the first is the oldest. A step between two states of the same
    queue neither leaves the queue nor resets the age in it.
    """

    def __init__(self, labels: Mapping[State, tuple[str, ...]]) -> None:
        self._labels = labels
        self._since: dict[str, dict[int, float]] = {label: {} for labels in labels.values() for label in labels}
        self._left: Counter[str] = Counter()

    def move(self, who: int, before: State | None, after: State, now: float) -> None:
        """Note that `who` goes from `before` (None: it is new) to `after`; a state without labels is the end."""
        old = self._labels.get(before, ()) if before is not None else ()
        new = self._labels.get(after, ())
        for label in old:
            if label not in new:
                del self._since[label][who]
                self._left[label] += 1
        for label in new:
            if label not in old:
                self._since[label][who] = now

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels that are counted."""
        return tuple(self._since)

    def count(self, label: str) -> int:
        """How many bear `label` now."""
        return len(self._since[label])

    def oldest(self, label: str) -> float | None:
        """When the oldest that bears `label` got it; None when there is none."""
        return next(iter(self._since[label].values()), None)

    def left(self, label: str) -> int:
        """How many have lost `label` so far."""
        return self._left[label]
