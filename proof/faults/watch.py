"""Collects what the operator says of instances and pools, and which repairs it records, while a fault is played.

Every version of both pools is read. The one that names an instance at fault may last for less than 0.1 s, because the
operator restarts the instance at once.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from proof.cluster.stage import SIDES
from proof.cluster.watch import ANSWER_S, Watch
from proof.faults.score import Said
from tests.cluster.stack import Stack

AGAIN_S: Final = 0.05
"""Pause before the next watch of the API, in seconds. It begins where the last one ended."""
WELL: Final = frozenset({"Idle", "Flowing"})


class VerdictWatch:
    """Watches while the block runs. Times are seconds since the fault, once `fault_now` was called."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._fault_at: float | None = None
        self._watches = [Watch(f"verdicts of {side}", [partial(self._follow, side)], AGAIN_S) for side in SIDES]
        self._version: dict[str, str] = {}
        """`resourceVersion` of each side's pool that was read last. Empty: the pool is to be read again."""
        self._lock = threading.Lock()
        self._last: dict[str, str] = {}
        self._seen: set[tuple[str, str, str]] = set()
        self._earlier: set[tuple[str, str]] = set()
        self.verdicts: list[Said] = []
        self.reasons: list[Said] = []
        self.repairs: list[Said] = []

    def __enter__(self) -> Self:
        self._block = contextlib.ExitStack()
        for watch in self._watches:
            self._block.enter_context(watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.__exit__(kind, error, trace)

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

    def _follow(self, side: str) -> None:
        """Read what is new of a pool, for `ANSWER_S`."""
        if not self._version.get(side):
            body = self._stack.look(SIDES[side], "chat", timeout_s=ANSWER_S)
            self.take(side, body)
            self._version[side] = body["metadata"]["resourceVersion"]
        since, self._version[side] = self._version[side], ""
        for body in self._stack.versions(SIDES[side], "chat", since, for_s=int(ANSWER_S)):
            self.take(side, body)
            since = body["metadata"]["resourceVersion"]
        self._version[side] = since

    def take(self, side: str, body: dict[str, Any]) -> None:
        """Take in one version of a side's pool."""
        status = body.get("status", {})
        current = {f"{side}/{one['index']}": one["verdict"] for one in status.get("instances", [])}
        with self._lock:
            if self._fault_at is None:
                self._earlier.update(complaints(side, body))
            else:
                self._record(side, body, current)
            others = {whom: word for whom, word in self._last.items() if not whom.startswith(f"{side}/")}
            self._last = others | current

    def _record(self, side: str, body: dict[str, Any], current: dict[str, str]) -> None:
        for whom, reason in complaints(side, body):
            if (whom, reason) not in self._earlier:
                self._once(self.reasons, whom, reason)
        for record in body.get("status", {}).get("repairs", []):
            word = f"{record.get('action', '')} {record['state']}".removeprefix("Restart ").strip()
            self._once(self.repairs, f"{side}/{record['index']}", word, record.get("podUID", ""))
        for whom, word in current.items():
            if self._last.get(whom) != word:
                self.verdicts.append(Said(self.since_s, whom, word))

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
    good_if_false = {"Reconciling", "Stalled", "RepairStopped", "PeersUnreachable"}
    for one in body.get("status", {}).get("conditions", []):
        good = "False" if one["type"] in good_if_false else "True"
        if one["status"] != good:
            yield side, one["reason"]
