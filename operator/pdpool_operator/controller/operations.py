"""Carries out `PoolOperation` objects, as `plan.operation` decides: stores each phase first, and acts on what was read
back.

What ranks have answered to a purge is kept in memory until the operation has ended. An operator that starts meanwhile
asks them again.
"""

import asyncio
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any

from ..api.operations import OperationType, PoolOperation
from ..diagnose.model import Diagnosis
from ..observe.model import ObservedPool
from ..plan.model import Purged
from ..plan.operation import OperationPlan, plan_operations
from ..plan.operation_gates import PoolSide
from ..plan.operation_step import Step
from ..runtime.api import Api
from ..runtime.bounded_map import BoundedMap
from ..runtime.metrics import Metrics
from ..runtime.recorder import Recorder
from ..runtime.resources import OPERATIONS, PODS
from ..status.serving import serving
from .engines import Engines
from .served_fields import ServedFields

MESSAGE_EVERY = timedelta(seconds=5)
"""Minimum interval of writes that change only the message: queues change with every sample."""
REMEMBERED = 4096
"""Operations of which something is remembered. One that is deleted before its end is not reported as ended."""


class Operations:
    """Decides and carries out the operations of one pool after the other."""

    def __init__(
        self,
        api: Api,
        engines: Engines,
        served: ServedFields,
        recorder: Recorder,
        metrics: Metrics,
        now: Callable[[], datetime],
    ) -> None:
        self._api, self._engines, self._served, self._recorder, self._now = api, engines, served, recorder, now
        self._metrics = metrics
        self._written = BoundedMap[str, datetime](REMEMBERED)
        """When the status of each operation that has not ended was written, by its UID."""
        self._purged = BoundedMap[str, dict[tuple[str, int], Purged]](REMEMBERED)
        """The last answer of each rank to each purge that has not ended: by UID of the operation, then of the pod, and
        rank."""

    def plan(self, observed: ObservedPool, diagnoses: Iterable[Diagnosis]) -> OperationPlan:
        """Return the next steps of the operations on a pool."""
        serve = frozenset(instance.index for instance in serving(observed, diagnoses))
        return plan_operations(observed.operations, PoolSide(observed, serve), self._now(), purged=self._answers())

    def plan_without_pool(self, operations: tuple[PoolOperation, ...], unreadable: str = "") -> OperationPlan:
        """Return the next steps of the operations on a pool that does not exist, or cannot be read."""
        return plan_operations(operations, None, self._now(), unreadable)

    async def carry_out(self, namespace: str, plan: OperationPlan) -> None:
        """Write what has changed, delete the pods whose deletion is intended, and send the purges that are intended.

        Raises:
            ApiError: a call failed. The next reconcile plans again.
            NotLeaderError: another operator may be the leader.
        """
        for step in plan.steps:
            await self.write(step)
            if (pod := step.delete) is not None:
                await self._api.delete(PODS, namespace, pod.name, pod.uid, pod.grace_period_s)
            if step.purges:
                answers = await asyncio.gather(*(self._engines.purge(purge) for purge in step.purges))
                last = self._purged.setdefault(step.operation.metadata.uid, {})
                last.update({(one.purge.pod_uid, one.purge.rank): one for one in answers})

    def _answers(self) -> dict[str, tuple[Purged, ...]]:
        return {uid: tuple(last.values()) for uid, last in self._purged.items()}

    async def write(self, step: Step) -> None:
        """Write the status of one operation if it has changed, and its event.

        Raises:
            ApiError: a call failed.
            NotLeaderError: another operator may be the leader.
        """
        meta, before = step.operation.metadata, step.operation.status
        written = self._written.get(meta.uid)
        due = step.must_be_stored or written is None or self._now() - written >= MESSAGE_EVERY
        if before == step.status or not due:
            return
        body: dict[str, Any] = {"metadata": {"name": meta.name, "namespace": meta.namespace, "uid": meta.uid}}
        status = self._served.storable(OPERATIONS.kind, step.status.to_dict())
        await self._api.apply_status(OPERATIONS, body, status)
        self._written[meta.uid] = self._now()
        if step.status.phase.finished:
            del self._written[meta.uid]
            self._purged.pop(meta.uid, None)
            if step.changes_phase:
                self._count_end(step)
        if step.event is not None:
            event = step.event
            await self._recorder.emit(OPERATIONS, body, str(event.type), str(event.reason), event.message)

    def _count_end(self, step: Step) -> None:
        one = step.operation
        on_node = one.spec.type is OperationType.FENCE
        pool, role = ("", "") if on_node else (one.pool_name, str(one.pool_kind.role))
        labels = (one.metadata.namespace, pool, role, one.spec.type.lower(), step.status.phase.lower())
        self._metrics.operations.labels(*labels).inc()
