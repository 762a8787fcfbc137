"""Decides the next step of a `PoolOperation` of type Fence, which declares that a node is off. Pure, and total.

    Pending      Nothing is done. The node is looked at.

    Fencing      The processes in the status have ended. Each engine that holds memory for one of them is about to
                 receive the proof, or has.

    Succeeded    No engine of the namespace holds memory for a process of the node.

    Failed       Refused, or the deadline has passed.

A node is off if two independent statements say so, so that neither a wrong name nor a right in one namespace alone
releases memory:

    the operation names it

    and the cluster has no Node of that name; or the Node has the taint `node.kubernetes.io/out-of-service`, and its
    condition Ready is Unknown

A process has ended if its pod was started on the node, and if an engine named it before the Node was found to be off.
The answer that names it must have arrived before the Node was asked for. A process that starts after the node is back
is only in later answers.

The processes are in the status before a fence for one of them is sent. An operator that is killed meanwhile is followed
by one that continues with the same processes, also if the node is back. A fence may be sent twice, which does no harm.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..api.operations import MAX_PROCESSES, OperationPhase, OperationStatus, PoolOperation
from ..api.reasons import Reason
from ..engines.answers import MAX_HOLDS
from ..observe.model import CRASH_LOOP, ObservedNode, ObservedPod
from ..observe.samples import RankSample
from .held import held_by
from .model import Fence, HoldKey, NodeOff
from .operation_step import Outcome, Step, changes_of, event_of, failed, late, shortened
from .ranks import ranks_of, silence

UNKNOWN_AFTER = timedelta(seconds=30)
"""How long a pod's node must have been unknown before the operation fails. The history of pods is read meanwhile."""


@dataclass(frozen=True, slots=True)
class FenceFacts:
    """What is known of the engines in the namespace of an operation. It was read before the Node."""

    holders: tuple[ObservedPod, ...]
    """All engine pods of the namespace that have a connector."""
    looks: Mapping[str, Mapping[int, RankSample]]
    """The newest sample of each rank of every pod, by UID."""
    node_of: Callable[[str], str | None]
    """Returns the node of the pod with this UID. None if it is not known."""
    followed_since: datetime
    """When this operator first saw the operation."""
    refused: Mapping[HoldKey, str]
    """Holds whose fence was refused, with the connector's words."""


def plan_fence(operation: PoolOperation, facts: FenceFacts, node: ObservedNode, now: datetime) -> Step:
    """Return the next step of an operation of type Fence that has not ended.

    Args:
        operation: The operation.
        facts: What is known of the engines.
        node: The node, asked for after `facts` were read.
        now: The present time.
    """
    return _Planner(operation, facts, node, now.replace(microsecond=0)).step()


class _Planner:
    """One call of the planner."""

    def __init__(self, operation: PoolOperation, facts: FenceFacts, node: ObservedNode, now: datetime) -> None:
        self.operation, self.facts, self.node, self.now = operation, facts, node, now
        self.all = tuple(held_by(facts.holders, facts.looks))
        self.holds = tuple(one for one in self.all if facts.node_of(one.process.pod_uid) == operation.node)
        self.unknown = tuple(one for one in self.all if facts.node_of(one.process.pod_uid) is None)

    def step(self) -> Step:
        operation = self.operation
        pending = operation.status.phase is OperationPhase.PENDING
        outcome = self._pending() if pending else self._fencing()
        fences = () if outcome.phase.finished else tuple(self._fences())
        return Step(operation, self._status(outcome), fences=fences, event=event_of(operation, outcome))

    def _pending(self) -> Outcome:
        if refusal := self._refusal():
            return refusal
        if self.now >= self.operation.due:
            return late(self.operation, "the operator did not run")
        words = f"{self.node.off}: engines release the memory that they hold for its processes"
        return Outcome(OperationPhase.FENCING, Reason.FENCING, words)

    def _refusal(self) -> Outcome | None:
        if self.node.forbidden:
            words = f"The operator may not read the Node {self.node.name}; grant it with rbac.nodes of the chart"
            return failed(Reason.NODE_UNREADABLE, words)
        if self.node.in_service:
            return failed(Reason.NODE_IN_SERVICE, self.node.in_service)
        return None

    def _fencing(self) -> Outcome:
        node, waits = self.operation.node, [*self._silent(), *map(str, self.holds), *self._cut_off()]
        if not waits and not self.unknown:
            words = f"No engine in {self.operation.metadata.namespace} holds memory for a process of {node}"
            count = len(self.operation.status.processes)
            more = f"; it was released for {count} process{'' if count == 1 else 'es'}" if count else ""
            return Outcome(OperationPhase.SUCCEEDED, Reason.SUCCEEDED, words + more)
        if outcome := self._hopeless():
            return outcome
        words = shortened(waits + [f"{one}, of which the node is not known" for one in self.unknown])
        if self.now >= self.operation.due:
            return late(self.operation, words)
        return Outcome(OperationPhase.FENCING, Reason.FENCING, f"Waits for {words}")

    def _hopeless(self) -> Outcome | None:
        """Return how the operation fails if nothing that is left will change."""
        if any(self._silent()):
            return None
        if self.holds:
            return self._stays()
        if not self.unknown:  # only ranks of which not all was read
            return None
        if self.now - self.facts.followed_since < UNKNOWN_AFTER:
            return None
        words = f"Not released, as the operator does not know where the pod ran: {shortened([*map(str, self.unknown)])}"
        return failed(Reason.PEERS_UNKNOWN, f"{words}. If it ran on {self.operation.node}, restart the holder")

    def _stays(self) -> Outcome | None:
        """Return how the operation fails if no engine will release any of the memory."""
        ended = set(self._processes())
        refused = [one for one in self.holds if one.hold_key in self.facts.refused]
        # The node is back, and these processes were first seen afterwards.
        later = [one for one in self.holds if self.node.in_service and one.process.incarnation not in ended]
        if {one.hold_key for one in (*refused, *later)} != {one.hold_key for one in self.holds}:
            return None
        if refused:
            words = shortened([f"{one}: {self.facts.refused[one.hold_key]}" for one in refused])
            return failed(Reason.FENCE_REFUSED, f"Refused by {words}")
        words = f"{self.node.in_service}. These processes may run: {shortened([*map(str, later)])}"
        return failed(Reason.NODE_IN_SERVICE, words)

    def _fences(self) -> Iterator[Fence]:
        """Yield the fences that the status intends, as it was read."""
        meta, meant = self.operation.metadata, set(self.operation.status.processes)
        proof = NodeOff(self.operation.node, f"PoolOperation {meta.namespace}/{meta.name}"[:256])
        for one in self.holds:
            if one.process.incarnation in meant and one.hold_key not in self.facts.refused:
                yield one.fence(f"node {self.operation.node}", proof)

    def _processes(self) -> tuple[str, ...]:
        """Return the processes that have ended: those in the status, and those that the node is off after."""
        meant = list(self.operation.status.processes)
        if self.node.off:
            ended = {one.process.incarnation for one in self.holds if one.sample.at <= self.node.asked_at}
            meant += sorted(ended - set(meant))
        return tuple(meant[:MAX_PROCESSES])

    def _silent(self) -> Iterator[str]:
        """Yield the ranks that may hold memory and have not answered since the operation began."""
        # The status has whole seconds, rounded down.
        started = (self.operation.status.started_at or self.now) + timedelta(seconds=1)
        for pod in self.facts.holders:
            if pod.node == self.operation.node or not _may_hold(pod):
                continue
            samples = self.facts.looks.get(pod.uid, {})
            for rank in ranks_of(samples):
                why = silence(rank, pod, samples)
                if why or samples[rank].asked_at < started:
                    yield f"{pod.name} rank {rank}, which {why or 'has not answered yet'}"

    def _cut_off(self) -> Iterator[str]:
        """Yield the ranks that may hold memory for more processes than are read. Those of the node may come last."""
        for pod in self.facts.holders:
            for rank, sample in self.facts.looks.get(pod.uid, {}).items():
                if sample.connector is not None and len(sample.connector.held_for) >= MAX_HOLDS:
                    words = f"may hold memory for more than the {MAX_HOLDS} processes that are read"
                    yield f"{pod.name} rank {rank}, which {words}"

    def _status(self, outcome: Outcome) -> OperationStatus:
        before, changes = self.operation.status, changes_of(self.operation, outcome, self.now)
        if outcome.phase is OperationPhase.FENCING:
            changes["processes"] = self._processes()
        if before.phase is OperationPhase.PENDING and outcome.phase is OperationPhase.FENCING:
            changes["started_at"] = self.now
        if before.phase is OperationPhase.FENCING:
            held = {one.process.incarnation for one in self.all}
            changes["released"] = sum(process not in held for process in before.processes)
        return before.model_copy(update=changes)


def _may_hold(pod: ObservedPod) -> bool:
    """Whether a pod that is silent may hold memory. One that was never Ready got no requests."""
    return pod.phase == "Running" and pod.waiting_reason != CRASH_LOOP and (pod.ready or pod.was_ready)
