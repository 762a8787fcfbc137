"""Collects what the operator says of instances and pools, and which repairs it records, while a fault is played."""

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

from proof.cluster.stage import SIDES
from proof.cluster.watch import ANSWER_S, Watch
from proof.faults.score import Said
from tests.cluster.stack import Stack

LOOK_S: Final = 0.5
WELL: Final = frozenset({"Idle", "Flowing"})


class VerdictWatch:
    """Watches while the block runs. Times are seconds since the fault, once `fault_now` was called."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._fault_at: float | None = None
        self._watch = Watch("verdicts", [self.look], LOOK_S)
        self._last: dict[str, str] = {}
        self._seen: set[tuple[str, str, str]] = set()
        self._earlier: set[tuple[str, str]] = set()
        self.verdicts: list[Said] = []
        self.reasons: list[Said] = []
        self.repairs: list[Said] = []

    def __enter__(self) -> Self:
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)

    def fault_now(self) -> None:
        """Start the clock. What was said before does not count."""
        self._fault_at = time.monotonic()

    @property
    def since_s(self) -> float:
        """Seconds since the fault."""
        assert self._fault_at is not None, "the fault has not begun"
        return round(time.monotonic() - self._fault_at, 1)

    def well(self) -> str | None:
        """Return which instances are not judged well, as text. None if all are."""
        return "; ".join(f"{name} {word}" for name, word in sorted(self._last.items()) if word not in WELL) or None

    def look(self) -> None:
        """Read both pools once. The block calls this again and again."""
        bodies = {side: self._stack.look(short, "chat", timeout_s=ANSWER_S) for side, short in SIDES.items()}
        if self._fault_at is None:
            self._earlier.update(one for side, body in bodies.items() for one in complaints(side, body))
            return
        current: dict[str, str] = {}
        for side, body in bodies.items():
            for one in body.get("status", {}).get("instances", []):
                current[f"{side}/{one['index']}"] = one["verdict"]
            for whom, reason in complaints(side, body):
                if (whom, reason) not in self._earlier:
                    self._once(self.reasons, whom, reason)
            for record in body.get("status", {}).get("repairs", []):
                key = record.get("podUID", "")
                self._once(self.repairs, f"{side}/{record['index']}", record["state"], key)
        for whom, word in current.items():
            if self._last.get(whom) != word:
                self.verdicts.append(Said(self.since_s, whom, word))
        self._last = current

    def _once(self, into: list[Said], whom: str, word: str, key: str = "") -> None:
        if (whom, word, key) not in self._seen:
            self._seen.add((whom, word, key))
            into.append(Said(self.since_s, whom, word))


def complaints(side: str, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the side and the reason of each condition that is not as it should be.

    Args:
        side: Of the pool.
        body: The pool.
    """
    good_if_false = {"Reconciling", "Stalled", "RepairStopped"}
    for one in body.get("status", {}).get("conditions", []):
        good = "False" if one["type"] in good_if_false else "True"
        if one["status"] != good:
            yield side, one["reason"]
