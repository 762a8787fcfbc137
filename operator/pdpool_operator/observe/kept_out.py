"""Instances that a `PoolOperation` keeps out of the rotation.

Such an operation drains its instance for as long as `keeps_out` holds. This is not stored at the instance: it follows
from the operation's status.
"""

from collections.abc import Iterable
from dataclasses import replace

from ..api.operations import OperationPhase, OperationType, PoolOperation
from .model import DrainReason, ObservedInstance


def keeps_out(operation: PoolOperation, instance: ObservedInstance) -> bool:
    """Whether the operation keeps the instance out of the rotation.

    A drain does so until the operation is deleted. A restart does so until the pod that it replaces is gone.
    """
    status, pod = operation.status, instance.pod
    if operation.instance != instance.name or status.instance_uid != instance.uid:
        return False
    if status.phase is OperationPhase.SUCCEEDED:
        return operation.spec.type is OperationType.DRAIN
    if status.phase is OperationPhase.RESTARTING:
        return pod is not None and pod.uid == status.pod_uid
    return status.phase is OperationPhase.DRAINING


def with_operations(instance: ObservedInstance, operations: Iterable[PoolOperation]) -> ObservedInstance:
    """Return the instance with the drain of the operation that keeps it out. A drain of the pool's own remains."""
    for operation in operations:
        if not keeps_out(operation, instance):
            continue
        instance = replace(instance, kept_out_by=operation.metadata.name)
        if instance.drain_started is None:
            started = operation.status.started_at or operation.metadata.creation_timestamp
            instance = replace(instance, drain_started=started, drain_reason=DrainReason.OPERATION)
        break
    return instance
