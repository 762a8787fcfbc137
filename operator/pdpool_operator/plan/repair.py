"""Decides which instances at fault are restarted. Pure, and total: each instance at fault gets one record.

The intent is written to the pool's status before the deed, and the deed is made only from a status that was read back:

    at fault, a gate is closed   -> Proposed    Nothing is done. The message names the gate. Repair has *stopped* if
                                                that gate needs a person.

    at fault, all gates open     -> Intended    The next reconcile reads this record, and deletes the pod by its UID.

    Intended, pod is gone        -> Done

    Intended, no longer allowed  -> Withdrawn

So an operator that is killed at any step neither repeats nor forgets a restart. The deed is due while the UID exists,
and done when the UID is gone or terminates. Each UID is restarted at most once.

Gates, in this order. The first one that is closed gives the reason. Repair stops at those with a star:

    mode          spec.repair.mode is Enforce

    helped *      no restart of the instance of this index within an hour

    breaker *     at most one instance of the pool is at fault, or at most a third of them

    last serving  another instance of the pool serves, or this one was seen to finish nothing

    budget *      fewer than restartsPerHour restarts in the service within an hour

    cooldown      no restart in the service within COOLDOWN

An intended restart counts as a restart from the moment it is written, also if it is withdrawn.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from ..api.base import format_time
from ..api.pools import RepairRecord, RepairState
from ..api.reasons import Reason
from ..api.services import RepairMode, RepairSpec
from .model import Delete, Event, EventType

WINDOW = timedelta(hours=1)
"""Restarts that are older no longer count."""
COOLDOWN = timedelta(seconds=60)
"""A restarted engine must show whether it helps before the next one is restarted."""
GRACE_S = 5
"""Termination grace period: nothing moves in an instance at fault that could be finished."""
WAITS_AT_MOST = timedelta(minutes=10)
"""How long an intended restart waits for a verdict, after the operator was restarted."""
MAX_MESSAGE = 1000


class Health(StrEnum):
    """What the verdict on an instance means for repair."""

    WELL = "well"
    AT_FAULT = "at fault"
    UNKNOWN = "unknown"
    """No verdict that a decision could rest on, for example after the operator's start."""


@dataclass(frozen=True, slots=True)
class Patient:
    """One instance with a pod, as repair sees it."""

    index: int
    pod: str
    pod_uid: str
    terminating: bool
    health: Health
    serves: bool
    useless: bool = False
    """It was seen to finish nothing."""
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """Why repair has stopped at an instance at fault. A person must act."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """What to store in the status, and what to do now."""

    records: tuple[RepairRecord, ...] = ()
    restarts: tuple[Delete, ...] = ()
    """Deeds whose intent was read from the status."""
    events: tuple[Event, ...] = ()
    intends: bool = False
    """A record is new as Intended: write the status at once, then reconcile again."""
    remaining: int = 0
    """Restarts that the budget still allows."""
    stops: tuple[Stop, ...] = ()
    """One for each instance at which repair has stopped."""

    @property
    def acts(self) -> bool:
        """Whether the plan must rest on live state."""
        return self.intends or bool(self.restarts)


def plan_repair(
    spec: RepairSpec,
    patients: Sequence[Patient],
    records: Sequence[RepairRecord],
    partners: Sequence[RepairRecord],
    now: datetime,
) -> RepairPlan:
    """Return the next records and deeds of one pool.

    Args:
        spec: Of the services that bind the pool.
        patients: All instances of the pool that have a pod.
        records: As the pool's status was read.
        partners: Records of the other pools of the same services.
        now: The present time.
    """
    now = now.replace(microsecond=0)
    step = _Step(spec, patients, records, partners, now)
    kept: list[RepairRecord] = []
    restarts: list[Delete] = []
    events: list[Event] = []
    for record in records:
        after, delete, told = step.advance(record)
        kept += [after] if after else []
        restarts += [delete] if delete else []
        events += told
    handled = {record.pod_uid for record in kept if record.state is not RepairState.WITHDRAWN}
    before = {record.pod_uid: record for record in records if record.state is RepairState.PROPOSED}
    new: list[RepairRecord] = []
    for patient in patients:
        if patient.health is Health.AT_FAULT and not patient.terminating and patient.pod_uid not in handled:
            proposed, told = step.propose(patient, before.get(patient.pod_uid))
            new += [proposed] if proposed else []
            events += told
    intends = any(record.state is RepairState.INTENDED for record in new)
    remaining = max(spec.restarts_per_hour - len(step.counted), 0)
    order = sorted([*kept, *new], key=lambda record: (record.since, record.index))
    return RepairPlan(tuple(order), tuple(restarts), tuple(events), intends, remaining, tuple(step.stops))


@dataclass(frozen=True, slots=True)
class _Closed:
    """A closed gate."""

    words: str
    stops: Reason | None = None
    """Reason of the stop, if only a person can open the gate soon."""


class _Step:
    """One call of the planner."""

    def __init__(
        self,
        spec: RepairSpec,
        patients: Sequence[Patient],
        records: Collection[RepairRecord],
        partners: Collection[RepairRecord],
        now: datetime,
    ) -> None:
        self.spec, self.now = spec, now
        self.patients = {patient.pod_uid: patient for patient in patients}
        recent = [record for record in (*records, *partners) if self._recent(record)]
        self.counted = [record.since for record in recent if record.state is not RepairState.PROPOSED]
        self.restarted = {
            record.index: record.since
            for record in sorted(records, key=lambda record: record.since)
            if record.state is RepairState.DONE and self._recent(record)
        }
        """When the instance of each index was last restarted."""
        self.stops: list[Stop] = []

    def advance(self, record: RepairRecord) -> tuple[RepairRecord | None, Delete | None, list[Event]]:
        """Return what becomes of a stored record: the record to keep, the deed, events."""
        patient = self.patients.get(record.pod_uid)
        if record.state is RepairState.PROPOSED:
            return None, None, []  # proposed anew while its reason holds
        if record.state is not RepairState.INTENDED:
            there = patient is not None and record.state is RepairState.DONE
            return (record if there or self._recent(record) else None), None, []
        if patient is None or patient.terminating:
            done = record.model_copy(update={"state": RepairState.DONE, "since": self.now})
            message = f"Restarted instance {record.index}: {record.message}"
            return done, None, [Event(EventType.WARNING, Reason.REPAIR_DONE, message)]
        if why := self._withdrawn(patient, record):
            gone = record.model_copy(update={"state": RepairState.WITHDRAWN, "since": self.now, "message": why})
            message = f"Did not restart instance {record.index}: {why}"
            return gone, None, [Event(EventType.NORMAL, Reason.REPAIR_WITHDRAWN, message)]
        if patient.health is Health.UNKNOWN:
            return record, None, []
        return record, Delete("Pod", patient.pod, patient.pod_uid, GRACE_S), []

    def propose(self, patient: Patient, before: RepairRecord | None) -> tuple[RepairRecord | None, list[Event]]:
        """Return the record of an instance at fault that has none yet but a proposal."""
        if self.spec.mode is RepairMode.OFF:
            return None, []
        closed = self._closed(patient)
        if closed is None:
            self.counted.append(self.now)
            return self._record(patient, RepairState.INTENDED, self.now, patient.evidence), []
        since = before.since if before is not None else self.now
        if closed.stops is not None:
            message = f"Instance {patient.index} is not restarted: {closed.words}. {patient.evidence}"
            self.stops.append(Stop(closed.stops, message))
        record = self._record(
            patient, RepairState.PROPOSED, since, f"Not restarted: {closed.words}. {patient.evidence}"
        )
        if before is not None:
            return record, []
        message = f"Would restart instance {patient.index}, but {closed.words}. {patient.evidence}"
        return record, [Event(EventType.WARNING, Reason.REPAIR_PROPOSED, message)]

    def _closed(self, patient: Patient) -> _Closed | None:
        """Return the first closed gate; None if all are open."""
        if self.spec.mode is not RepairMode.ENFORCE:
            return _Closed("spec.repair.mode of the service is not Enforce")
        if (at := self.restarted.get(patient.index)) is not None:
            words = f"its restart at {format_time(at)} did not help, and it is at fault again"
            return _Closed(words, Reason.RESTART_DID_NOT_HELP)
        if (unsafe := self._unsafe(patient)) is not None:
            return unsafe
        if len(self.counted) >= self.spec.restarts_per_hour:
            words = f"the budget of {self.spec.restarts_per_hour} restarts an hour is spent"
            return _Closed(words, Reason.REPAIR_BUDGET_SPENT)
        if any(self.now - at < COOLDOWN for at in self.counted):
            return _Closed(f"another instance of the service was restarted within {COOLDOWN.seconds} s")
        return None

    def _unsafe(self, patient: Patient) -> _Closed | None:
        """Return why the pool forbids the restart, whatever the budget."""
        sick = sum(one.health is Health.AT_FAULT for one in self.patients.values())
        if sick > max(1, len(self.patients) // 3):
            words = f"{sick} of {len(self.patients)} instances are at fault at once, so the cause may lie elsewhere"
            return _Closed(words, Reason.MANY_AT_FAULT)
        others = any(one.serves for one in self.patients.values() if one is not patient)
        if not others and not patient.useless:
            return _Closed("no other instance of the pool serves")
        return None

    def _withdrawn(self, patient: Patient, record: RepairRecord) -> str:
        """Return why an intended restart is not to be made; empty if it still is, or no verdict says."""
        if self.spec.mode is not RepairMode.ENFORCE:
            return "spec.repair.mode of the service is no longer Enforce"
        if patient.health is Health.WELL:
            return "it has recovered"
        if patient.health is Health.UNKNOWN:
            return "there was no verdict for 10 minutes" if self.now - record.since > WAITS_AT_MOST else ""
        unsafe = self._unsafe(patient)
        return unsafe.words if unsafe is not None else ""

    def _recent(self, record: RepairRecord) -> bool:
        return self.now - record.since < WINDOW

    def _record(self, patient: Patient, state: RepairState, since: datetime, message: str) -> RepairRecord:
        return RepairRecord(
            index=patient.index,
            pod_uid=patient.pod_uid,
            state=state,
            since=since,
            message=message[:MAX_MESSAGE],
        )
