"""The router of a service: its pods, its policy and its Service, as typed models."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from .base import Model, cel_rule


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
