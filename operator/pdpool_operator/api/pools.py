"""`PrefillPool` and `DecodePool`: instances of one engine, as typed models.

The CRDs are generated from the models. `kubectl explain` prints the field descriptions.

Never change a default within one API version. The API server stores defaults with the object, and the spec hash leaves
out values that equal the default. That is why a field that is added later restarts no pod.
"""

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, WrapValidator, model_validator

from .base import BY_TYPE, MAX_CONDITIONS, Condition, Model, Resource, Time, tolerant
from .engine import EngineSpec, ModelSpec, ParallelismSpec, TransferSpec
from .names import Role
from .rdma import RDMA_RULES, RdmaSpec
from .rules import POOL_RULES, broken, rules_schema

MAX_INSTANCES = 256


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


class RepairAction(StrEnum):
    """What a repair does to an instance."""

    PURGE = "Purge"
    RESTART = "Restart"
    REPLACE = "Replace"


class RepairState(StrEnum):
    """How far a repair is."""

    PROPOSED = "Proposed"
    INTENDED = "Intended"
    DONE = "Done"
    WITHDRAWN = "Withdrawn"


class RepairRecord(Model):
    """One repair of one pod: what the operator would do, is about to do, or has done."""

    index: int = Field(ge=0, le=MAX_INSTANCES - 1, description="Index of the instance in the pool.")
    pod_uid: Annotated[str, Field(alias="podUID")] = Field(max_length=64, description="UID of the pod to repair.")
    action: RepairAction = Field(
        default=RepairAction.RESTART,
        description=(
            "Purge: its connectors end the hand-offs that wait too long. Restart: its pod is deleted. Replace: its pod "
            "is deleted, and the new one avoids its node for an hour."
        ),
    )
    node: str = Field(default="", max_length=253, description="Node of the pod when the repair was intended.")
    state: RepairState = Field(
        description=(
            "Proposed: nothing is done, the message says why. Intended: it is about to be done. Done: it was done. "
            "Withdrawn: the instance recovered, or the repair is not allowed or not possible any more."
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
        description="Proposed repairs, and those of the last hour. An intended repair stands here before it is made.",
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=MAX_CONDITIONS,
        json_schema_extra=BY_TYPE,
        description=(
            "Available, Ready, QueuesHealthy, HoldsProvable; Reconciling, Stalled, RepairStopped and PeersUnreachable "
            "while they are True."
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


POOL_KINDS: tuple[type[Pool], ...] = (PrefillPool, DecodePool)

"""The kinds of pool."""
