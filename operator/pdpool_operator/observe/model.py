"""What the cluster shows, as plain frozen data: the input of diagnosis, planning and status.

A value that was not observed is `None`, never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from ..api.key_epochs import FIRST_KEYS, KeyEpochs
from ..api.names import Role
from ..api.operations import PoolOperation
from ..api.pools import Pool
from ..api.services import STUCK_AFTER_S, DisaggregatedService, RepairMode, RepairSpec
from .samples import RankSample

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Kubernetes' taint of a node that a person, or the cloud, declares switched off."""
CRASH_LOOP = "CrashLoopBackOff"
"""Kubernetes' reason for a container that waits for a restart."""


class DrainReason(StrEnum):
    """Reason for a drain. Value of the annotation `pdpool.dev/drain-reason`, except for an operation."""

    SCALE_DOWN = "ScaleDown"
    UPDATE = "Update"
    OPERATION = "Operation"
    """A `PoolOperation` keeps the instance out of the rotation. No annotation says so."""


@dataclass(frozen=True, slots=True)
class PodLife:
    """The kubelet's reports of ended runs of a pod's engine container."""

    name: str
    container_id: str
    """Container id of the run that ended last."""
    over: bool
    """No other run will start in this pod."""


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
    """Annotations of the pod. Empty if absent."""
    build_hash: str
    created_at: datetime
    keys: KeyEpochs = FIRST_KEYS
    """Epochs of its keys, from the annotation."""
    node: str = ""
    ready_since: datetime | None = None
    """When the pod last became Ready. `None` while it is not Ready."""
    node_silent: bool = False
    """The node controller marked the pod as not Ready, because the node's kubelet does not report. The containers were
    ready when the kubelet last reported.
    """
    was_ready: bool = False
    """The pod is not Ready but was before. A restart of its containers or of this operator does not change that."""
    gone_by: datetime | None = None
    """When the grace period of a terminating pod is over. `None` if the pod does not terminate."""
    keeps_ending: bool = False
    """A container has failed again and again, and waits for its next run, or runs and is not ready yet."""
    waiting_container: str = ""
    """The first container that keeps ending, or else the first that waits. Init containers come first."""
    waiting_reason: str = ""
    """Reason of its wait: ImagePullBackOff, CreateContainerConfigError, CrashLoopBackOff, …"""
    waiting_message: str = ""
    last_end: str = ""
    """How the last run of that container ended, in one line. Empty if there was none."""
    unschedulable: str = ""
    """Message of the condition PodScheduled while it is False."""
    warnings: tuple[str, ...] = ()
    """Messages of Warning events about a pod that is not Ready (FailedMount, …): newest first, at most five."""
    labelled_reachable: str = ""
    """A router's label of that name. Empty if absent."""

    @property
    def takes_requests(self) -> bool:
        """Whether Kubernetes sends requests to it."""
        return self.ready and not self.terminating

    @property
    def ended(self) -> bool:
        """Whether its containers have ended for good."""
        return self.phase in {"Succeeded", "Failed"}


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """What the API server says of a node, and when it was asked."""

    name: str
    asked_at: datetime
    """Time of the request. Later changes are not in it."""
    exists: bool = True
    ready: str = ""
    """Status of the condition Ready: `True` or `False` as the kubelet reports, `Unknown` while it does not report."""
    out_of_service: bool = False
    """It has the taint `node.kubernetes.io/out-of-service`."""
    forbidden: bool = False
    """The operator may not read Nodes, so nothing else is known."""

    @property
    def off(self) -> str:
        """Why the node counts as off. Empty if it does not."""
        if self.forbidden:
            return ""
        if not self.exists:
            return f"There is no Node {self.name}"
        silent = self.out_of_service and self.ready == "Unknown"
        return f"The Node {self.name} is out of service, and its kubelet is silent" if silent else ""

    @property
    def in_service(self) -> str:
        """Why it does not count as off. Empty if it does, or if nothing is known."""
        if self.off or self.forbidden:
            return ""
        if self.ready != "Unknown":
            return (
                f"The kubelet of the Node {self.name} reports (Ready is {self.ready or 'absent'}), so the node is not "
                "off. The API server shows this for up to a minute after a node is switched off"
            )
        return (
            f"The Node {self.name} lacks the taint {OUT_OF_SERVICE}. Once the node is switched off, run: "
            f"kubectl taint nodes {self.name} {OUT_OF_SERVICE}=nodeshutdown:NoExecute"
        )


@dataclass(frozen=True, slots=True)
class FieldOwners:
    """Managers that set fields of an object, from `managedFields` (fieldsV1). Status fields are left out."""

    ours: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the operator has applied, without those that others have changed since."""
    others: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class ObservedInstance:
    """One StatefulSet with its pod."""

    index: int
    name: str
    uid: str
    controller_uid: str
    """UID of the controlling owner reference. Empty if there is none."""
    deleting: bool
    spec_hash: str
    build_hash: str
    replicas: int
    """`spec.replicas` of the StatefulSet."""
    drain_started: datetime | None
    drain_reason: str
    """Value of the annotation. Empty if absent. `Operation` if only a `PoolOperation` drains the instance."""
    pod: ObservedPod | None
    drain_seen: datetime | None = None
    """When this process first saw the present drain, by its own clock. `None` if it has not."""
    create_error: str = ""
    """Why the StatefulSet has no pod: its newest FailedCreate event, or a pod that occupies the name."""
    listed_by: tuple[str, ...] | None = ()
    """Names of the router pods whose worker list has this instance's URL. `None` if a router did not answer."""
    ranks: Mapping[int, RankSample] = field(default_factory=dict)
    """Newest sample of each rank of the present pod. A rank that was never sampled is absent."""
    controller: str = ""
    """The controlling owner as `kind/name`. Empty if there is none."""
    owners: FieldOwners = FieldOwners()
    out: bool = False
    """The instance is Failing, Stuck, unfit or avoided, so routers must not list it while a sibling serves."""
    leaked: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Requests that engines keep in their queues although the hand-offs have ended, by rank and queue."""
    kept_out_by: str = ""
    """Name of the `PoolOperation` that keeps the instance out of the rotation. Empty if none does."""
    labels: Mapping[str, str] | None = None
    """`None` if they were not observed."""
    labelled: bool = False
    """It carries the labels of its pool. Without a controller it then belongs to the pool."""
    avoids_node: str = ""
    """Node that its next pod avoids. Empty if there is none."""

    def belongs_to(self, uid: str) -> bool:
        """Whether the pool of this UID controls the instance, or may adopt it."""
        return self.controller_uid == uid or (not self.controller_uid and self.labelled)


@dataclass(frozen=True, slots=True)
class ObservedObject:
    """An object that the operator creates other than an instance: Service, PodDisruptionBudget, ConfigMap, Secret,
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
    labels: Mapping[str, str] | None = None
    """`None` if they were not observed, as of a Secret."""
    labelled: bool = False
    """It carries the labels of its pool or service. Without a controller it may be adopted."""


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """All observations about one pool."""

    pool: Pool
    instances: tuple[ObservedInstance, ...]
    """All StatefulSets that the pool owns, that carry its labels, or that occupy a name that it needs, by index."""
    objects: tuple[ObservedObject, ...]
    """Service and PodDisruptionBudget with the pool's names, regardless of their owner."""
    repair: RepairSpec = field(default_factory=lambda: RepairSpec(mode=RepairMode.OFF))
    """Of the services that bind the pool: the most cautious one."""
    stuck_after_s: float = STUCK_AFTER_S
    """From the service that binds the pool, else the default."""
    watched: bool = False
    """Something else than pdpool runs the pods: a side of a service with selectors, in the shape of a pool."""
    routed: bool = True
    """A service with a router binds the pool. Without one, the operator does not control which requests arrive."""
    operations: tuple[PoolOperation, ...] = ()
    """Operations on instances of the pool, the finished ones included."""
    keys: KeyEpochs = FIRST_KEYS
    """Keys that new pods get, so that they can connect to every engine pod of the other role in the namespace."""

    @property
    def own(self) -> tuple[ObservedInstance, ...]:
        """The instances that the pool controls, or may adopt."""
        return tuple(one for one in self.instances if one.belongs_to(self.pool.metadata.uid))


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
    """`None` if the router did not answer."""
    error: str = ""
    reachable: bool | None = None
    """Whether connections to it succeed. `None` while that is not known."""


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
    labels: Mapping[str, str] | None = None
    """`None` if they were not observed."""
    labelled: bool = False
    """As of `ObservedObject`."""


@dataclass(frozen=True, slots=True)
class ObservedService:
    """All observations about one `DisaggregatedService`."""

    service: DisaggregatedService
    prefill: ObservedPool | None
    """`None` if there is no such pool."""
    decode: ObservedPool | None
    deployment: ObservedDeployment | None
    objects: tuple[ObservedObject, ...]
    """Service, PodDisruptionBudget and ConfigMap with the router's names, and the Secret with the keys.

    The operator never reads Secrets. The Service's annotation records the Secret that was applied before it.
    """
    routers: tuple[ObservedRouter, ...]
    orphans: Mapping[Role, tuple[ObservedPod, ...]] = field(default_factory=dict)
    """Engine pods with the labels of a bound pool that does not exist, by role. They may outlive it."""
    workers_json: str | None = None
    """Content of the ConfigMap's `workers.json`. `None` if there is no ConfigMap."""

    def serving_orphans(self, role: Role) -> int:
        """Return how many of the orphans serve."""
        return sum(pod.takes_requests for pod in self.orphans.get(role, ()))


@dataclass(frozen=True, slots=True)
class ObservedFleet:
    """Both sides of a service that only watches."""

    service: DisaggregatedService
    prefill: ObservedPool
    decode: ObservedPool
    refusals: tuple[str, ...] = ()
    """Why selected pods are not watched, as text."""

    @property
    def sides(self) -> tuple[ObservedPool, ObservedPool]:
        """Prefill, then decode."""
        return self.prefill, self.decode
