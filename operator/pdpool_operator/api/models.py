"""Pools and services as typed models. The CRDs are generated from them, and from `operations`.

`kubectl explain` prints the field descriptions.

Never change a default within one API version. The API server stores defaults with the object, and the spec hash leaves
out values that equal the default. That is why a field that is added later restarts no pod.
"""

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, TypeAdapter, WrapValidator, model_validator

from .base import Condition, LocalReference, Model, Resource, Time, cel_rule, tolerant
from .names import Role
from .rdma import RDMA_RULES, RdmaSpec
from .rules import (
    BINDING_RULES,
    FLEET_RULES,
    KEEPS_ITS_KIND,
    MAX_RANKS,
    POOL_RULES,
    TINY_MODEL,
    broken,
    rules_schema,
)

MAX_INSTANCES = 256
MAX_CONDITIONS = 16
BY_TYPE: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}


class EngineType(StrEnum):
    """Inference engine that runs in the pods."""

    REFERENCE = "Reference"
    SGLANG = "SGLang"


class TransferBackend(StrEnum):
    """How KV cache moves from prefill to decode."""

    NIXL = "NIXL"
    MOONCAKE = "Mooncake"
    LOCAL = "Local"


class TransferConnector(StrEnum):
    """Library in the engine that performs hand-offs."""

    PDPOOL = "Pdpool"
    NATIVE = "Native"


class EngineSpec(Model):
    """The inference engine."""

    type: EngineType = Field(
        default=EngineType.REFERENCE,
        description=(
            "Engine that runs in the container `engine`. It decides command, flags, environment, ports, probes, drain, "
            "and where queues are read. Reference is pdpool's own small CPU engine. SGLang needs an image in the "
            "template: one of SGLang's with pdpool installed, unless transfer.connector is Native."
        ),
    )
    startup_timeout_seconds: int | None = Field(
        default=None,
        ge=10,
        le=86400,
        description=(
            "Seconds that an engine may take to load its model. Then Kubernetes restarts the container. Default: "
            "600 for Reference, 1800 for SGLang."
        ),
    )


class ModelSpec(Model):
    """The model that the pool serves."""

    path: str = Field(
        min_length=1,
        max_length=512,
        description=(
            "The model: absolute path of its directory inside the container, or its id on the hub, such as "
            "Qwen/Qwen3-32B, if the engine can download it. `tiny` is a small random model of the Reference engine."
        ),
        json_schema_extra=cel_rule(
            rf"self == '{TINY_MODEL}' || "
            r"self.matches('^((/[.]?[A-Za-z0-9_-][A-Za-z0-9._-]*)*/[A-Za-z0-9][A-Za-z0-9._-]*/?"
            r"|[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)$')",
            "model.path must be an absolute path of letters, digits and ._/- without .. whose last part begins with a "
            "letter or digit, such as /models/smollm2, or a hub id such as Qwen/Qwen3-32B, or the word tiny",
        ),
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description=(
            "Name of the model in the OpenAI API. Default: the last part of path. Both pools of a service must serve "
            "the same name."
        ),
        json_schema_extra=cel_rule(
            r"self.matches('^[A-Za-z0-9][A-Za-z0-9._-]*([/:][A-Za-z0-9][A-Za-z0-9._-]*)*$')",
            "model.servedName must begin with a letter or digit and hold only letters, digits and ._/:- such as "
            "smollm2, with a letter or digit after each / and :",
        ),
    )

    @property
    def effective_name(self) -> str:
        """The name under which engines serve the model."""
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]


class ParallelismSpec(Model):
    """How the engine divides one instance over ranks. Each rank needs a device."""

    tensor: int = Field(default=1, ge=1, le=MAX_RANKS, description="Ranks that divide every layer.")
    pipeline: int = Field(default=1, ge=1, le=MAX_RANKS, description="Stages that divide the layers.")
    data: int = Field(
        default=1,
        ge=1,
        le=MAX_RANKS,
        description=(
            "Data-parallel ranks. Each schedules requests of its own. With --enable-dp-attention in the template's "
            "args, SGLang takes them out of the tensor ranks."
        ),
    )


class TransferSpec(Model):
    """How prefill hands KV cache to decode."""

    connector: TransferConnector = Field(
        default=TransferConnector.PDPOOL,
        description=(
            "Pdpool is this project's connector. Native is the engine's own: its queues are watched, but the operator "
            "cannot see who is stuck, drain through a socket, or prove that memory is safe."
        ),
    )
    backend: TransferBackend = Field(
        default=TransferBackend.NIXL,
        description=(
            "NIXL and Mooncake move the cache over the network, by RDMA where the network has it. Local is for tests: "
            "it copies between processes that share a host, a PID namespace and a seccomp profile with "
            "process_vm_writev. Both pools of a service must have the same value."
        ),
    )


class Surge(StrEnum):
    """Whether an update of a pool with one instance may run a second one for a while."""

    AUTO = "Auto"
    NEVER = "Never"


class RolloutSpec(Model):
    """How instances are replaced when the spec changes. No field of it restarts a pod."""

    surge: Surge = Field(
        default=Surge.AUTO,
        description=(
            "Only for a pool with one instance. Auto starts the new instance first, and removes the old one when the "
            "new one is Ready. If the cluster has no room for both after 60 s, it removes the old one first, and the "
            "pool serves nothing until the new one is Ready. Never always does that. A pool with more instances "
            "replaces one at a time while the others serve."
        ),
    )


class PoolSpec(Model):
    """Desired state of a pool. Both kinds of pool have the same fields."""

    model_config = ConfigDict(json_schema_extra=rules_schema(POOL_RULES))

    replicas: int = Field(
        default=1,
        ge=0,
        le=MAX_INSTANCES,
        description="Number of engine instances. Also set through the scale subresource.",
    )
    engine: EngineSpec = Field(default_factory=EngineSpec, description="The inference engine.")
    model: ModelSpec = Field(description="The model that is served.")
    parallelism: ParallelismSpec = Field(
        default_factory=ParallelismSpec, description="How one instance is divided over ranks."
    )
    transfer: TransferSpec = Field(
        default_factory=TransferSpec, description="How KV cache is handed from prefill to decode."
    )
    rdma: RdmaSpec | None = Field(
        default=None,
        description=("RDMA devices of the engines. Absent: engines get no device, and transfers use what they find."),
    )
    drain_timeout_seconds: int = Field(
        default=60,
        ge=0,
        le=3600,
        description=(
            "Seconds that an instance has to finish its requests before it is replaced or removed. The termination "
            "grace period of the engine's pods is derived from it."
        ),
    )
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, description="How an update replaces instances.")
    template: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "An ordinary pod template. pdpool merges it into its own: containers, env, volumes and ports by name; args "
            "are appended; probes are replaced whole. The engine's container is named `engine`. Its image is "
            "optional for the Reference engine."
        ),
        json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    )

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        faults = [broken(POOL_RULES, self), broken(RDMA_RULES, self.rdma) if self.rdma is not None else ""]
        if any(faults):
            raise ValueError("; ".join(filter(None, faults)))
        return self


class InstanceStatus(Model):
    """One engine instance as last observed."""

    index: int = Field(ge=0, le=MAX_INSTANCES - 1, description="Index of the instance in the pool.")
    ready: bool = Field(description="The pod is Ready: the engine can serve.")
    updated: bool = Field(description="The pod was made from the current spec.")
    pod: str | None = Field(default=None, max_length=63, description="Name of the pod, if there is one.")
    pod_uid: Annotated[str | None, Field(alias="podUID")] = Field(
        default=None, max_length=64, description="UID of the pod, if there is one."
    )
    verdict: str = Field(
        default="Unknown",
        max_length=32,
        description="Verdict on its queues: Idle, Flowing, Saturated, Blocked, Stuck, …",
    )
    message: str = Field(default="", max_length=1024, description="The evidence for the verdict.")


class RepairState(StrEnum):
    """How far a repair is."""

    PROPOSED = "Proposed"
    INTENDED = "Intended"
    DONE = "Done"
    WITHDRAWN = "Withdrawn"


class RepairRecord(Model):
    """One repair of one pod: what the operator would do, is about to do, or has done."""

    index: int = Field(ge=0, le=MAX_INSTANCES - 1, description="Index of the instance in the pool.")
    pod_uid: Annotated[str, Field(alias="podUID")] = Field(max_length=64, description="UID of the pod to restart.")
    state: RepairState = Field(
        description=(
            "Proposed: nothing is done, the message says why. Intended: the pod is about to be deleted. Done: it was "
            "deleted. Withdrawn: the instance recovered, or the repair is no longer allowed."
        )
    )
    since: Time = Field(description="When the record got this state.")
    message: str = Field(default="", max_length=1024, description="The evidence, and why nothing is done if so.")


class PoolStatus(Model):
    """Observed state of a pool."""

    observed_generation: int = Field(
        default=0, ge=0, description="The metadata.generation that this status belongs to."
    )
    replicas: int = Field(default=0, ge=0, description="Instances that exist.")
    ready_replicas: int = Field(default=0, ge=0, description="Instances whose pod is Ready.")
    updated_replicas: int = Field(default=0, ge=0, description="Instances whose pod was made from the current spec.")
    ready: str = Field(default="0/0", max_length=16, description="Ready and wanted instances, for people: 2/3.")
    selector: str = Field(default="", max_length=512, description="Label selector of the pool's pods, for autoscalers.")
    queues: str = Field(
        default="", max_length=64, description="The most severe verdict in the pool, and which instance has it."
    )
    engine: str = Field(
        default="", max_length=128, description="Engines with their versions, as their connectors report them."
    )
    connector: str = Field(default="", max_length=128, description="Versions of pdpool's connector in the engines.")
    transport: str = Field(
        default="",
        max_length=128,
        description="Transfer backends and transports between paired engines: nixl rdma. Empty before the first pair.",
    )
    oldest_waiting_since: Time | None = Field(
        default=None,
        description=(
            "When the oldest request in a hand-off queue began to wait. Absent while no request has waited for "
            "stuckAfterSeconds, and while the age is unknown."
        ),
    )
    restarted_at: str | None = Field(
        default=None,
        max_length=256,
        description="Value of the annotation pdpool.dev/restarted-at with which all instances run.",
    )
    instances: tuple[InstanceStatus, ...] = Field(
        default=(), max_length=MAX_INSTANCES, description="The instances, by index."
    )
    repairs: tuple[RepairRecord, ...] = Field(
        default=(),
        max_length=2 * MAX_INSTANCES,
        description="Proposed repairs, and those of the last hour. An intended restart stands here before it is made.",
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=MAX_CONDITIONS,
        json_schema_extra=BY_TYPE,
        description=(
            "Available, Ready, QueuesHealthy, HoldsProvable; Reconciling, Stalled and RepairStopped while they are "
            "True."
        ),
    )


class Pool(Resource):
    """Common part of `PrefillPool` and `DecodePool`."""

    role: ClassVar[Role]

    spec: PoolSpec
    status: Annotated[PoolStatus, WrapValidator(tolerant)] = Field(default_factory=PoolStatus)


class PrefillPool(Pool):
    """Engines that read prompts and compute their KV cache."""

    kind = "PrefillPool"
    plural = "prefillpools"
    role = Role.PREFILL


class DecodePool(Pool):
    """Engines that take over KV cache and produce tokens."""

    kind = "DecodePool"
    plural = "decodepools"
    role = Role.DECODE


class LocalSecret(Model):
    """Reference to a Secret of the same namespace."""

    name: str = Field(
        min_length=1,
        max_length=253,
        description="Name of the Secret, in the same namespace.",
        json_schema_extra=cel_rule(
            "self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",
            "router.imagePullSecrets[].name must be the name of a Secret, of lower-case letters, digits, '-' and '.'",
        ),
    )


LabelValue = Annotated[
    str,
    Field(
        max_length=63,
        description="Value of the label.",
        json_schema_extra=cel_rule(
            "self == '' || self.matches('^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')",
            "selector values must be label values of at most 63 letters, digits and -_.",
        ),
    ),
]


class PoolBinding(Model):
    """One side of a service: a pool, or pods that something else runs."""

    model_config = ConfigDict(json_schema_extra=rules_schema(BINDING_RULES))

    pool_ref: LocalReference | None = Field(
        default=None, description="The pool that serves this side. Exactly one of poolRef and selector is given."
    )
    selector: dict[str, str] | None = Field(
        default=None,
        max_length=16,
        description=(
            "Labels of engine pods in this namespace that something else runs: LeaderWorkerSet, a Deployment, another "
            "operator. pdpool only watches them. It changes nothing, and it runs no router. Each pod is one instance. "
            "Of a multi-node instance, select only the pod that serves HTTP."
        ),
        json_schema_extra={
            "type": "object",
            "additionalProperties": TypeAdapter(LabelValue).json_schema(),
            "maxProperties": 16,
        },
    )
    engine: EngineType | None = Field(
        default=None, description="Engine in the selected pods. Only with selector. Default: SGLang."
    )
    port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Port on which the engine answers /v1/loads and /metrics. Only with selector. Default: 30000.",
    )
    connector: TransferConnector | None = Field(
        default=None,
        description=(
            "Pdpool if every rank of the selected pods has pdpool's connector with its admin endpoint, at port 9400 "
            "plus the rank. Only with selector. Default: Native."
        ),
    )

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        if message := broken(BINDING_RULES, self):
            raise ValueError(message)
        return self

    @property
    def pool_name(self) -> str:
        """Name of the pool.

        Raises:
            ValueError: the side has a selector.
        """
        if self.pool_ref is None:
            raise ValueError("a side with a selector has no pool")
        return self.pool_ref.name


class Policy(StrEnum):
    """How the router chooses an engine."""

    ROUND_ROBIN = "RoundRobin"
    RANDOM = "Random"
    CACHE_AWARE = "CacheAware"


class RouterPolicy(Model):
    """How the router chooses the engines of a request."""

    prefill: Policy = Field(
        default=Policy.ROUND_ROBIN,
        description=(
            "How the prefill engine is chosen. CacheAware prefers the engine that has most of the prompt in its cache."
        ),
    )
    decode: Policy = Field(
        default=Policy.RANDOM,
        description="How the decode engine is chosen. RoundRobin on both sides forms fixed pairs of engines.",
    )


class ServiceType(StrEnum):
    """Type of the router's Service."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class RouterServiceSpec(Model):
    """The Service through which clients reach the router."""

    type: ServiceType = Field(
        default=ServiceType.CLUSTER_IP, description="Type of the Service. Only ClusterIP is not reachable from outside."
    )
    annotations: dict[str, str] = Field(
        default_factory=dict,
        description="Annotations of the Service, such as those that a cloud's load balancer reads.",
        json_schema_extra={
            "type": "object",
            "additionalProperties": {"type": "string", "maxLength": 4096, "description": "Value of the annotation."},
            "maxProperties": 64,
        },
    )


RouterArgument = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        description="A flag of sglang-router, or its value.",
        json_schema_extra=cel_rule(
            r"self.matches('^[ -~]+$')", "router.args[] must be a flag or value of printable ASCII characters"
        ),
    ),
]


class RouterSpec(Model):
    """The router in front of both pools."""

    enabled: bool = Field(
        default=True, description="Run a router. Turn it off if your own gateway selects the engines."
    )
    replicas: int = Field(default=1, ge=1, le=16, description="Number of router pods.")
    port: int = Field(default=8000, ge=1, le=65535, description="Port of the router's Service.")
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Image with sglang-router and pdpool's entrypoint (images/router). Default: the operator's.",
        json_schema_extra=cel_rule(
            r"self.matches('^[A-Za-z0-9\\[][A-Za-z0-9._:/@\\[\\]-]*$')",
            "router.image must be the reference of an image, such as registry.example/pdpool-router:0.1.0",
        ),
    )
    image_pull_secrets: tuple[LocalSecret, ...] = Field(
        default=(),
        max_length=16,
        description="Secrets of this namespace with credentials for the image's registry. Default: the operator's.",
    )
    policy: RouterPolicy = Field(
        default_factory=RouterPolicy, description="How the router chooses the engines of a request."
    )
    args: tuple[RouterArgument, ...] = Field(
        default=(),
        max_length=64,
        description=(
            "Further flags of sglang-router, such as --cache-threshold=0.3. They override pdpool's. Flags that pdpool "
            "sets from other fields are refused."
        ),
    )
    resources: dict[str, Any] = Field(
        default_factory=dict,
        description="Resources of the router's container, as in a pod. They replace pdpool's.",
        json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    )
    template: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "An ordinary pod template. pdpool merges it into its own, by the rules of the pools' templates. The "
            "router's container is named `router`."
        ),
        json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    )
    service: RouterServiceSpec = Field(
        default_factory=RouterServiceSpec, description="The Service through which clients reach the router."
    )


class RepairMode(StrEnum):
    """What the operator does about an instance at fault."""

    OFF = "Off"
    OBSERVE = "Observe"
    ENFORCE = "Enforce"


class RepairSpec(Model):
    """How instances that are Stuck or Failing are repaired."""

    mode: RepairMode = Field(
        default=RepairMode.OBSERVE,
        description=(
            "Observe only proposes: status.repairs of the pool, an event and a metric say what would be done. Enforce "
            "restarts the instance at fault. Off does neither. Of several services that bind a pool, the most "
            "cautious mode applies."
        ),
    )
    restarts_per_hour: int = Field(
        default=3,
        ge=0,
        le=32,
        description="Most restarts in both pools of the service within an hour. Then repair stops and an alert fires.",
    )


class DisaggregatedServiceSpec(Model):
    """Which pools work together, and how clients reach them."""

    model_config = ConfigDict(json_schema_extra=rules_schema(FLEET_RULES, KEEPS_ITS_KIND))

    prefill: PoolBinding = Field(description="The side that reads prompts: a PrefillPool, or selected pods.")
    decode: PoolBinding = Field(description="The side that produces tokens: a DecodePool, or selected pods.")
    router: RouterSpec = Field(
        default_factory=RouterSpec,
        description="The router in front of both pools. A service with selectors runs none.",
    )
    stuck_after_seconds: int = Field(
        default=30,
        ge=5,
        le=3600,
        description=("Seconds after which a hand-off queue counts as stuck, if requests wait in it and nothing moves."),
    )
    repair: RepairSpec = Field(
        default_factory=RepairSpec, description="How instances that are Stuck or Failing are repaired."
    )

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        if message := broken(FLEET_RULES, self):
            raise ValueError(message)
        return self

    @property
    def watches(self) -> bool:
        """Whether the service only watches pods that something else runs."""
        return self.prefill.selector is not None


class WatchedInstanceStatus(Model):
    """One pod that a service only watches, as last observed."""

    pod: str = Field(max_length=253, description="Name of the pod.")
    role: str = Field(max_length=16, description="prefill or decode.")
    ready: bool = Field(description="The pod is Ready.")
    verdict: str = Field(default="Unknown", max_length=32, description="Verdict on its queues.")
    message: str = Field(default="", max_length=1024, description="The evidence for the verdict.")


class DisaggregatedServiceStatus(Model):
    """Observed state of a service."""

    observed_generation: int = Field(
        default=0, ge=0, description="The metadata.generation that this status belongs to."
    )
    url: str = Field(default="", max_length=512, description="Where clients inside the cluster reach the OpenAI API.")
    router_replicas: int = Field(default=0, ge=0, description="Router pods that are Ready.")
    ready: str = Field(
        default="",
        max_length=64,
        description="Ready and wanted instances of both sides, for people: 1/1 prefill, 2/2 decode.",
    )
    queues: str = Field(
        default="", max_length=64, description="The most severe verdict on either side, and which instance has it."
    )
    oldest_waiting_since: Time | None = Field(
        default=None,
        description=(
            "When the oldest waiting request on either side began to wait. Absent while no request has waited for "
            "stuckAfterSeconds, and while the age is unknown."
        ),
    )
    restarted_at: str | None = Field(
        default=None,
        max_length=256,
        description="Value of the annotation pdpool.dev/restarted-at with which all routers run.",
    )
    instances: tuple[WatchedInstanceStatus, ...] = Field(
        default=(),
        max_length=2 * MAX_INSTANCES,
        description="Pods that a service with selectors watches, by role and name. Pools list their own instances.",
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=MAX_CONDITIONS,
        json_schema_extra=BY_TYPE,
        description="Available, Ready, QueuesHealthy, RouterReady; Reconciling and Stalled while they are True.",
    )


class DisaggregatedService(Resource):
    """A prefill pool and a decode pool that serve one model together, with a router in front."""

    kind = "DisaggregatedService"
    plural = "disaggregatedservices"

    spec: DisaggregatedServiceSpec
    status: Annotated[DisaggregatedServiceStatus, WrapValidator(tolerant)] = Field(
        default_factory=DisaggregatedServiceStatus
    )


POOL_KINDS: tuple[type[Pool], ...] = (PrefillPool, DecodePool)
"""The kinds of pool."""
