"""Writes what a reconcile has found onto the object: its status, once and only if it has changed, and its events."""

from collections.abc import Callable, Iterable
from datetime import datetime

from ..api.base import Condition
from ..api.reasons import ConditionType, Reason
from ..observe.keys import Key
from ..plan.model import Event, EventType
from ..runtime.api import Api
from ..runtime.metrics import Metrics
from ..runtime.recorder import Recorder
from ..runtime.resources import Object, Resource
from ..status.chain import ConditionWriter
from ..status.summary import refused
from ..status.transition import REFRESH, Status, differ, should_write, transition_events
from .served_fields import ServedFields


class Reporter:
    """Its only state: when each status was written."""

    def __init__(
        self, api: Api, served: ServedFields, recorder: Recorder, metrics: Metrics, now: Callable[[], datetime]
    ) -> None:
        self._api, self._served, self._recorder, self._metrics, self._now = api, served, recorder, metrics, now
        self._written: dict[Key, datetime] = {}

    async def write_status(
        self, key: Key, resource: Resource, body: Object, before: Status, after: Status
    ) -> float | None:
        """Write the status once, if it has changed. Return the seconds after which to write the rest."""
        storable = self._served.storable(resource.kind, after.to_dict())
        after = type(after).model_validate(storable)  # as it will be read back
        self._metrics.states.show_conditions(key, after.conditions)
        if "status" in body and not should_write(before, after, self._written.get(key), self._now()):
            return REFRESH.total_seconds() if differ(before, after) else None
        await self._apply_status(key, resource, body, storable)
        return None

    async def record_events(
        self, resource: Resource, body: Object, events: Iterable[Event], before: Status, after: Status
    ) -> None:
        """Record events, and those that the change of the status is."""
        for event in (*events, *transition_events(before.conditions, after.conditions)):
            await self._recorder.emit(resource, body, str(event.type), str(event.reason), event.message)

    async def refuse(self, key: Key, resource: Resource, body: Object, reason: Reason, message: str) -> None:
        """Write why an object cannot be reconciled. The other fields of its status keep their values."""
        live = body.get("status") or {}
        generation = int(body["metadata"].get("generation", 0))
        before = tuple(_readable(live.get("conditions") or ()))
        conditions = refused(ConditionWriter(before, generation, self._now()), reason, message)
        self._metrics.states.show_conditions(key, conditions)
        shown = {(c.type, c.status, c.reason, c.observed_generation) for c in before if c.type in set(ConditionType)}
        if shown == {(c.type, c.status, c.reason, c.observed_generation) for c in conditions}:
            return
        status = {**live, "observedGeneration": generation, "conditions": [c.to_dict() for c in conditions]}
        await self._apply_status(key, resource, body, self._served.storable(resource.kind, status))
        await self._recorder.emit(resource, body, str(EventType.WARNING), str(reason), message)

    def forget(self, key: Key) -> None:
        """Forget an object that does not exist any more."""
        self._metrics.states.drop(key)
        self._written.pop(key, None)

    async def _apply_status(self, key: Key, resource: Resource, body: Object, status: Object) -> None:
        try:
            await self._api.apply_status(resource, body, status)
        except Exception:
            self._metrics.status_writes.labels(resource.kind, "failed").inc()
            raise
        self._metrics.status_writes.labels(resource.kind, "ok").inc()
        self._written[key] = self._now()


def _readable(conditions: Iterable[Object]) -> Iterable[Condition]:
    """Return the conditions that this version of the operator understands."""
    for condition in conditions:
        try:
            yield Condition.model_validate(condition)
        except ValueError:
            continue
