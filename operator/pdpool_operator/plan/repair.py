"""Decides how instances at fault are repaired. Pure, and total: each instance at fault gets one record.

`repair_gates` says which repair comes next, and when it may be made. The intent is written to the pool's status before
the deed, and the deed is made only from a status that was read back:

    at fault, a gate is closed   -> Proposed    Nothing is done. The message names the gate. Repair has *stopped* if
                                                that gate needs a person.

    at fault, all gates open     -> Intended    The next reconcile reads this record. It sends the purge to the pod's
                                                ranks, or deletes the pod by its UID.

    Intended, deed is done       -> Done        Restart, Replace: the pod is gone. Purge: each rank that answers has
                                                done it, or PURGE_WITHIN is over, and hand-offs were ended.

    Intended, no longer allowed  -> Withdrawn   Also a purge that ends nothing. The next repair follows at once.

A replacement is made once the StatefulSet has the node that the new pod avoids. `pool` sees to that while the record
says so: from its intent, until an hour after the deed.

So an operator that is killed at any step neither repeats nor forgets a restart. The deed is due while the UID exists,
and done when the UID is gone or terminates. Each UID is restarted at most once. A purge may be sent again, which does
no harm: see `purge`.

An intended repair counts from the moment it is written, also if it is withdrawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType

from ..api.pools import RepairAction, RepairRecord, RepairState
from ..api.reasons import Reason
from ..api.services import RepairMode, RepairSpec
from .model import Delete, Event, EventType, Purge
from .purge import PurgeProgress
from .repair_gates import Closed, Gates
from .repair_model import AssessedInstance, Health, RepairEvent, RepairPlan, Stop, is_recent

GRACE_S = 5
"""Termination grace period: nothing moves in an instance at fault that could be finished."""
PURGE_WITHIN = timedelta(seconds=15)
"""How long a purge is sent again to ranks that do not answer it."""
NOTHING_OLD = "none of its hand-offs is old enough"
MAX_MESSAGE = 1000
VERB = {RepairAction.PURGE: "purge", RepairAction.RESTART: "restart", RepairAction.REPLACE: "replace"}
PARTICIPLE = {RepairAction.PURGE: "purged", RepairAction.RESTART: "restarted", RepairAction.REPLACE: "replaced"}


def plan_repair(
    spec: RepairSpec,
    instances: Sequence[AssessedInstance],
    records: Sequence[RepairRecord],
    partners: Sequence[RepairRecord],
    now: datetime,
    progress: Mapping[str, PurgeProgress] = MappingProxyType({}),
) -> RepairPlan:
    """Return the next records and deeds of one pool.

    Args:
        spec: Of the services that bind the pool.
        instances: All instances of the pool that have a pod.
        records: As the pool's status was read.
        partners: Records of the other pools of the same services.
        now: The present time.
        progress: Of the intended purges, by UID of the pod.
    """
    now = now.replace(microsecond=0)
    gates = Gates(spec, instances, records, partners, now)
    steps = [_advance(record, _find(instances, record), gates, progress, now) for record in records]
    kept = [step.record for step in steps if step.record is not None]
    repair_events = [step.event for step in steps if step.event is not None]
    restarted = {
        one.pod_uid for one in kept if one.action is not RepairAction.PURGE and one.state is not RepairState.WITHDRAWN
    }
    purges = {one.pod_uid: one for one in kept if one.action is RepairAction.PURGE}
    before = {one.pod_uid: one for one in records if one.state is RepairState.PROPOSED}
    found: list[_Proposal] = []
    settling = False
    for instance in instances:
        if instance.health is not Health.AT_FAULT or instance.terminating or instance.pod_uid in restarted:
            continue
        action = gates.rung(instance, purges)
        settling |= action is None
        if action is not None and spec.mode is not RepairMode.OFF:
            found.append(_propose(action, instance, gates, before.get(instance.pod_uid), now))
    new = [one.record for one in found]
    return RepairPlan(
        records=tuple(sorted([*kept, *new], key=lambda record: (record.since, record.index))),
        purges=tuple(purge for step in steps for purge in step.purges),
        restarts=tuple(step.delete for step in steps if step.delete is not None),
        repair_events=(*repair_events, *(one.event for one in found if one.event is not None)),
        intends=any(record.state is RepairState.INTENDED for record in new),
        settling=settling,
        remaining=gates.remaining,
        stops=tuple(one.stop for one in found if one.stop is not None),
    )


@dataclass(frozen=True, slots=True)
class _Advance:
    """What becomes of a stored record."""

    record: RepairRecord | None = None
    """`None` if it is not kept."""
    delete: Delete | None = None
    purges: tuple[Purge, ...] = ()
    event: RepairEvent | None = None


@dataclass(frozen=True, slots=True)
class _Proposal:
    """The record of an instance at fault that has none yet but a proposal."""

    record: RepairRecord
    stop: Stop | None = None
    event: RepairEvent | None = None


def _find(instances: Sequence[AssessedInstance], record: RepairRecord) -> AssessedInstance | None:
    return next((one for one in instances if one.pod_uid == record.pod_uid), None)


def _advance(
    record: RepairRecord,
    instance: AssessedInstance | None,
    gates: Gates,
    progress: Mapping[str, PurgeProgress],
    now: datetime,
) -> _Advance:
    if record.state is RepairState.PROPOSED:
        return _Advance()  # it is proposed again while its reason holds
    if record.state is not RepairState.INTENDED:
        restarts = record.action is not RepairAction.PURGE and record.state is RepairState.DONE
        return _Advance(record if is_recent(record, now) or (restarts and instance is not None) else None)
    if record.action is RepairAction.PURGE:
        return _advance_purge(record, instance, gates, progress.get(record.pod_uid), now)
    if instance is None or instance.terminating:
        what = f"{PARTICIPLE[record.action].capitalize()} instance {record.index}"
        away = f", away from {record.node}" if record.action is RepairAction.REPLACE else ""
        return _done(record, f"{what}{away}: {record.message}", record.message, now)
    if why := gates.forbids(record, instance):
        return _withdrawn(record, why, now)
    prepared = record.action is not RepairAction.REPLACE or instance.avoids_node == record.node
    if instance.health is Health.UNKNOWN or not prepared or not gates.may_delete():
        return _Advance(record)
    return _Advance(record, Delete("Pod", instance.pod, instance.pod_uid, GRACE_S))


def _advance_purge(
    record: RepairRecord, instance: AssessedInstance | None, gates: Gates, progress: PurgeProgress | None, now: datetime
) -> _Advance:
    if instance is None or instance.terminating or progress is None:
        return _withdrawn(record, "its pod has ended", now)
    why = gates.forbids(record, instance)
    left = progress.refused or progress.waits
    over = why or progress.refused or not progress.send or now - record.since > PURGE_WITHIN
    if over and progress.ended:
        words = f"Ended {progress.ended} hand-off{'' if progress.ended == 1 else 's'}{f', but {left}' if left else ''}"
        told = f"Purged instance {record.index}: {words}. {record.message}"
        return _done(record, told, f"{words}. {record.message}", now)
    if over:
        return _withdrawn(record, why or left or NOTHING_OLD, now)
    return _Advance(record, purges=progress.send if instance.health is Health.AT_FAULT else ())


def _done(record: RepairRecord, told: str, message: str, now: datetime) -> _Advance:
    changes = {"state": RepairState.DONE, "since": now, "message": message[:MAX_MESSAGE]}
    event = Event(EventType.WARNING, Reason.REPAIR_DONE, told)
    return _Advance(record.model_copy(update=changes), event=RepairEvent(record.action, event))


def _withdrawn(record: RepairRecord, why: str, now: datetime) -> _Advance:
    changes = {"state": RepairState.WITHDRAWN, "since": now, "message": why[:MAX_MESSAGE]}
    message = f"Did not {VERB[record.action]} instance {record.index}: {why}"
    event = Event(EventType.NORMAL, Reason.REPAIR_WITHDRAWN, message)
    return _Advance(record.model_copy(update=changes), event=RepairEvent(record.action, event))


def _propose(
    action: RepairAction, instance: AssessedInstance, gates: Gates, before: RepairRecord | None, now: datetime
) -> _Proposal:
    closed = gates.closed(action, instance)
    if closed is None:
        gates.intend(action)
        return _Proposal(_record(action, instance, RepairState.INTENDED, now, instance.evidence))
    since = before.since if before is not None else now
    message = f"Not {PARTICIPLE[action]}: {closed.words}. {instance.evidence}"
    record = _record(action, instance, RepairState.PROPOSED, since, message)
    event = None
    if before is None:
        words = f"Would {VERB[action]} instance {instance.index}, but {closed.words}. {instance.evidence}"
        event = RepairEvent(action, Event(EventType.WARNING, Reason.REPAIR_PROPOSED, words))
    return _Proposal(record, _stop(action, instance, closed), event)


def _stop(action: RepairAction, instance: AssessedInstance, closed: Closed) -> Stop | None:
    if closed.stops is None:
        return None
    words = f"Instance {instance.index} is not {PARTICIPLE[action]}: {closed.words}. {instance.evidence}"
    return Stop(closed.stops, words)


def _record(
    action: RepairAction, instance: AssessedInstance, state: RepairState, since: datetime, message: str
) -> RepairRecord:
    return RepairRecord(
        index=instance.index,
        pod_uid=instance.pod_uid,
        action=action,
        node=instance.node,
        state=state,
        since=since,
        message=message[:MAX_MESSAGE],
    )
