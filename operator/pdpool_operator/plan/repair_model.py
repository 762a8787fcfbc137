"""Input and output of the planner of repairs, as data."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from ..api.pools import RepairAction, RepairRecord, RepairState
from ..api.reasons import Reason
from .model import Delete, Event, Purge

WINDOW = timedelta(hours=1)
"""Repairs that are older no longer count."""


class Health(StrEnum):
    """What the verdict on an instance means for repair."""

    WELL = "well"
    AT_FAULT = "at fault"
    UNKNOWN = "unknown"
    """No verdict that a decision could rest on, for example after the operator's start."""


@dataclass(frozen=True, slots=True)
class AssessedInstance:
    """One instance with a pod, as repair sees it."""

    index: int
    pod: str
    pod_uid: str
    terminating: bool
    health: Health
    serves: bool
    useless: bool = False
    """It was seen to finish nothing."""
    purgeable: bool = False
    """It is Stuck, and a connector of it answers. A purge can end its old hand-offs."""
    node: str = ""
    """Node of the pod. Empty if it has none yet."""
    movable: bool = True
    """It runs the current spec. Another template would give an earlier one the current spec, out of turn."""
    avoids_node: str = ""
    """Node that the next pod of the instance avoids. Empty if there is none."""
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """Why repair has stopped at an instance at fault. A person must act."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class RepairEvent:
    """An event about one repair."""

    action: RepairAction
    event: Event


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """What to store in the status, and what to do now."""

    records: tuple[RepairRecord, ...] = ()
    purges: tuple[Purge, ...] = ()
    restarts: tuple[Delete, ...] = ()
    """Deeds whose intent was read from the status, as are the purges."""
    repair_events: tuple[RepairEvent, ...] = ()
    intends: bool = False
    """A record is new as Intended: write the status at once, then reconcile again."""
    settling: bool = False
    """A purge was made, and soon shows whether it has helped."""
    remaining: int = 0
    """Restarts that the budget still allows."""
    stops: tuple[Stop, ...] = ()
    """One for each instance at which repair has stopped."""

    @property
    def acts(self) -> bool:
        """Whether the plan must rest on live state."""
        return self.intends or bool(self.purges or self.restarts)

    @property
    def events(self) -> tuple[Event, ...]:
        """The events, without the repairs that they are about."""
        return tuple(one.event for one in self.repair_events)


def is_recent(record: RepairRecord, now: datetime) -> bool:
    """Whether a repair still counts."""
    return now - record.since < WINDOW


def avoided_nodes(records: Iterable[RepairRecord], now: datetime) -> dict[int, str]:
    """Return the nodes that pods avoid, by index of the instance: those of replaced pods, for an hour."""
    return {
        record.index: record.node
        for record in sorted(records, key=lambda record: record.since)
        if record.action is RepairAction.REPLACE
        and (record.state is RepairState.INTENDED or (record.state is RepairState.DONE and is_recent(record, now)))
    }


def purges_under_way(records: Iterable[RepairRecord]) -> dict[str, RepairRecord]:
    """Return the intended purges, by UID of the pod."""
    return {
        record.pod_uid: record
        for record in records
        if record.action is RepairAction.PURGE and record.state is RepairState.INTENDED
    }
