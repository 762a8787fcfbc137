"""`spec.rdma` of a pool: which device its engines get, and what happens if transfers do not use it."""

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from .base import Model, cel_rule
from .rules import Rule, rules_schema

LabelValue = Annotated[str, Field(max_length=63)]


class RdmaMode(StrEnum):
    """What the pool demands of the transport of KV cache."""

    REQUIRED = "Required"
    PREFERRED = "Preferred"
    OFF = "Off"


class Memlock(StrEnum):
    """How the engine may lock the memory that it registers with the device."""

    NODE_LIMIT = "NodeLimit"
    CAPABILITY = "Capability"


RDMA_RULES = (
    Rule(
        "self.mode == 'Off' || has(self.resource)",
        "rdma.resource must name the device resource unless rdma.mode is Off, such as rdma/ib or vpc.amazonaws.com/efa",
        lambda rdma: rdma.mode is RdmaMode.OFF or rdma.resource is not None,
    ),
    Rule(
        "self.mode != 'Off' || !has(self.resource)",
        "rdma.resource must be absent if rdma.mode is Off",
        lambda rdma: rdma.mode is not RdmaMode.OFF or rdma.resource is None,
    ),
)


class RdmaSpec(Model):
    """RDMA for the transfer of KV cache."""

    model_config = ConfigDict(json_schema_extra=rules_schema(RDMA_RULES))

    mode: RdmaMode = Field(
        description=(
            "Required: an instance whose peer is reached by another transport is not available. Preferred: the "
            'condition TransferReady says so, and the instance serves. "Off": engines use no RDMA, also if the node '
            "has it. YAML takes Off without quotes for a boolean."
        )
    )
    resource: str | None = Field(
        default=None,
        min_length=3,
        max_length=253,
        description=(
            "Resource of the device plugin, which the engine's container requests: rdma/ib, "
            "rdma/hca_shared_devices_a, vpc.amazonaws.com/efa, …"
        ),
        json_schema_extra=cel_rule(
            r"self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$')",
            "rdma.resource must be the full name of a resource, such as rdma/ib",
        ),
    )
    count: int = Field(default=1, ge=1, le=64, description="How many devices each engine requests.")
    networks: tuple[
        Annotated[
            str,
            Field(
                min_length=1,
                max_length=253,
                description="Name, or namespace/name, of a NetworkAttachmentDefinition.",
                json_schema_extra=cel_rule(
                    r"self.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?/)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",
                    "rdma.networks[] must be names of NetworkAttachmentDefinitions, with or without a namespace",
                ),
            ),
        ],
        ...,
    ] = Field(
        default=(),
        max_length=16,
        description="Further networks of the pods by Multus: NetworkAttachmentDefinitions, as name or namespace/name.",
    )
    node_selector: dict[str, LabelValue] = Field(
        default_factory=dict,
        max_length=16,
        description="Labels of nodes that have the device, such as those of node feature discovery.",
    )
    memlock: Memlock = Field(
        default=Memlock.NODE_LIMIT,
        description=(
            "NodeLimit: the container runtime of the node allows enough locked memory, and the engine runs without "
            "root. Capability: the engine runs as root with the capability IPC_LOCK and no other, because a capability "
            "that is added does nothing for another user."
        ),
    )
