"""Chooses which instances of a pool stay, which go, and which are missing. Pure.

Each instance has its own StatefulSet, so any of them can go. Indexes may have gaps: `spec.replicas` is a count. A new
instance gets the lowest free index. Instances go in the order of `Turn`, and at the same turn the highest index first.
The order of an update is the same.

*Surge*: a pool with one instance is updated by a second one. While the old instance serves and no instance of the
current spec does, the pool has one instance more. It ends when the new one serves. It also ends when the cluster has no
room for the new one beside the old one. Then the old one goes first.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Final

from ..api import names
from ..api.pools import Pool, Surge
from ..observe.model import DrainReason, ObservedInstance
from .drain import has_work_to_lose

AT_FAULT: Final = frozenset({"Stuck", "Failing"})
"""Verdicts by which an instance goes before its siblings, although its pod is Ready."""

ROOM_WITHIN = timedelta(seconds=60)
"""Time within which the cluster must find room for a second instance."""

NEVER_ROOM = ("node(s) didn't match Pod's node affinity", "node(s) had untolerated taint", "node(s) were unschedulable")
"""Causes for which a node refuses a pod, also once the old instance has left it."""


class Turn(IntEnum):
    """When an instance goes. A lower turn goes first."""

    REMOVING = 0
    """It drains because it is surplus. A drain under way is not moved to another instance."""
    UPDATING = 1
    """It drains because it runs an earlier spec. It is out of service already."""
    UNSCHEDULED = 2
    """It has no pod, or its pod has no node."""
    IDLE = 3
    """It cannot serve and has no requests."""
    UNREADY = 4
    """It is not Ready, or an operation keeps it out of the rotation, but it may have requests."""
    FAULTY = 5
    """It is Ready, and its verdict is one of `AT_FAULT`."""
    OUTDATED = 6
    """It serves, and runs an earlier spec."""
    SERVING = 7
    AWAITED = 8
    """The update waits for it to replace the only instance."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The instances of a pool by what is to become of them. Instances that are being deleted are left out."""

    kept: tuple[ObservedInstance, ...]
    surplus: tuple[ObservedInstance, ...]
    """In the order in which they go."""
    missing: tuple[int, ...]
    """Indexes of the instances to create."""
    surge: bool
    """The pool may have one instance more than `spec.replicas`."""
    awaited: ObservedInstance | None
    """The new instance that has no room beside the old one."""


@dataclass(frozen=True, slots=True)
class Selector:
    """Selects for one pool at one moment.

    Args:
        pool: the pool.
        spec_hash: hash of its current spec.
        build_hashes: hash of what the builders render from it now, by index. Empty if the template is invalid.
        at_fault: indexes of the instances whose verdict is one of `AT_FAULT`.
        now: the present time.
    """

    pool: Pool
    spec_hash: str
    build_hashes: Mapping[int, str]
    at_fault: Collection[int]
    now: datetime

    def outdated(self, instance: ObservedInstance) -> bool:
        """Whether the instance's pod was built from another spec. Without a pod, its StatefulSet counts.

        A pod is not outdated if the current spec renders the same pod. Its StatefulSet is then applied with the current
        spec's hash, and shows this also to an operator that renders pods in another way.
        """
        made = instance.pod if instance.pod is not None else instance
        if made.spec_hash == self.spec_hash:
            return False
        same = {self.build_hashes.get(instance.index)}
        if instance.spec_hash == self.spec_hash:
            same.add(instance.build_hash)
        return not made.build_hash or made.build_hash not in same

    def serves(self, instance: ObservedInstance) -> bool:
        """Whether the instance is available, and not at fault."""
        return available(instance) and instance.index not in self.at_fault

    def select(self, instances: Sequence[ObservedInstance]) -> Selection:
        """Select among all instances of the pool."""
        present = [instance for instance in instances if not instance.deleting]
        replicas, awaited = self.pool.spec.replicas, self._awaited(present)
        surge = awaited is None and self._only_the_old_serve(present)
        ranked = sorted(present, key=lambda instance: self._key(instance, awaited))
        removing = sum(self._turn(instance) is Turn.REMOVING for instance in present)
        excess = max(len(present) - replicas - surge, min(removing, len(present) - replicas), 0)
        surplus, kept = ranked[:excess], ranked[excess:]
        missing = names.free_indexes({i.index for i in instances}, replicas + surge - len(kept))
        return Selection(tuple(sorted(kept, key=lambda i: i.index)), tuple(surplus), missing, surge, awaited)

    def in_turn(self, instances: Sequence[ObservedInstance]) -> list[ObservedInstance]:
        """Sort instances by the order in which they go."""
        return sorted(instances, key=lambda instance: self._key(instance, None))

    def no_room_until(self, instance: ObservedInstance) -> datetime | None:
        """Return until when the update waits for room for a new instance; None if it does not lack room.

        Draining the old instance must be able to help. It cannot if no node could ever run the pod.
        """
        pod = instance.pod
        if pod is None:
            return self.now if "exceeded quota" in instance.create_error else None
        full = bool(pod.unschedulable) and not _never_fits(pod.unschedulable)
        attached = any("Multi-Attach error" in warning for warning in pod.warnings)
        return pod.created_at + ROOM_WITHIN if full or attached else None

    def _only_the_old_serve(self, present: Sequence[ObservedInstance]) -> bool:
        if not self._surges or any(self.serves(i) and not self.outdated(i) for i in present):
            return False
        return any(self.outdated(i) and has_work_to_lose(i) and i.drain_started is None for i in present)

    def _awaited(self, present: Sequence[ObservedInstance]) -> ObservedInstance | None:
        """Return the new instance for which there is no room, once the time to find some is over."""
        if not self._surges or not any(self.outdated(i) and has_work_to_lose(i) for i in present):
            return None
        waiting = [
            i for i in present if not self.outdated(i) and (until := self.no_room_until(i)) and until <= self.now
        ]
        return min(waiting, key=lambda i: i.index, default=None)

    @property
    def _surges(self) -> bool:
        return self.pool.spec.replicas == 1 and self.pool.spec.rollout.surge is Surge.AUTO

    def _key(self, instance: ObservedInstance, awaited: ObservedInstance | None) -> tuple[Turn, int]:
        return (Turn.AWAITED if instance is awaited else self._turn(instance)), -instance.index

    def _turn(self, instance: ObservedInstance) -> Turn:
        pod = instance.pod
        if instance.drain_started is not None and instance.drain_reason == DrainReason.SCALE_DOWN:
            return Turn.REMOVING
        if instance.drain_reason == DrainReason.OPERATION:
            return Turn.UNREADY
        if instance.drain_started is not None and self.outdated(instance):
            return Turn.UPDATING
        if pod is None or pod.unschedulable or (pod.phase == "Pending" and not pod.node):
            return Turn.UNSCHEDULED
        if not pod.takes_requests:
            return Turn.UNREADY if has_work_to_lose(instance) else Turn.IDLE
        if instance.index in self.at_fault:
            return Turn.FAULTY
        return Turn.OUTDATED if self.outdated(instance) else Turn.SERVING


def available(instance: ObservedInstance) -> bool:
    """Whether the instance serves: Ready, and not being removed."""
    pod = instance.pod
    if pod is None or instance.deleting or instance.drain_started is not None:
        return False
    return pod.takes_requests


def _never_fits(unschedulable: str) -> bool:
    """Whether every node refuses the pod for a cause that has nothing to do with room.

    The scheduler writes `0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint {a: }. …`.
    """
    causes = unschedulable.partition("nodes are available: ")[2].partition(". ")[0].rstrip(".")
    return bool(causes) and all(cause.strip().partition(" ")[2].startswith(NEVER_ROOM) for cause in causes.split(", "))
