"""What engine processes answer: bounded types of values, and the parser of `/v1/loads`.

An answer comes from a process that the operator does not control. Every value has a bound, so that one engine cannot
make the status or the metrics of all fail.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ..api.names import Role

MAX_RANKS = 256
"""Limit of ranks per pod. A larger claim is rejected, because each rank costs a request per sample."""
MAX_HOLDS = 256
"""Processes that are read per rank for which it holds memory. The rest is read once these have been released."""
MAX_COUNT = (1 << 63) - 1
"""Largest integer of the Kubernetes API."""
MAX_SECONDS = 1e9
"""About 30 years. Times are computed from ages and must be representable."""
MAX_QUEUE_NAME = 64

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=64, pattern="^[A-Za-z0-9._-]*$")]
"""The text becomes part of messages and a metric label."""

Version = Annotated[str, Field(max_length=64, pattern="^[A-Za-z0-9 ._+-]*$")]
"""The text becomes part of the status."""

_SUFFIX = "_queue_reqs"


class Answer(BaseModel):
    """Base of parsed answers: strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of a rank since its process began. What the engine does not export is absent or `None`."""

    moved: Mapping[str, int] = field(default_factory=dict)
    """Requests that left a hand-off queue for the next one, by queue."""
    tokens: int | None = None
    """Tokens that the rank has computed. The engine may add them in steps of several seconds."""
    finished: int | None = None
    """Requests that the engine has finished, over all its ranks."""


@dataclass(frozen=True, slots=True)
class EngineSample:
    """Answer of the engine's scheduler."""

    running: int
    waiting: int
    queues: Mapping[str, int]
    """Lengths of the hand-off queues, under the same names as the connector's."""
    lag_s: float = 0.0
    """Seconds for which the lengths may already have been wrong. 0 if the scheduler itself reported them."""
    counters: Counters = field(default_factory=Counters)
    """What the engine's `/metrics` count."""


class _Load(Answer):
    dp_rank: Annotated[int, Field(ge=0, le=255)] = 0
    num_running_reqs: Count = 0
    num_waiting_reqs: Count = 0
    disaggregation: dict[str, Any] | None = None


class _Loads(Answer):
    loads: Annotated[list[_Load], Field(max_length=MAX_RANKS)]


def parse_sglang_loads(body: bytes, role: Role) -> dict[int, EngineSample]:
    """Parse SGLang's `/v1/loads`, by rank. The reference engine has the same endpoint.

    Only queues of the engine's own role are read. SGLang also lists those of the other role, always 0.

    Raises:
        ValidationError: the answer does not fit.
    """
    return {
        load.dp_rank: EngineSample(
            running=load.num_running_reqs,
            waiting=load.num_waiting_reqs,
            queues={
                name.removesuffix(_SUFFIX): value
                for name, value in (load.disaggregation or {}).items()
                if _is_queue(name, role) and isinstance(value, int) and 0 <= value <= MAX_COUNT
            },
        )
        for load in _Loads.model_validate_json(body).loads
    }


def _is_queue(name: str, role: Role) -> bool:
    return (
        name.startswith(f"{role}_")
        and name.endswith(_SUFFIX)
        and len(name) <= MAX_QUEUE_NAME
        and name.isascii()
        and name.isidentifier()
    )
