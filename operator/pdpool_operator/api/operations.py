"""The kind `PoolOperation`: one command about one instance or node. Its objects stay as a record of what was done."""

import re
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, WrapValidator, field_validator, model_validator

from . import names
from .base import BY_TYPE, MAX_CONDITIONS, Condition, Metadata, Model, Resource, Time, cel_rule, tolerant
from .pools import POOL_KINDS, Pool
from .rules import OPERATION_RULES, broken, rules_schema

IMMUTABLE = {
    "rule": "self == oldSelf",
    "message": (
        "type, instance, node, deadlineSeconds and olderThanSeconds cannot be changed; create another PoolOperation"
    ),
}
PURGE_AGE_S = 60
"""Age in seconds of the hand-offs that a purge ends, if its spec has none. Most hand-offs take less."""
MAX_PURGE_AGE_S = 86400
MAX_PROCESSES = 1024
"""Processes that one fence declares ended. A node has one per rank, and those that its engines had before."""
NODE_PATTERN = "^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
"""What Kubernetes allows as the name of a node."""
NODE_RULE = "node must be the name of a node: lower-case letters, digits, '-' and '.', such as gpu-17"
INSTANCE_RULE = (
    "instance must be the name of an instance or of its pod, such as chat-decode-1 or chat-decode-1-0, where chat is "
    "the name of its pool"
)


class OperationType(StrEnum):
    """What is done."""

    DRAIN = "Drain"
    RESTART = "Restart"
    PURGE = "Purge"
    FENCE = "Fence"


class OperationPhase(StrEnum):
    """How far an operation is."""

    PENDING = "Pending"
    DRAINING = "Draining"
    RESTARTING = "Restarting"
    PURGING = "Purging"
    FENCING = "Fencing"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def finished(self) -> bool:
        """Whether the operation has ended."""
        return self in {OperationPhase.SUCCEEDED, OperationPhase.FAILED}


class OperationSpec(Model):
    """What to do. It cannot be changed after creation."""

    model_config = ConfigDict(json_schema_extra=rules_schema(OPERATION_RULES, IMMUTABLE))

    type: OperationType = Field(
        description=(
            "Drain takes the instance out of the rotation until the operation is deleted. Restart drains it, replaces "
            "its pod, and ends when the new pod is back in the rotation. Purge ends old hand-offs of the instance. The "
            "instance stays in the rotation. Fence declares that a node is switched off or erased. Engines then reuse "
            "the memory that they hold for its processes. If one of them still runs, it corrupts that memory."
        )
    )
    instance: str | None = Field(
        default=None,
        min_length=1,
        max_length=63,
        description=(
            "Drain, Restart and Purge: name of the instance, or of its pod. chat-decode-1 is the instance 1 of the "
            "DecodePool chat."
        ),
        json_schema_extra=cel_rule(f"self.matches('{names.INSTANCE_PATTERN}')", INSTANCE_RULE),
    )
    node: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description=(
            "Fence only: name of a node that is switched off or erased. The operator also requires that no Node of "
            "this name exists, or that it has the taint node.kubernetes.io/out-of-service and its kubelet is silent."
        ),
        json_schema_extra=cel_rule(f"self.matches('{NODE_PATTERN}')", NODE_RULE),
    )
    deadline_seconds: int = Field(
        default=1800,
        ge=1,
        le=86400,
        description=(
            "Seconds after the creation of this object within which the operation must end. Then it fails. It covers "
            "waiting, the drain, and the start of the new engine, or the answers of all engines."
        ),
    )

    older_than_seconds: int | None = Field(
        default=None,
        ge=0,
        le=MAX_PURGE_AGE_S,
        description=(
            "Purge only: seconds since a hand-off was opened. Older ones end, younger ones go on. 0 ends all. Default: "
            f"{PURGE_AGE_S}."
        ),
    )

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        if message := broken(OPERATION_RULES, self):
            raise ValueError(message)
        return self

    @field_validator("instance")
    @classmethod
    def _names_an_instance(cls, value: str | None) -> str | None:
        if value is not None and names.parse_instance(value) is None:
            raise ValueError(INSTANCE_RULE)
        return value

    @field_validator("node")
    @classmethod
    def _names_a_node(cls, value: str | None) -> str | None:
        if value is not None and re.fullmatch(NODE_PATTERN, value) is None:
            raise ValueError(NODE_RULE)
        return value


class OperationStatus(Model):
    """Observed state of an operation."""

    observed_generation: int = Field(
        default=0, ge=0, description="The metadata.generation that this status belongs to."
    )
    phase: OperationPhase = Field(
        default=OperationPhase.PENDING,
        description=(
            "Pending: nothing is done yet. Draining: the instance is out of the rotation. Restarting: its pod is about "
            "to be deleted, or was. Purging: its ranks are about to end old hand-offs, or have. Fencing: engines are "
            "about to release memory that they hold for processes of the node, or have. Succeeded and Failed: the "
            "operation has ended."
        ),
    )
    message: str = Field(default="", max_length=1024, description="What it waits for, or how it ended.")
    started_at: Time | None = Field(
        default=None,
        description=(
            "When the instance left the rotation. Purge: the ages of hand-offs count back from this time. Fence: when "
            "the node was found to be off."
        ),
    )
    finished_at: Time | None = Field(default=None, description="When the operation ended.")
    instance_uid: Annotated[str, Field(alias="instanceUID")] = Field(
        default="",
        max_length=64,
        description="UID of the instance's StatefulSet. A later instance of the same name is not meant.",
    )
    pod_uid: Annotated[str, Field(alias="podUID")] = Field(
        default="", max_length=64, description="Restart only: UID of the pod to replace. It is written before the deed."
    )
    served: bool = Field(
        default=False,
        description=(
            "The instance served when it left the rotation. If no other one serves any more before it is drained, it "
            "returns."
        ),
    )
    purged: int | None = Field(
        default=None,
        ge=0,
        description="Purge only: hand-offs that were ended. A request has one at each rank that holds its cache.",
    )
    processes: tuple[Annotated[str, Field(max_length=64)], ...] = Field(
        default=(),
        max_length=MAX_PROCESSES,
        description=(
            "Fence only: incarnations of the processes of the node that engines held memory for. They are written "
            "before engines are asked. A process that starts when the node is back is not among them."
        ),
    )
    released: int | None = Field(
        default=None,
        ge=0,
        description="Fence only: how many of these processes no engine that answers holds memory for any more.",
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=MAX_CONDITIONS,
        json_schema_extra=BY_TYPE,
        description="Ready: the operation has succeeded. Reconciling and Stalled while they are True.",
    )


class CreatedMetadata(Metadata):
    """Metadata with the time of creation."""

    creation_timestamp: Time


class PoolOperation(Resource):
    """One command: drain or restart an instance of a pool, end its old hand-offs, or declare a node switched off."""

    kind = "PoolOperation"
    plural = "pooloperations"

    metadata: CreatedMetadata
    spec: OperationSpec
    status: Annotated[OperationStatus, WrapValidator(tolerant)] = Field(default_factory=OperationStatus)

    @property
    def _target(self) -> tuple[str, names.Role, int]:
        target = names.parse_instance(self.spec.instance or "")
        assert target is not None, f"{self.spec.type} names no instance"
        return target

    @property
    def pool_kind(self) -> type[Pool]:
        """Kind of the instance's pool."""
        return next(kind for kind in POOL_KINDS if kind.role is self._target[1])

    @property
    def pool_name(self) -> str:
        """Name of the instance's pool."""
        return self._target[0]

    @property
    def instance(self) -> str:
        """Name of the instance, also if the spec names its pod. Empty for a Fence."""
        return names.instance(*self._target) if self.spec.instance is not None else ""

    @property
    def node(self) -> str:
        """Fence only: name of the node."""
        assert self.spec.node is not None, f"{self.spec.type} names no node"
        return self.spec.node

    @property
    def older_than_s(self) -> int:
        """Purge only: age of the hand-offs to end, in seconds."""
        age = self.spec.older_than_seconds
        return PURGE_AGE_S if age is None else age

    @property
    def due(self) -> datetime:
        """When it must have ended."""
        return self.metadata.creation_timestamp + timedelta(seconds=self.spec.deadline_seconds)
