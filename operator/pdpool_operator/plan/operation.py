"""Decides the next step of each `PoolOperation` on the instances of one pool. Pure, and total.

`node_fence` does that for operations on a node.

    Pending      Nothing is done. A gate is closed, and the message names it.

    Draining     The instance is out of the rotation, and its requests end.

    Restarting   Restart only. The pod with the UID in the status is about to be deleted, or was.

    Purging      Purge only. The ranks are about to end old hand-offs, or have. The instance stays in the rotation.

    Succeeded    Drain: the instance is drained. It stays out of the rotation until the operation is deleted.
                 Restart: another pod is Ready, and a router lists it, if there is one.
                 Purge: every rank has ended its old hand-offs.

    Failed       Refused, or the deadline has passed. The instance returns into the rotation.

Each phase is written before it takes effect. The rotation, the deletion of the pod and the purge follow from a status
that was read back. So an operator that is killed at any step neither repeats nor forgets. A pod is deleted by its UID.
Once that UID is gone nothing else is deleted. A purge alone may be sent again, which does no harm: see `purge`.

`operation_gates` has the gates of Pending. A restart gives up its drain after the pool's  drainTimeoutSeconds,  as an
update does.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from ..api.operations import OperationPhase, OperationStatus, OperationType, PoolOperation
from ..api.reasons import Reason
from ..api.wording import some
from ..engines import engine_of
from ..observe.model import ObservedInstance
from .drain import GIVEN_UP_GRACE_S, deadline, work_left
from .model import Delete, Purged
from .operation_gates import PoolSide, closed, in_turn, last_serving, refused
from .operation_step import POLL_S, Outcome, Step, changes_of, event_of, failed, late
from .purge import PurgeOrder, purge_progress

WAIT_POLL_S = 5.0
"""How often an operation is looked at that waits. Most gates open with an event, but verdicts and deadlines do not."""


@dataclass(frozen=True, slots=True)
class OperationPlan:
    """The steps of all operations that have not ended."""

    steps: tuple[Step, ...] = ()

    @property
    def acts(self) -> bool:
        """Whether the plan must rest on live state."""
        return any(step.changes_phase or step.delete or step.purges for step in self.steps)

    @property
    def again_s(self) -> float | None:
        """When to plan again, in seconds, if nothing changes in the cluster."""
        phases = {step.status.phase for step in self.steps if not step.status.phase.finished}
        if phases & {OperationPhase.DRAINING, OperationPhase.RESTARTING, OperationPhase.PURGING}:
            return POLL_S
        return WAIT_POLL_S if phases else None


def plan_operations(
    operations: Sequence[PoolOperation],
    side: PoolSide | None,
    now: datetime,
    unreadable: str = "",
    purged: Mapping[str, Sequence[Purged]] | None = None,
) -> OperationPlan:
    """Return the next step of each operation that has not ended.

    Args:
        operations: All operations on instances of one pool, finished ones included.
        side: The pool. None if it does not exist, or cannot be read.
        now: The present time.
        unreadable: Why the pool cannot be read. Empty if it can, or does not exist.
        purged: What ranks have answered to purges, by UID of the operation. An operator that has just started knows
            none, and asks again.
    """
    planner = _Planner(operations, side, now.replace(microsecond=0), unreadable, purged or {})
    return OperationPlan(
        tuple(planner.step(one) for one in sorted(operations, key=in_turn) if not one.status.phase.finished)
    )


class _Planner:
    """One call of the planner."""

    def __init__(
        self,
        operations: Collection[PoolOperation],
        side: PoolSide | None,
        now: datetime,
        unreadable: str,
        purged: Mapping[str, Sequence[Purged]],
    ) -> None:
        self.operations, self.side, self.now, self.unreadable = operations, side, now, unreadable
        self.purged = purged
        self.serving = set(side.serving) if side is not None else set()
        """Without the instances that this plan takes out."""

    def step(self, operation: PoolOperation) -> Step:
        """Return the next step of one operation."""
        before, instance = operation.status, None
        if self.side is None:
            outcome = self._without_side(operation)
        else:
            instance = self.side.instances.get(operation.instance)
            outcome = self._outcome(operation, self.side, instance)
        delete = None
        if before.phase is outcome.phase is OperationPhase.RESTARTING and instance is not None:
            delete = self._deed(operation, instance)
        status = self._status(operation, outcome, instance)
        return Step(operation, status, delete, outcome.purges, event=event_of(operation, outcome))

    def _outcome(self, operation: PoolOperation, side: PoolSide, instance: ObservedInstance | None) -> Outcome:
        phase = operation.status.phase
        if instance is None:
            return self._without_instance(operation, side)
        if phase is OperationPhase.PENDING:
            return self._pending(operation, side, instance)
        if operation.status.instance_uid != instance.uid:
            words = f"{instance.name} was removed before the operation ended, and another one has its name"
            return failed(Reason.INSTANCE_NOT_FOUND, words)
        if phase is OperationPhase.DRAINING:
            return self._draining(operation, side, instance)
        if phase is OperationPhase.PURGING:
            return self._purging(operation, instance)
        return self._restarting(operation, side, instance)

    def _without_side(self, operation: PoolOperation) -> Outcome:
        pool = f"{operation.pool_kind.kind} {operation.pool_name}"
        if not self.unreadable:
            words = f"There is no {pool} in the namespace {operation.metadata.namespace}"
            return failed(Reason.POOL_NOT_FOUND, words)
        if self.now >= operation.due:
            return late(operation, f"{pool} cannot be read: {self.unreadable}")
        return Outcome(operation.status.phase, Reason.WAITING, f"Waits: {pool} cannot be read: {self.unreadable}")

    def _without_instance(self, operation: PoolOperation, side: PoolSide) -> Outcome:
        if operation.status.phase is not OperationPhase.PENDING:
            return failed(Reason.INSTANCE_NOT_FOUND, f"{operation.instance} was removed before the operation ended")
        known = sorted(side.instances)
        has = f"it has {some(known)}" if known else "it has none"
        return failed(Reason.INSTANCE_NOT_FOUND, f"{side} has no instance {operation.instance}; {has}")

    def _pending(self, operation: PoolOperation, side: PoolSide, instance: ObservedInstance) -> Outcome:
        if operation.spec.type is OperationType.PURGE:
            return self._before_purge(operation, side, instance)
        refusal = refused(self.operations, operation, side, instance)
        if refusal is not None:
            return refusal
        if gate := closed(operation, side, instance, self.serving):
            return self._waits(operation, gate)
        if self.now >= operation.due:
            return late(operation, "the operator did not run")
        self.serving.discard(instance.index)
        words = f"{instance.name} leaves the rotation and finishes its requests"
        return Outcome(OperationPhase.DRAINING, Reason.DRAINING, words)

    def _draining(self, operation: PoolOperation, side: PoolSide, instance: ObservedInstance) -> Outcome:
        status, pod, routed = operation.status, instance.pod, side.observed.routed
        restart = operation.spec.type is OperationType.RESTART
        if restart and (pod is None or pod.terminating or pod.uid != status.pod_uid):
            words = f"The pod of {instance.name} was deleted during the drain"
            return Outcome(OperationPhase.RESTARTING, Reason.RESTARTING, words)
        left = "; ".join(work_left(instance, routed=routed))
        if self.now >= operation.due and (left or restart):
            words = f"{instance.name} is not drained: {left}" if left else "its pod was not deleted"
            return late(operation, words)
        if last := last_serving(side, instance, self.serving, serves=status.served):
            return self._waits(operation, last)
        if not left and not restart:
            words = f"{instance.name} is drained. It stays out of the rotation until this operation is deleted"
            return Outcome(OperationPhase.SUCCEEDED, Reason.SUCCEEDED, words)
        if not left:
            return Outcome(
                OperationPhase.RESTARTING, Reason.RESTARTING, f"{instance.name} is drained, and its pod is replaced"
            )
        timeout_s = side.observed.pool.spec.drain_timeout_seconds
        if restart and self.now >= deadline(status.started_at or operation.metadata.creation_timestamp, timeout_s):
            words = f"{instance.name} was not drained after {timeout_s} s, and its pod is replaced: {left}"
            return Outcome(OperationPhase.RESTARTING, Reason.RESTARTING, words)
        return Outcome(OperationPhase.DRAINING, Reason.DRAINING, f"{instance.name} finishes its requests: {left}")

    def _restarting(self, operation: PoolOperation, side: PoolSide, instance: ObservedInstance) -> Outcome:
        status, pod = operation.status, instance.pod
        due = self._deed(operation, instance) is not None
        if due and (last := last_serving(side, instance, self.serving, serves=status.served)):
            return self._waits(operation, last)
        waits = "its pod was not deleted" if due else _not_back(instance, routed=side.observed.routed)
        if not waits and pod is not None:
            words = f"{instance.name} runs as another pod, and is back in the rotation"
            if not side.observed.routed:
                words = f"{instance.name} runs as another pod, which is Ready"
            return Outcome(OperationPhase.SUCCEEDED, Reason.SUCCEEDED, words)
        if self.now >= operation.due:
            return late(operation, waits)
        words = f"The pod of {instance.name} is replaced" if due else f"Waits for {instance.name}: {waits}"
        return Outcome(OperationPhase.RESTARTING, Reason.RESTARTING, words)

    def _before_purge(self, operation: PoolOperation, side: PoolSide, instance: ObservedInstance) -> Outcome:
        if not engine_of(side.observed.pool.spec.engine.type).has_connector(side.observed.pool):
            words = (
                f"The engines of {side} have a connector of their own (transfer.connector is Native), which cannot end "
                f"single hand-offs; restart {instance.name} if it does not recover"
            )
            return failed(Reason.PURGE_REFUSED, words)
        if self.now >= operation.due:
            return late(operation, "the operator did not run")
        words = f"{instance.name} ends its hand-offs that are older than {operation.older_than_s} s"
        return Outcome(OperationPhase.PURGING, Reason.PURGING, words)

    def _purging(self, operation: PoolOperation, instance: ObservedInstance) -> Outcome:
        meta, started = operation.metadata, operation.status.started_at
        order = PurgeOrder(operation.older_than_s, started or meta.creation_timestamp, f"PoolOperation {meta.name}")
        progress = purge_progress(order, instance, self.purged.get(meta.uid, ()), self.now)
        if progress.refused:
            return replace(failed(Reason.PURGE_REFUSED, progress.refused), ended=progress.ended)
        if not progress.waits:
            words = f"{instance.name} has ended {_handoffs(progress.ended)} older than {operation.older_than_s} s"
            return Outcome(OperationPhase.SUCCEEDED, Reason.SUCCEEDED, words, ended=progress.ended)
        if self.now >= operation.due:
            return replace(late(operation, f"{instance.name}: {progress.waits}"), ended=progress.ended)
        words = f"Waits for {instance.name}: {progress.waits}"
        return Outcome(OperationPhase.PURGING, Reason.PURGING, words, progress.send)

    def _waits(self, operation: PoolOperation, words: str) -> Outcome:
        if self.now >= operation.due:
            return late(operation, words)
        return Outcome(OperationPhase.PENDING, Reason.WAITING, f"Waits: {words}")

    def _deed(self, operation: PoolOperation, instance: ObservedInstance) -> Delete | None:
        """Return the deletion that the status intends, while the pod is still there."""
        pod = instance.pod
        if pod is None or pod.terminating or pod.uid != operation.status.pod_uid:
            return None
        given_up = self.side is not None and work_left(instance, routed=self.side.observed.routed)
        return Delete("Pod", pod.name, pod.uid, GIVEN_UP_GRACE_S if given_up else None)

    def _status(self, operation: PoolOperation, outcome: Outcome, instance: ObservedInstance | None) -> OperationStatus:
        before, phase = operation.status, outcome.phase
        changes = changes_of(operation, outcome, self.now)
        if outcome.ended is not None:
            changes["purged"] = outcome.ended
        if phase is OperationPhase.PENDING:
            changes |= {"started_at": None, "instance_uid": "", "pod_uid": "", "served": False}
        elif before.phase is OperationPhase.PENDING and phase is OperationPhase.PURGING and instance is not None:
            changes |= {"started_at": self.now, "instance_uid": instance.uid}
        elif before.phase is OperationPhase.PENDING and phase is OperationPhase.DRAINING and instance is not None:
            changes |= {"started_at": self.now, "instance_uid": instance.uid}
            changes["served"] = self.side is not None and instance.index in self.side.serving
            if operation.spec.type is OperationType.RESTART and instance.pod is not None:
                changes["pod_uid"] = instance.pod.uid
        return before.model_copy(update=changes)


def _handoffs(count: int) -> str:
    return f"{count} hand-off{'' if count == 1 else 's'}"


def _not_back(instance: ObservedInstance, *, routed: bool) -> str:
    """Return why the instance is not back in the rotation after its pod was deleted. Empty if it is."""
    pod = instance.pod
    if pod is None:
        return "it has no pod yet" + (f": {instance.create_error}" if instance.create_error else "")
    if pod.terminating:
        return f"the old pod {pod.name} still terminates"
    if not pod.ready:
        why = pod.unschedulable or pod.waiting_reason
        return f"its new pod is not Ready{f': {why}' if why else ''}"
    if not routed:
        return ""
    if instance.listed_by is None:
        return "a router did not return its worker list"
    return "" if instance.listed_by else "no router lists it yet"
