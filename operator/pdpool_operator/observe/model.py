"""What was observed, as plain frozen data: the input of diagnosis, planning and status. What could not be seen is
`None`, never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..api.models import DisaggregatedService, Pool
from ..api.names import Role

CRASH_LOOP = "CrashLoopBackOff"
"""Kubernetes' word for a container that waits to be started again."""


@dataclass(frozen=True, slots=True)
class QueueSample:
    """One hand-off queue of one rank at one moment."""

    reqs: int
    oldest_s: float | None
    """Age of the oldest request in seconds; `None` when the queue is empty or its source does not say."""
    moved_total: int | None
    """Requests that went on from the queue since the incarnation began, without those that ended in it; `None` when its
    source does not say.
    """


@dataclass(frozen=True, slots=True)
class HoldSample:
    """A process of the other side that may still touch memory, which a connector therefore keeps back."""

    incarnation: str
    pod_uid: str
    """Of that process, as it said itself when they were paired; empty if it did not say."""
    container: str
    """One run of one container, as that process knows it; another text for each run. Empty if it did not say."""


@dataclass(frozen=True, slots=True)
class PodLife:
    """What the kubelet has said of the runs of a pod's engine container that have ended."""

    name: str
    container_id: str
    """Of the run that ended last."""
    over: bool
    """There will be no other run in this pod."""


@dataclass(frozen=True, slots=True)
class ConnectorSample:
    """Answer of the admin endpoint of one rank's connector, `GET :9400+rank/v1/state`. It answers also while the
    engine's loop is frozen.
    """

    incarnation: str
    beat_age_s: float | None
    """Seconds since the engine's scheduler loop last ran; `None` when the engine does not report that."""
    queues: Mapping[str, QueueSample]
    ranks: int = 1
    """How many the instance has, this one among them."""
    holds: int = 0
    """Hand-offs whose memory is kept back until their writers are proved quiet."""
    held_bytes: int = 0
    held_oldest_s: float | None = None
    """Age of the oldest hold in seconds; `None` when nothing is held."""
    held_for: tuple[HoldSample, ...] = ()
    pod_uid: str = ""
    """As the connector itself says it."""
    container: str = ""
    """The run of the container that it is in, as in `HoldSample`."""


@dataclass(frozen=True, slots=True)
class EngineSample:
    """Answer of the engine's scheduler, `GET :30000/v1/loads`."""

    running: int
    waiting: int
    queues: Mapping[str, int]
    """Lengths of the hand-off queues, by the same names as the connector's."""


@dataclass(frozen=True, slots=True)
class RankSample:
    """One look at one rank. Each of the two sources is known or `None`, with the reason beside it."""

    rank: int
    pod_uid: str
    at: datetime
    """When the answer arrived, by the operator's clock."""
    asked_at: datetime
    """When it was asked."""
    connector: ConnectorSample | None
    engine: EngineSample | None
    connector_error: str = ""
    """Why `connector` is None: `timeout`, `refused`, `http 503`, …"""
    engine_error: str = ""
    """Why `engine` is None; empty when the engine answered and counts the requests of this rank at another one, as for
    the ranks that share a scheduler.
    """


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """One pod of an instance."""

    name: str
    uid: str
    ip: str | None
    phase: str
    """Pending, Running, Succeeded, Failed or Unknown."""
    ready: bool
    """The pod's Ready condition is True."""
    terminating: bool
    spec_hash: str
    """Annotations of the pod, empty when absent."""
    build_hash: str
    created_at: datetime
    node: str = ""
    was_ready: bool = False
    """It is not Ready, and has been: before a restart of its containers, or of this operator, as well."""
    gone_by: datetime | None = None
    """When a pod that terminates was to be gone: its grace period is over then. `None` while it is to stay."""
    restarts: int = 0
    """Restarts of all containers together."""
    waiting_container: str = ""
    """The first container that keeps ending, or else that waits, init containers first."""
    waiting_reason: str = ""
    """What it waits for: ImagePullBackOff, CreateContainerConfigError, CrashLoopBackOff, …"""
    waiting_message: str = ""
    last_end: str = ""
    """How the last run of that container ended, in one line; empty if it had none."""
    unschedulable: str = ""
    """Message of the condition PodScheduled while it is False."""
    warnings: tuple[str, ...] = ()
    """Messages of the newest Warning events about a pod that is not Ready, newest first, at most five (FailedMount,
    …).
    """


@dataclass(frozen=True, slots=True)
class FieldOwners:
    """Who set which fields of an object, as `managedFields` says (fieldsV1); those of the status aside."""

    ours: Mapping[str, Any] = field(default_factory=dict)
    """What we have applied, less what others have changed since."""
    others: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class ObservedInstance:
    """One StatefulSet with its pod."""

    index: int
    name: str
    uid: str
    controller_uid: str
    """UID of the controlling owner reference, empty when there is none."""
    deleting: bool
    spec_hash: str
    build_hash: str
    replicas: int
    """`spec.replicas` of the StatefulSet."""
    drain_started: datetime | None
    drain_reason: str
    """Value of the annotation, empty when absent."""
    pod: ObservedPod | None
    create_error: str = ""
    """Message of the newest FailedCreate event of the StatefulSet while it has no pod."""
    listed_by: tuple[str, ...] | None = ()
    """Names of the router pods whose worker list holds this instance's URL; `None` when some router could not be
    asked.
    """
    ranks: Mapping[int, RankSample] = field(default_factory=dict)
    """Newest sample of each rank of the present pod; a rank that is absent was never seen."""
    controller: str = ""
    """The controlling owner as `kind/name`, empty when there is none."""
    owners: FieldOwners = FieldOwners()


@dataclass(frozen=True, slots=True)
class ObservedObject:
    """An object that we make and that is not an instance: Service, PodDisruptionBudget, ConfigMap, Secret,
    Deployment.
    """

    kind: str
    name: str
    uid: str
    controller_uid: str
    build_hash: str
    controller: str = ""
    """The controlling owner as `kind/name`."""
    owners: FieldOwners = FieldOwners()


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """Everything that bears on one pool."""

    pool: Pool
    instances: tuple[ObservedInstance, ...]
    """All StatefulSets that carry the pool's labels or one of its names, by index."""
    objects: tuple[ObservedObject, ...]
    """Service and PodDisruptionBudget by the pool's names, whoever owns them."""
    stuck_after_s: float = 30.0
    """From the service that binds the pool, else the default."""
    others_have_keys: bool = True
    """Every engine pod of the other role in the namespace was made with keys for the control channel."""


@dataclass(frozen=True, slots=True)
class RouterWorker:
    """One entry of a router's `GET /workers`."""

    id: str
    url: str
    role: Role
    bootstrap_port: int | None


@dataclass(frozen=True, slots=True)
class ObservedRouter:
    """One router pod with its worker list."""

    pod: ObservedPod
    workers: tuple[RouterWorker, ...] | None
    """`None`: it could not be asked."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ObservedDeployment:
    """The router's Deployment."""

    name: str
    uid: str
    controller_uid: str
    spec_hash: str
    build_hash: str
    replicas: int
    """`spec.replicas`."""
    ready_replicas: int
    updated_replicas: int
    generation: int
    observed_generation: int
    failure: str = ""
    """Message of the condition ReplicaFailure while it is True."""
    controller: str = ""
    """The controlling owner as `kind/name`."""
    owners: FieldOwners = FieldOwners()


@dataclass(frozen=True, slots=True)
class ObservedService:
    """Everything that bears on one `DisaggregatedService`."""

    service: DisaggregatedService
    prefill: ObservedPool | None
    """`None`: there is no such pool."""
    decode: ObservedPool | None
    deployment: ObservedDeployment | None
    objects: tuple[ObservedObject, ...]
    """Service, PodDisruptionBudget, ConfigMap and Secret by the router's names. Of Secrets, which the operator may
    write but not read, the runtime reports those that it applied itself since the last resync.
    """
    routers: tuple[ObservedRouter, ...]
    workers_json: str | None = None
    """Content of the ConfigMap's `workers.json`; `None` when there is no ConfigMap."""
