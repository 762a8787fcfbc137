"""Gates of a `PoolOperation` that is Pending, and the gate that also holds later. Pure.

In this order. A star marks those that end the operation as Failed, because only a person opens them:

    exists *         the pool and the instance exist

    taken *          no other drain or restart acts on the instance, or keeps it out. The one that began first has it;
                     if none began, the older one.

    router *         Drain only: a router of pdpool's sends the requests, so that it can stop to

    pod              Restart only: there is a pod, and it does not terminate

    own drain        the pool does not drain the instance for an update or a scale-down

    last serving     another instance of the pool serves, or this one does not

    connector *      Purge only, which has no other gate but the first: the engine runs pdpool's connector

The gate of the last serving instance also holds later. If the other instances fail before the drain has ended or the
pod is deleted, the operation is Pending again.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass
from datetime import datetime

from ..api.operations import OperationPhase, OperationType, PoolOperation
from ..api.reasons import Reason
from ..observe.model import DrainReason, ObservedInstance, ObservedPool
from .operation_step import Outcome, failed


@dataclass(frozen=True, slots=True)
class PoolSide:
    """The pool of the operations."""

    observed: ObservedPool
    serving: frozenset[int]
    """Indexes of the instances that serve."""

    def __str__(self) -> str:
        pool = self.observed.pool
        return f"{pool.kind} {pool.metadata.name}"

    @property
    def instances(self) -> dict[str, ObservedInstance]:
        """The pool's instances that are not being deleted, by name."""
        return {one.name: one for one in self.observed.own if not one.deleting}


def in_turn(operation: PoolOperation) -> tuple[bool, datetime, str]:
    """Sort key: operations that have begun come first, then the older ones."""
    meta = operation.metadata
    return operation.status.phase is OperationPhase.PENDING, meta.creation_timestamp, meta.name


def refused(
    operations: Iterable[PoolOperation], operation: PoolOperation, side: PoolSide, instance: ObservedInstance
) -> Outcome | None:
    """Return the outcome of a gate that only a person opens."""
    other = _holder(operations, operation, instance)
    if other is not None:
        held = f"PoolOperation {other.metadata.name} ({other.spec.type}) has {instance.name}"
        return failed(Reason.INSTANCE_TAKEN, f"{held}; delete it, or wait for its end, and create another one")
    if operation.spec.type is OperationType.DRAIN and not side.observed.routed:
        words = (
            f"No router of pdpool's sends requests to {side}, so the operator cannot keep them from "
            f"{instance.name}; take it out of your own gateway"
        )
        return failed(Reason.NO_ROUTER, words)
    return None


def _holder(
    operations: Iterable[PoolOperation], operation: PoolOperation, instance: ObservedInstance
) -> PoolOperation | None:
    """Return another operation that acts on the instance or keeps it out."""
    for other in operations:
        if other is operation or other.instance != instance.name or other.spec.type is OperationType.PURGE:
            continue
        status = other.status
        under_way = status.phase in {OperationPhase.DRAINING, OperationPhase.RESTARTING}
        kept = status.phase is OperationPhase.SUCCEEDED and instance.kept_out_by == other.metadata.name
        older = status.phase is OperationPhase.PENDING and in_turn(other) < in_turn(operation)
        if kept or (under_way and status.instance_uid == instance.uid) or older:
            return other
    return None


def closed(operation: PoolOperation, side: PoolSide, instance: ObservedInstance, serving: Set[int]) -> str:
    """Return why a drain or restart cannot begin yet. Empty if it can. `serving` is as for `last_serving`."""
    pod = instance.pod
    if operation.spec.type is OperationType.RESTART and (pod is None or pod.terminating):
        return f"{instance.name} has no pod" if pod is None else f"the pod {pod.name} is already being deleted"
    if instance.drain_started is not None and instance.drain_reason != DrainReason.OPERATION:
        why = "it is surplus" if instance.drain_reason == DrainReason.SCALE_DOWN else "its spec has changed"
        return f"the pool itself drains {instance.name}, because {why}"
    return last_serving(side, instance, serving, serves=instance.index in side.serving)


def last_serving(side: PoolSide, instance: ObservedInstance, serving: Set[int], *, serves: bool) -> str:
    """Return that no other instance serves, if that forbids to take this one. Empty otherwise.

    Args:
        side: The pool.
        instance: The instance to take.
        serving: Indexes of the instances that serve, without those that the same plan takes out.
        serves: This one does, or did before it was taken out. A verdict on a drained instance does not say that.
    """
    if not serves or serving - {instance.index}:
        return ""
    return f"{instance.name} stays in the rotation, because no other instance of {side} serves"
