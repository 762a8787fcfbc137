"""What becomes of one operation: its next status, and the deeds whose intent was read from the present one."""

from dataclasses import dataclass
from datetime import datetime

from ..api.base import Condition, ConditionStatus
from ..api.operations import OperationPhase, OperationStatus, PoolOperation
from ..api.reasons import ConditionType, Reason
from .model import Delete, Event, EventType, Fence, Purge

MAX_MESSAGE = 1000
POLL_S = 1.0
"""How often an operation under way is looked at: queues change without an event in the cluster."""
SHOWN = 5
"""Names that a message lists."""


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of one operation."""

    operation: PoolOperation
    status: OperationStatus
    delete: Delete | None = None
    """The deed whose intent was read from the status."""
    purges: tuple[Purge, ...] = ()
    """The same, for each rank that has not done it."""
    fences: tuple[Fence, ...] = ()
    """The same, for each hold of a process in the status."""
    event: Event | None = None

    @property
    def changes_phase(self) -> bool:
        """Whether the operation takes a step, beside its message."""
        before = self.operation.status
        return before.phase is not self.status.phase or not before.conditions

    @property
    def must_be_stored(self) -> bool:
        """Whether a deed rests on what the status adds, beside its message."""
        return self.changes_phase or self.operation.status.processes != self.status.processes


@dataclass(frozen=True, slots=True)
class Outcome:
    """The next phase, with its reason and message."""

    phase: OperationPhase
    reason: Reason
    message: str
    purges: tuple[Purge, ...] = ()
    ended: int | None = None
    """Hand-offs that a purge has ended."""


def failed(reason: Reason, message: str) -> Outcome:
    """Return the outcome of an operation that is refused or given up."""
    return Outcome(OperationPhase.FAILED, reason, message)


def late(operation: PoolOperation, words: str) -> Outcome:
    """Return the outcome of an operation whose deadline has passed. `words` are what was left."""
    return failed(Reason.DEADLINE_PASSED, f"Not done within {operation.spec.deadline_seconds} s: {words}")


def event_of(operation: PoolOperation, outcome: Outcome) -> Event | None:
    """Return the event of a new phase."""
    if operation.status.phase is outcome.phase:
        return None
    bad = outcome.phase is OperationPhase.FAILED
    return Event(EventType.WARNING if bad else EventType.NORMAL, outcome.reason, outcome.message)


def changes_of(operation: PoolOperation, outcome: Outcome, now: datetime) -> dict[str, object]:
    """Return the changes of the status that every type has in common."""
    changes: dict[str, object] = {
        "observed_generation": operation.metadata.generation,
        "phase": outcome.phase,
        "message": outcome.message[:MAX_MESSAGE],
        "conditions": _conditions(operation, outcome, now),
    }
    if outcome.phase.finished and operation.status.finished_at is None:
        changes["finished_at"] = now
    return changes


def shortened(words: list[str]) -> str:
    """Return the first few, and how many more there are."""
    more = f", and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return "; ".join(words[:SHOWN]) + more


def _conditions(operation: PoolOperation, outcome: Outcome, now: datetime) -> tuple[Condition, ...]:
    """Return Ready, and Reconciling or Stalled, as kstatus reads them."""
    phase = outcome.phase
    wanted = [(ConditionType.READY, phase is OperationPhase.SUCCEEDED)]
    if not phase.finished:
        wanted.append((ConditionType.RECONCILING, True))
    elif phase is OperationPhase.FAILED:
        wanted.append((ConditionType.STALLED, True))
    before = {condition.type: condition for condition in operation.status.conditions}
    conditions = []
    for kind, holds in wanted:
        status = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
        earlier = before.get(kind)
        since = earlier.last_transition_time if earlier is not None and earlier.status is status else now
        conditions.append(
            Condition(
                type=kind,
                status=status,
                reason=outcome.reason,
                message=outcome.message[:MAX_MESSAGE],
                last_transition_time=since,
                observed_generation=operation.metadata.generation,
            )
        )
    return tuple(conditions)
