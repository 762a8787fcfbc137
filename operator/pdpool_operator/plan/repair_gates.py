"""Which repair an instance at fault gets next, and the gates before it. Pure.

The rungs, the mildest first. A rung that does not help is followed by the next one:

    Purge     It is Stuck, and its connector answers. Hand-offs that are older than stuckAfterSeconds are ended, so that
              routers try the requests elsewhere. It disturbs nothing that moves. Each pod is purged at most once an
              hour. If it has ended any, the next rung waits until SETTLES after it. A hung engine does not report the
              ages of its queues, so only the purge itself shows whether there are any.

    Restart   Its pod is deleted, and Kubernetes creates it again.

    Replace   The restarted pod is at fault within an hour, on the same node. It is deleted, and the new pod prefers
              other nodes for an hour. A pod that fails on two nodes is not the fault of one of them. An instance of
              an earlier spec is not replaced, because its template cannot be changed alone.

Gates, in this order. The first one that is closed gives the reason. Repair stops at those with a star:

    mode          spec.repair.mode is Enforce

    helped *      within an hour, the instance of this index was not restarted on another node, and not replaced

    breaker *     at most one instance of the pool is at fault, or at most a third of them

    last serving  another instance of the pool serves, or this one was seen to finish nothing

    budget *      fewer than restartsPerHour restarts and replacements in the service within an hour

    cooldown      none of both in the service within COOLDOWN. Intents that waited for a verdict keep to it as well

A purge takes nothing out of service. It has only the gates of mode and breaker. Its own budget and cooldown never stop
repair. While another purge of the service settles, the instance waits. After MAX_PURGES within an hour in the service,
its next rung is the restart.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..api.base import format_time
from ..api.pools import RepairAction, RepairRecord, RepairState
from ..api.reasons import Reason
from ..api.services import RepairMode, RepairSpec
from .repair_model import AssessedInstance, Health, is_recent

COOLDOWN = timedelta(seconds=60)
"""A restarted engine must show whether it helps before the next one is restarted."""
SETTLES = timedelta(seconds=10)
"""Time of three samples: after it, the verdict shows whether a purge has helped."""
MAX_PURGES = 32
"""Within an hour, in both pools of a service. It bounds the records in the status."""
WAITS_AT_MOST = timedelta(minutes=10)
"""How long an intended restart or replacement waits for what it needs: a verdict, or its StatefulSet."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed gate."""

    words: str
    stops: Reason | None = None
    """Reason of the stop, if only a person can open the gate soon."""


class Gates:
    """The gates of one pool at one moment. `intend` closes those that a new intent closes."""

    def __init__(
        self,
        spec: RepairSpec,
        instances: Sequence[AssessedInstance],
        records: Collection[RepairRecord],
        partners: Collection[RepairRecord],
        now: datetime,
    ) -> None:
        self._spec, self._instances, self._now = spec, instances, now
        made = [r for r in (*records, *partners) if r.state is not RepairState.PROPOSED and is_recent(r, now)]
        self._restarts = [record.since for record in made if record.action is not RepairAction.PURGE]
        self._deeds = [r.since for r in made if r.action is not RepairAction.PURGE and r.state is RepairState.DONE]
        """When pods were deleted for repair."""
        if any(self._is_carried_out(record) for record in records):
            self._deeds.append(now)
        self._purges = [record.since for record in made if record.action is RepairAction.PURGE]
        self._last = {
            record.index: record
            for record in sorted(records, key=lambda record: record.since)
            if record.state is RepairState.DONE and record.action is not RepairAction.PURGE and is_recent(record, now)
        }
        """The last restart or replacement of each index."""

    @property
    def remaining(self) -> int:
        """Restarts that the budget still allows."""
        return max(self._spec.restarts_per_hour - len(self._restarts), 0)

    def intend(self, action: RepairAction) -> None:
        """Count a repair that is now intended."""
        (self._purges if action is RepairAction.PURGE else self._restarts).append(self._now)

    def may_delete(self) -> bool:
        """Return whether a pod may be deleted now, and count it if so. Several intents may have waited for verdicts."""
        if any(self._now - at < COOLDOWN for at in self._deeds):
            return False
        self._deeds.append(self._now)
        return True

    def rung(self, instance: AssessedInstance, purges: Mapping[str, RepairRecord]) -> RepairAction | None:
        """Return the next repair of an instance at fault. None while a purge goes on or settles.

        Args:
            instance: The instance.
            purges: Purges of the pool that were intended within an hour, by UID of the pod.
        """
        purge = purges.get(instance.pod_uid)
        if purge is not None and (purge.state is RepairState.INTENDED or self._settles(purge)):
            return None
        if purge is not None or not instance.purgeable or len(self._purges) >= MAX_PURGES:
            return self._renewal(instance)
        if any(self._now - at < SETTLES for at in self._purges):
            return None
        return RepairAction.PURGE

    def closed(self, action: RepairAction, instance: AssessedInstance) -> Closed | None:
        """Return the first closed gate; None if all are open."""
        if self._spec.mode is not RepairMode.ENFORCE:
            return Closed("spec.repair.mode of the service is not Enforce")
        if action is RepairAction.PURGE:
            return self._breaker()
        if (useless := self._helped(action, instance)) is not None:
            return useless
        if (unsafe := self._breaker() or self._last_serving(instance)) is not None:
            return unsafe
        if len(self._restarts) >= self._spec.restarts_per_hour:
            words = f"the budget of {self._spec.restarts_per_hour} restarts an hour is spent"
            return Closed(words, Reason.REPAIR_BUDGET_SPENT)
        if any(self._now - at < COOLDOWN for at in self._restarts):
            return Closed(f"another instance of the service was restarted within {COOLDOWN.seconds} s")
        return None

    def forbids(self, record: RepairRecord, instance: AssessedInstance) -> str:
        """Return why an intended repair is not to be made; empty if it still is, or no verdict says."""
        late = self._now - record.since > WAITS_AT_MOST
        if self._spec.mode is not RepairMode.ENFORCE:
            return "spec.repair.mode of the service is no longer Enforce"
        if instance.health is Health.WELL:
            return "it has recovered"
        if instance.health is Health.UNKNOWN:
            return "there was no verdict for 10 minutes" if late else ""
        if late and record.action is RepairAction.REPLACE and instance.avoids_node != record.node:
            return "its StatefulSet could not be changed within 10 minutes"
        unsafe = self._breaker()
        if unsafe is None and record.action is not RepairAction.PURGE:
            unsafe = self._last_serving(instance)
        return unsafe.words if unsafe is not None else ""

    def _is_carried_out(self, record: RepairRecord) -> bool:
        """Whether the pod of an intended restart or replacement is gone, or terminates."""
        if record.state is not RepairState.INTENDED or record.action is RepairAction.PURGE:
            return False
        return all(one.terminating for one in self._instances if one.pod_uid == record.pod_uid)

    def _renewal(self, instance: AssessedInstance) -> RepairAction:
        """Return whether the pod is to be restarted or replaced."""
        last = self._last.get(instance.index)
        if last is None:
            return RepairAction.RESTART
        same_node = bool(last.node) and last.node == instance.node
        return RepairAction.REPLACE if same_node and instance.movable else last.action

    def _helped(self, action: RepairAction, instance: AssessedInstance) -> Closed | None:
        last = self._last.get(instance.index)
        if last is None or (action is RepairAction.REPLACE and last.action is RepairAction.RESTART):
            return None
        at, where = format_time(last.since), f" on {instance.node}" if instance.node else ""
        if last.action is RepairAction.RESTART:
            words = f"its restart at {at} did not help, and it is at fault again{where}"
            return Closed(words, Reason.RESTART_DID_NOT_HELP)
        words = f"its replacement at {at} did not help, and it is at fault again{where}"
        return Closed(words, Reason.REPLACEMENT_DID_NOT_HELP)

    def _settles(self, purge: RepairRecord) -> bool:
        return purge.state is RepairState.DONE and self._now - purge.since < SETTLES

    def _breaker(self) -> Closed | None:
        at_fault = sum(one.health is Health.AT_FAULT for one in self._instances)
        if at_fault <= max(1, len(self._instances) // 3):
            return None
        words = f"{at_fault} of {len(self._instances)} instances are at fault at once, so the cause may lie elsewhere"
        return Closed(words, Reason.MANY_AT_FAULT)

    def _last_serving(self, instance: AssessedInstance) -> Closed | None:
        others = any(one.serves for one in self._instances if one is not instance)
        return None if others or instance.useless else Closed("no other instance of the pool serves")
