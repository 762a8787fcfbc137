"""Carries out `PoolOperation` objects, as `plan.operation` decides: stores each phase first, and acts on what was read
back."""

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any

from ..api.operations import PoolOperation
from ..diagnose.model import Diagnosis
from ..observe.cluster import OPERATIONS
from ..observe.model import ObservedPool
from ..plan.operation import OperationPlan, Side, Step, plan_operations
from ..runtime.api import PODS, Api
from ..runtime.recorder import Recorder
from ..status.serving import serving
from .served_fields import ServedFields

MESSAGE_EVERY = timedelta(seconds=5)
"""Minimum interval of writes that change only the message: queues change with every sample."""


class Operations:
    """Decides and carries out the operations of one pool after the other."""

    def __init__(self, api: Api, served: ServedFields, recorder: Recorder, now: Callable[[], datetime]) -> None:
        self._api, self._served, self._recorder, self._now = api, served, recorder, now
        self._written: dict[str, datetime] = {}
        """When the status of each operation that has not ended was written, by its UID."""

    def plan(self, observed: ObservedPool, diagnoses: Iterable[Diagnosis]) -> OperationPlan:
        """Return the next steps of the operations on a pool."""
        serve = frozenset(instance.index for instance in serving(observed, diagnoses))
        return plan_operations(observed.operations, Side(observed, serve), self._now())

    def plan_without_pool(self, operations: tuple[PoolOperation, ...], unreadable: str = "") -> OperationPlan:
        """Return the next steps of the operations on a pool that does not exist, or cannot be read."""
        return plan_operations(operations, None, self._now(), unreadable)

    async def carry_out(self, namespace: str, plan: OperationPlan) -> None:
        """Write what has changed, and delete the pods whose deletion is intended.

        Raises:
            ApiError: a call failed. The next reconcile plans again.
        """
        for step in plan.steps:
            await self._write(step)
            if (pod := step.delete) is not None:
                await self._api.delete(PODS, namespace, pod.name, pod.uid, pod.grace_period_s)

    async def _write(self, step: Step) -> None:
        meta, before = step.operation.metadata, step.operation.status
        written = self._written.get(meta.uid)
        due = step.changes_phase or written is None or self._now() - written >= MESSAGE_EVERY
        if before == step.status or not due:
            return
        body: dict[str, Any] = {"metadata": {"name": meta.name, "namespace": meta.namespace, "uid": meta.uid}}
        status = self._served.storable(OPERATIONS.kind, step.status.to_dict())
        await self._api.apply_status(OPERATIONS, body, status)
        self._written[meta.uid] = self._now()
        if step.status.phase.finished:
            del self._written[meta.uid]
        if step.event is not None:
            event = step.event
            await self._recorder.emit(OPERATIONS, body, str(event.type), str(event.reason), event.message)
