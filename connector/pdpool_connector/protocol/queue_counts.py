"""How many hand-offs are in each state and queue, since when the oldest, and how many went on: in constant time."""

from collections import Counter
from collections.abc import Mapping
from typing import Generic, TypeVar

State = TypeVar("State")


class QueueCounts(Generic[State]):
    """Counts kept as hand-offs move. Each state belongs to labels (its own name, and a queue that spans states).

    A label's members stand in order of entry, so that the first is the oldest. A step between two states of the same
    queue neither leaves the queue nor resets the age in it.
    """

    def __init__(self, labels: Mapping[State, tuple[str, ...]]) -> None:
        self._labels = labels
        self._steps: dict[tuple[State | None, State], tuple[tuple[str, ...], tuple[str, ...]]] = {}
        """The labels that a step leaves and those that it enters, as far as it has been made."""
        self._since: dict[str, dict[int, float]] = {label: {} for labels in labels.values() for label in labels}
        self._went_on: Counter[str] = Counter()

    def move(self, who: int, before: State | None, after: State, now: float, *, progress: bool) -> None:
        """Note that `who` goes from `before` (None: it is new) to `after`; a state without labels is the end.

        `progress`: it went on. A failure is none, or a queue in which requests only expire would look as if it moved.
        """
        step = self._steps.get((before, after))
        if step is None:
            old = self._labels.get(before, ()) if before is not None else ()
            new = self._labels.get(after, ())
            left = tuple(label for label in old if label not in new)
            entered = tuple(label for label in new if label not in old)
            step = self._steps[before, after] = (left, entered)
        for label in step[0]:
            del self._since[label][who]
            self._went_on[label] += progress
        for label in step[1]:
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

    def went_on(self, label: str) -> int:
        """How many have left `label` so far by going on, not by failing."""
        return self._went_on[label]
