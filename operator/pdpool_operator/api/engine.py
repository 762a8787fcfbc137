"""What runs in the pods of a pool: engine, model, ranks and the transfer of the cache, as typed models."""

from enum import StrEnum

from pydantic import Field

from .base import Model, cel_rule
from .rules import MAX_RANKS, TINY_MODEL


class EngineType(StrEnum):
    """Inference engine that runs in the pods."""

    REFERENCE = "Reference"
    SGLANG = "SGLang"
    VLLM = "VLLM"


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
            "and where queues are read. Reference is pdpool's own small CPU engine. SGLang and VLLM need an image in "
            "the template: one of theirs with pdpool installed, unless transfer.connector is Native."
        ),
    )
    startup_timeout_seconds: int | None = Field(
        default=None,
        ge=10,
        le=86400,
        description=(
            "Seconds that an engine may take to load its model. Then Kubernetes restarts the container. Default: "
            "600 for Reference, 1800 for SGLang and VLLM."
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
