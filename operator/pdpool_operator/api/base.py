"""Shared parts of the models of all kinds: field names on the wire, metadata, conditions, and parsing.

A parse error names the faulty field.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic.alias_generators import to_camel

from .names import MAX_NAME_LENGTH, NAME_PATTERN

MAX_CONDITIONS = 16
BY_TYPE: dict[str, Any] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}


class SpecInvalid(ValueError):  # noqa: N818 -- named as the reason that it becomes
    """An object does not fit its model. An older or newer CRD accepted it."""


class Model(BaseModel):
    """Base of every object that is read from or written to the API server.

    Models are immutable, use camelCase on the wire, and ignore unknown fields.
    """

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict with the wire names. Absent values are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def _whole_seconds_utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("must carry a time zone")
    return value.astimezone(UTC).replace(microsecond=0)


def format_time(value: datetime) -> str:
    """Format a time as Kubernetes writes it: RFC 3339, UTC, whole seconds."""
    return _whole_seconds_utc(value).strftime("%Y-%m-%dT%H:%M:%SZ")


Time = Annotated[datetime, AfterValidator(_whole_seconds_utc), PlainSerializer(format_time, return_type=str)]
"""A time with the precision of the Kubernetes API: whole seconds, UTC."""


class Metadata(Model):
    """The part of `metadata` that the operator reads."""

    name: str
    namespace: str
    uid: str
    generation: int = 0
    annotations: dict[str, str] = Field(default_factory=dict)
    deletion_timestamp: Time | None = None


class ConditionStatus(StrEnum):
    """Value of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Model):
    """One aspect of an object's state, in the shape of `metav1.Condition`."""

    type: str = Field(
        max_length=64, description="The aspect that this condition describes: Available, Ready, QueuesHealthy, …"
    )
    status: ConditionStatus = Field(description="True, False or Unknown.")
    reason: str = Field(max_length=64, description="Reason in one word. Events, logs and metrics use the same words.")
    message: str = Field(default="", max_length=4096, description="Explanation for people.")
    last_transition_time: Time = Field(description="When the status last changed.")
    observed_generation: int = Field(
        default=0, ge=0, description="The metadata.generation from which this condition was computed."
    )


def tolerant(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:  # noqa: ANN401 -- pydantic's signature
    """Read a status; return an empty one if it does not fit the model.

    Another version of the operator may have written it. Such a status must not block this operator, which is about to
    replace it.
    """
    try:
        return handler(value)
    except ValidationError:
        return handler({})


def cel_rule(rule: str, message: str) -> dict[str, Any]:
    """JSON-schema extra that carries one CEL rule on a string. The error message shows the value."""
    expression = f'"{message}, not \'" + self + "\'"'
    return {"x-kubernetes-validations": [{"rule": rule, "message": message, "messageExpression": expression}]}


class LocalReference(Model):
    """Reference to a pool of the same namespace."""

    name: str = Field(
        min_length=1,
        max_length=MAX_NAME_LENGTH,
        description="Name of the pool, in the same namespace.",
        json_schema_extra=cel_rule(
            f"self.matches('{NAME_PATTERN}')",
            "prefill.poolRef.name and decode.poolRef.name must be names that a pool can have, of lower-case letters, "
            "digits and '-', beginning with a letter",
        ),
    )


class Resource(Model):
    """Base of all kinds. Parse with `parse`, which raises `SpecInvalid` and names every faulty field."""

    kind: ClassVar[str]
    plural: ClassVar[str]

    metadata: Metadata

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Read an object as the API server returned it.

        Raises:
            SpecInvalid: a field is missing or out of bounds. The message names each such field with its value.
        """
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']} (got {fault['input']!r:.80})"
                for fault in error.errors()
            )
            raise SpecInvalid(faults) from error
