"""`DisaggregatedService`: which pools work together, their router and their repair, as typed models."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, TypeAdapter, WrapValidator, model_validator

from .base import BY_TYPE, MAX_CONDITIONS, Condition, LocalReference, Model, Resource, Time, cel_rule, tolerant
from .engine import EngineType, TransferConnector
from .pools import MAX_INSTANCES
from .router import RouterSpec
from .rules import BINDING_RULES, FLEET_RULES, KEEPS_ITS_KIND, broken, rules_schema

STUCK_AFTER_S = 30
"""Default of `stuckAfterSeconds`."""

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
            "repairs the instance at fault: it ends hand-offs that wait too long, restarts it, and moves it to another "
            "node. Off does neither. Of several services that bind a pool, the most cautious mode applies."
        ),
    )
    restarts_per_hour: int = Field(
        default=3,
        ge=0,
        le=32,
        description=(
            "Most restarts and replacements in both pools of the service within an hour. Then repair stops and an "
            "alert fires."
        ),
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
        default=STUCK_AFTER_S,
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
