"""A plan as data.

The controller carries its fields out in order: adopt, verify, apply, patch, delete, workers, events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..api.key_epochs import FIRST_EPOCH
from ..api.names import Role
from ..api.reasons import Reason


class EventType(StrEnum):
    """Type of a Kubernetes event."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Event:
    """An event for the user, about the reconciled object."""

    type: EventType
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Fault:
    """An error that blocks planning or applying. It becomes the reason and message of `Ready=False`."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The current activity of the plan. `Ready=False` and `Reconciling=True` show it."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Patch:
    """A JSON merge patch. It carries `metadata.uid`, so that it cannot change a later object of the same name."""

    kind: str
    name: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Adopt:
    """Make the planned pool or service the controller of an object that carries its labels and has no controller."""

    kind: str
    name: str
    uid: str
    owner: Mapping[str, Any]
    """The owner reference."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete one object, with a UID precondition. Dependents are deleted in the background."""

    kind: str
    name: str
    uid: str
    grace_period_s: int | None = None
    """`None` means the grace period of the object itself."""


class WorkerAction(StrEnum):
    """Action on an entry of a router's worker list."""

    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """One change of one router replica's worker list.

    Changes of one router are made in order, and each kind is awaited before the next. Changes after additions wait
    until the additions show.
    """

    router: str
    """Name of the router pod."""
    router_ip: str
    action: WorkerAction
    url: str
    role: Role
    key_epoch: int = FIRST_EPOCH
    """Epoch of the key that the router accepts."""
    bootstrap_port: int | None = None
    worker_id: str = ""
    """The router's id of the entry. For removals."""


@dataclass(frozen=True, slots=True)
class ContainerEnded:
    """Proof: the kubelet reported that this run of a container is terminated."""

    pod_uid: str
    container_id: str

    def __str__(self) -> str:
        return f"container {self.container_id}"


@dataclass(frozen=True, slots=True)
class NodeOff:
    """Proof: the node is switched off or erased."""

    node: str
    declared_by: str
    """1 to 256 characters."""

    def __str__(self) -> str:
        return f"node {self.node}, declared off by {self.declared_by}"


HoldKey = tuple[str, int, str]
"""UID of the holder's pod, rank, incarnation of the process: one hold."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Send one rank of an engine the proof that a process has ended, so that it may reuse the memory held for it."""

    pod: str
    pod_uid: str
    ip: str
    rank: int
    incarnation: str
    """The process that has ended."""
    peer: str
    """Name of the ended process's pod."""
    proof: ContainerEnded | NodeOff
    key_epoch: int
    """Epoch of the operator's key that the engine trusts."""

    @property
    def hold_key(self) -> HoldKey:
        """The hold that it ends."""
        return self.pod_uid, self.rank, self.incarnation


@dataclass(frozen=True, slots=True)
class Purge:
    """Have one rank of an engine end the hand-offs that it opened long ago."""

    pod_uid: str
    ip: str
    rank: int
    older_than_s: float
    """Age in seconds. 0 ends every hand-off."""
    reason: str
    """1 to 256 characters. The peers receive it too."""
    key_epoch: int
    """Epoch of the operator's key that the engine trusts."""


@dataclass(frozen=True, slots=True)
class Purged:
    """What a rank answered to a purge: `outcome` is `given`, `refused` or `unanswered`.

    `words` are the connector's refusal, or why there was no usable answer.
    """

    purge: Purge
    outcome: str
    count: int = 0
    """Hand-offs that the rank has ended."""
    words: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The next safe actions. Empty if the goal is reached."""

    verify: tuple[dict[str, Any], ...] = ()
    """Objects whose server-side dry-run apply must succeed before the rest of the plan. A refusal becomes
    TemplateInvalid.
    """
    apply: tuple[dict[str, Any], ...] = ()
    """Complete objects for server-side apply."""
    adopt: tuple[Adopt, ...] = ()
    patch: tuple[Patch, ...] = ()
    delete: tuple[Delete, ...] = ()
    put_back: tuple[Patch, ...] = ()
    """Replaces `patch` and `delete` if an object is refused: drained instances return to service."""
    workers: tuple[WorkerChange, ...] = ()
    events: tuple[Event, ...] = ()
    faults: tuple[Fault, ...] = ()
    progress: Progress | None = None
    """`None` means that nothing is left to do."""
    surplus: tuple[str, ...] = ()
    """Names of the instances that are to be removed, in that order. All others are wanted."""
    stops_serving: str = ""
    """Announcement that the only instance that serves will be drained, with the time. Empty if it will not."""
    same_build: tuple[str, ...] = ()
    """Names of the instances whose pod was built from another spec, but as the current spec says."""
    update_available: tuple[str, ...] = ()
    """Workloads that another version of the builders made from the current spec. They are left unchanged."""
    requeue_after_s: float | None = None
    """Reconcile again after this time even if nothing changes in the cluster."""

    @property
    def needs_live_state(self) -> bool:
        """Whether the plan has steps that cannot be undone, or that begin such a step."""
        return bool(self.adopt or self.patch or self.delete)

    @property
    def acts(self) -> bool:
        """Whether the plan changes anything."""
        return bool(self.adopt or self.apply or self.patch or self.delete or self.workers)


def join(plans: Sequence[Plan]) -> Plan:
    """Merge the steps of plans that only verify, apply, patch and delete: the first progress, the earliest requeue."""
    requeues = [plan.requeue_after_s for plan in plans if plan.requeue_after_s is not None]
    return Plan(
        verify=tuple(obj for plan in plans for obj in plan.verify),
        apply=tuple(obj for plan in plans for obj in plan.apply),
        patch=tuple(patch for plan in plans for patch in plan.patch),
        delete=tuple(deletion for plan in plans for deletion in plan.delete),
        events=tuple(event for plan in plans for event in plan.events),
        progress=next((plan.progress for plan in plans if plan.progress is not None), None),
        requeue_after_s=min(requeues, default=None),
    )
