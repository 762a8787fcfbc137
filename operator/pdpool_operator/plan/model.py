"""A plan as data. The runtime carries out its parts in the order of the fields: verify, apply, patch, delete, workers,
then events.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..api.names import Role
from ..api.reasons import Reason


class DrainReason(StrEnum):
    """Why an instance is taken out of service. Value of the annotation `pdpool.dev/drain-reason`."""

    SCALE_DOWN = "ScaleDown"
    UPDATE = "Update"


class EventType(StrEnum):
    """Type of a Kubernetes event."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Event:
    """Something to tell the user, about the object that is reconciled."""

    type: EventType
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Fault:
    """Why nothing can be planned or applied: becomes the reason and message of `Ready=False`."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Progress:
    """What the plan is in the middle of: becomes the reason and message of `Progressing=True`."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Patch:
    """A JSON merge patch. It carries `metadata.uid`, so that it cannot hit a successor of the same name."""

    kind: str
    name: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete one object, with a UID precondition; dependents go in the background."""

    kind: str
    name: str
    uid: str
    grace_period_s: int | None = None
    """`None`: what the object says itself."""


class WorkerAction(StrEnum):
    """What to do with an entry of a router's worker list."""

    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """One change of one router replica's worker list. Changes of one router are made in order, each kind awaited before
    the next; what follows additions is left undone while they do not show.
    """

    router: str
    """Name of the router pod."""
    router_ip: str
    action: WorkerAction
    url: str
    role: Role
    bootstrap_port: int | None = None
    worker_id: str = ""
    """The router's id of the entry, for removals."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Tell one rank of an engine that a process runs no more, so that it may use again what it holds for it."""

    pod: str
    pod_uid: str
    ip: str
    rank: int
    incarnation: str
    """The process that has ended."""
    peer: str
    """Name of its pod."""
    peer_uid: str
    container_id: str
    """The run of a container by whose end it is proved."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The next safe actions. Empty on the goal state."""

    verify: tuple[dict[str, Any], ...] = ()
    """Objects whose server-side dry-run apply must succeed before anything else of the plan is done; a refusal becomes
    TemplateInvalid.
    """
    apply: tuple[dict[str, Any], ...] = ()
    """Objects for server-side apply, whole."""
    patch: tuple[Patch, ...] = ()
    delete: tuple[Delete, ...] = ()
    put_back: tuple[Patch, ...] = ()
    """Instead of `patch` and `delete` when something is refused: who was taken out of service for them serves again."""
    workers: tuple[WorkerChange, ...] = ()
    events: tuple[Event, ...] = ()
    faults: tuple[Fault, ...] = ()
    progress: Progress | None = None
    """`None`: nothing is left to do."""
    update_available: tuple[str, ...] = ()
    """Workloads made from the current spec by another version of the builders. They are left alone."""
    requeue_after_s: float | None = None
    """Look again after this time even if nothing changes in the cluster."""

    @property
    def acts(self) -> bool:
        """Whether carrying it out changes anything."""
        return bool(self.apply or self.patch or self.delete or self.workers)
