"""Policy chains: a condition as a list of named rules. The first violated rule gives reason and message."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from ..api.base import Condition, ConditionStatus
from ..api.reasons import Reason

MAX_MESSAGE = 2048
"""Shorter than the limit in the CRD: a long message must not prevent the write of a status."""

Input = TypeVar("Input")


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that is violated."""

    reason: Reason
    message: str
    status: ConditionStatus = ConditionStatus.FALSE


Rule = Callable[[Input], Violation | None]


def first_violation(chain: Sequence[Rule[Input]], facts: Input) -> Violation | None:
    """Return the first violation of the chain, or None."""
    for rule in chain:
        violation = rule(facts)
        if violation is not None:
            return violation
    return None


@dataclass(frozen=True, slots=True)
class ConditionWriter:
    """Makes the conditions of one object. A condition that keeps its status keeps its transition time."""

    before: tuple[Condition, ...]
    generation: int
    now: datetime

    def write(self, kind: str, status: ConditionStatus, reason: Reason, message: str) -> Condition:
        """Return the condition with this status, reason and message."""
        earlier = find(self.before, kind)
        unchanged = earlier is not None and earlier.status is status
        return Condition(
            type=kind,
            status=status,
            reason=reason,
            message=shortened(message, MAX_MESSAGE),
            last_transition_time=earlier.last_transition_time if unchanged and earlier else self.now,
            observed_generation=self.generation,
        )

    def judge(self, kind: str, violation: Violation | None, reason: Reason, message: str) -> Condition:
        """Return the condition that results from a chain. Reason and message apply if no rule is violated."""
        if violation is None:
            return self.write(kind, ConditionStatus.TRUE, reason, message)
        return self.write(kind, violation.status, violation.reason, violation.message)


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """Return the condition of a type."""
    return next((condition for condition in conditions if condition.type == kind), None)


def shortened(text: str, limit: int) -> str:
    """Return the text, cut where it exceeds the limit."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
