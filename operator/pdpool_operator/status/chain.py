"""Policy chains: a condition as a list of named rules, of which the first that is violated gives reason and message."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from ..api.base import Condition, ConditionStatus
from ..api.reasons import Reason

MAX_MESSAGE = 2048
"""Below the bound in the CRD: a message that is too long must not keep a status from being written."""

Input = TypeVar("Input")


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that is not met."""

    reason: Reason
    message: str
    status: ConditionStatus = ConditionStatus.FALSE


Rule = Callable[[Input], Violation | None]


def first_violation(chain: Sequence[Rule[Input]], facts: Input) -> Violation | None:
    """The first rule of the chain that is not met."""
    for rule in chain:
        violation = rule(facts)
        if violation is not None:
            return violation
    return None


@dataclass(frozen=True, slots=True)
class ConditionWriter:
    """Makes conditions of one object; a condition that keeps its status keeps its time of transition."""

    before: tuple[Condition, ...]
    generation: int
    now: datetime

    def write(self, kind: str, status: ConditionStatus, reason: Reason, message: str) -> Condition:
        """The condition as it is now."""
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
        """The condition that a chain leads to; reason and message are for the case that no rule is violated."""
        if violation is None:
            return self.write(kind, ConditionStatus.TRUE, reason, message)
        return self.write(kind, violation.status, violation.reason, violation.message)


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """The condition of a type."""
    return next((condition for condition in conditions if condition.type == kind), None)


def shortened(text: str, limit: int) -> str:
    """The text, cut where it exceeds the limit."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
