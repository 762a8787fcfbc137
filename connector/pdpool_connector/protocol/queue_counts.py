"""Hand-offs by state and queue: how many, since when the oldest, how many made progress. In constant time."""

from collections import Counter
from collections.abc import Mapping
from typing import Generic, TypeVar

State = TypeVar("State")


class QueueCounts(Generic[State]):
    """Counts that are kept as hand-offs move. Each state has labels: its own name, and a queue that spans states.

    The members of a label are in order of entry, so the first is the oldest. A step between two states of one queue
    does not leave the queue and does not reset the age in it.
    """

    def __init__(self, labels: Mapping[State, tuple[str, ...]]) -> None:
        self._labels = dict(labels)
        self._steps: dict[tuple[State | None, State], tuple[tuple[str, ...], tuple[str, ...]]] = {}
        """Cache: the labels that a step leaves, and those that it enters."""
        self._since: dict[str, dict[int, float]] = {label: {} for labels in labels.values() for label in labels}
        self._moved: Counter[str] = Counter()

    def move(self, who: int, before: State | None, after: State, now: float, *, progress: bool) -> None:
        """Note that `who` goes from state `before` (None: it is new) to `after`. A state without labels is final.

        `progress`: False for a failure, so that a queue in which requests only expire does not seem to move.
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
            self._moved[label] += progress
        for label in step[1]:
            self._since[label][who] = now

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels."""
        return tuple(self._since)

    def count(self, label: str) -> int:
        """How many have `label` now."""
        return len(self._since[label])

    def oldest(self, label: str) -> float | None:
        """When the oldest member of `label` entered it; None when it has no members."""
        return next(iter(self._since[label].values()), None)

    def moved_total(self, label: str) -> int:
        """How many have left `label` with progress, not by failing."""
        return self._moved[label]
