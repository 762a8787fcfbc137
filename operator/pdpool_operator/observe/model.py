"""Observations as plain frozen data: the input of diagnosis, planning and status.

A value that was not observed is `None`, never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..api.key_epochs import FIRST_KEYS, KeyEpochs
from ..api.names import Role
from ..api.operations import PoolOperation
from ..api.pools import Pool
from ..api.services import DisaggregatedService, RepairMode, RepairSpec
from ..engines.answers import Counters as Counters
from ..engines.answers import EngineSample as EngineSample

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Kubernetes' taint of a node that a person, or the cloud, declares switched off."""
HANDOFF_QUEUES = frozenset({"prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer"})
CRASH_LOOP = "CrashLoopBackOff"
"""Kubernetes' reason for a container that waits for a restart."""


@dataclass(frozen=True, slots=True)
class QueueSample:
    """One hand-off queue of one rank at one moment."""

    reqs: int
    oldest_s: float | None
    """Age of the oldest request in seconds. `None` if the queue is empty or its source does not report it."""
    moved_total: int | None
    """Requests that moved on from the queue since the incarnation began, without those that ended in it.

    `None` if the source does not report it.
    """


@dataclass(frozen=True, slots=True)
class Tally:
    """How requests ended. What is the client's fault is no failure."""

    done: int = 0
    failed: int = 0

    @property
    def ended(self) -> int:
        """All of them."""
        return self.done + self.failed

    @property
    def share(self) -> float:
        """Share of those that failed; 0 if none ended."""
        return self.failed / self.ended if self.ended else 0.0


@dataclass(frozen=True, slots=True)
class HoldSample:
    """A process of the other side that may still access memory. The connector holds that memory back."""

    incarnation: str
    pod_uid: str
    """UID of that process's pod, as the process reported it at pairing. Empty if it did not."""
    container: str
    """One run of one container, as that process reported it. Each run has another text. Empty if it did not report one.
    """


@dataclass(frozen=True, slots=True)
class PeerSample:
    """A process with which a connector has paired."""

    incarnation: str
    backend: str
    """Name of the transfer backend between them."""
    transport: str
    """How bytes reach it: `rdma`, `tcp`, `cma`, ... Empty if not known, as always at decode."""


@dataclass(frozen=True, slots=True)
class PodLife:
    """The kubelet's reports of ended runs of a pod's engine container."""

    name: str
    container_id: str
    """Container id of the run that ended last."""
    over: bool
    """No other run will start in this pod."""


@dataclass(frozen=True, slots=True)
class ConnectorSample:
    """Answer of the admin endpoint of one rank's connector, `GET :9400+rank/v1/state`.

    The endpoint answers also while the engine's loop is frozen.
    """

    incarnation: str
    beat_age_s: float | None
    """Seconds since the engine's scheduler loop last ran; `None` when the engine does not report that."""
    queues: Mapping[str, QueueSample]
    """The hand-off queues. Other queues that an engine shows are for people."""
    ranks: int = 1
    """Number of the instance's ranks, including this one."""
    holds: int = 0
    """Hand-offs whose memory is held until their writers are proved to have stopped."""
    held_bytes: int = 0
    held_oldest_s: float | None = None
    """Age of the oldest hold in seconds. `None` if nothing is held."""
    held_for: tuple[HoldSample, ...] = ()
    pod_uid: str = ""
    """As the connector itself reports it."""
    container: str = ""
    """Run of the container in which the process lives, as in `HoldSample`."""
    engine: str = ""
    """Name and version of the engine. Empty if it reports none."""
    version: str = ""
    """Version of the connector. Empty if it reports none."""
    peers: tuple[PeerSample, ...] = ()
    silent: tuple[str, ...] = ()
    """At decode: registries of prefills, `host:port`, that do not answer it."""
    engine_queues: Mapping[str, QueueSample] = field(default_factory=dict)
    """The hand-off queues that the engine shows, as it shows them."""
    unsettled: int = 0
    """Hand-offs that have failed while their memory may still be accessed. An engine may keep their requests."""
    ended: Tally | None = None
    """Hand-offs that ended since the incarnation began. `None` if the connector does not report them."""
    paused: bool = False
    """The engine is paused on request, and reports it. Its requests do not move."""
    loop_lag_s: float = 0.0
    """Longest turn of the connector's own loop in the last seconds, or for how long it hangs. The other numbers are as
    of its last turn.
    """


@dataclass(frozen=True, slots=True)
class RankSample:
    """One sample of one rank. Each of the two sources is known, or `None` with a reason."""

    rank: int
    pod_uid: str
    at: datetime
    """Time of the answer, by the operator's clock."""
    asked_at: datetime
    """Time of the request."""
    connector: ConnectorSample | None
    engine: EngineSample | None
    connector_error: str = ""
    """Reason why `connector` is None: `timeout`, `refused`, `http 503`, …"""
    engine_error: str = ""
    """Reason why `engine` is None.

    Empty if the engine answered and counts the requests of this rank at another one, as for ranks that share a
    scheduler.
    """
    has_connector: bool = True
    """The pod runs pdpool's connector. Otherwise only the engine is asked."""
    metrics_error: str = ""
    """Reason why the engine's `/metrics` were not read. Empty if they were, or if they are not asked for."""

    @property
    def queues(self) -> Mapping[str, QueueSample] | None:
        """The hand-off queues by the best source of the pod. `None` if it did not answer."""
        return self.seen_queues if self.connector is not None or not self.has_connector else None

    @property
    def seen_queues(self) -> Mapping[str, QueueSample] | None:
        """The hand-off queues by the best source that answered. `None` if none did."""
        if self.connector is not None:
            return self.connector.queues
        if self.engine is None:
            return None
        moved = self.engine.counters.moved
        return {name: QueueSample(reqs, None, moved.get(name)) for name, reqs in self.engine.queues.items()}


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
    stuck_after_s: float = 30.0
    """From the service that binds the pool, else the default."""
    watched: bool = False
    """Something else than pdpool runs the pods: a side of a service with selectors, in the shape of a pool."""
    routed: bool = True
    """A service with a router binds the pool. Without one, the operator does not control which requests arrive."""
    operations: tuple[PoolOperation, ...] = ()
    """Operations on instances of the pool, the finished ones included."""
    keys: KeyEpochs = FIRST_KEYS
    """Keys that new pods get, so that they can connect to every engine pod of the other role in the namespace."""


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
