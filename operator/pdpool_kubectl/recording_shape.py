"""The fields of a recording that `replay` reads, for files that were edited by hand or cut off.

Other fields of objects are ignored. Specs are checked by the models of their kinds: an object that does not fit its
model is left out, as by the operator.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pdpool_operator.api import names
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

SHOWN_LETTERS = 80
"""Letters of a wrong value that are shown."""
_ANSWER_KEYS = ("body", "text", "error")


def _time(text: str) -> str:
    try:
        zone = datetime.fromisoformat(text).tzinfo
    except ValueError:
        zone = None
    if zone is None:
        raise PydanticCustomError("time", "must be a time with a zone, such as 2026-11-21T12:00:00+00:00")
    return text


_Time = Annotated[str, AfterValidator(_time)]


class _Owner(BaseModel):
    kind: str
    name: str
    uid: str


class _Metadata(BaseModel):
    name: str
    namespace: str
    uid: str
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    ownerReferences: list[_Owner] | None = None  # noqa: N815 - as on the wire
    deletionTimestamp: str | None = None  # noqa: N815 - as on the wire


class _Object(BaseModel):
    kind: str
    metadata: _Metadata
    spec: dict[str, Any] | None = None


class _Pool(_Object):
    kind: Literal["PrefillPool", "DecodePool"]


class _Replicas(BaseModel):
    replicas: int = 1


class _StatefulSet(_Object):
    spec: _Replicas | None = None  # type: ignore[assignment] # a part of it

    @model_validator(mode="after")
    def _has_an_index(self) -> Self:
        index = (self.metadata.labels or {}).get(names.LABEL_INSTANCE, "")
        if re.fullmatch("[0-9]{0,9}", index) is None:
            raise PydanticCustomError("index", f"metadata.labels: {names.LABEL_INSTANCE} must be a number of digits")
        return self


class _PodMetadata(_Metadata):
    creationTimestamp: _Time  # noqa: N815 - as on the wire


class _PodSpec(BaseModel):
    nodeName: str = ""  # noqa: N815 - as on the wire


class _Waiting(BaseModel):
    reason: str = ""
    message: str = ""


class _State(BaseModel):
    waiting: _Waiting | None = None
    terminated: dict[str, Any] | None = None


class _Container(BaseModel):
    name: str
    state: _State | None = None
    lastState: _State | None = None  # noqa: N815 - as on the wire


class _Condition(BaseModel):
    type: str
    status: str
    message: str = ""
    lastTransitionTime: str | None = None  # noqa: N815 - as on the wire


class _PodStatus(BaseModel):
    phase: str = ""
    podIP: str | None = None  # noqa: N815 - as on the wire
    startTime: str | None = None  # noqa: N815 - as on the wire
    conditions: list[_Condition] | None = None
    initContainerStatuses: list[_Container] | None = None  # noqa: N815 - as on the wire
    containerStatuses: list[_Container] | None = None  # noqa: N815 - as on the wire


class _Pod(_Object):
    metadata: _PodMetadata
    spec: _PodSpec | None = None  # type: ignore[assignment] # a part of it
    status: _PodStatus | None = None


class _Answer(BaseModel):
    text: str = ""
    error: str = ""

    @model_validator(mode="before")
    @classmethod
    def _has_one(cls, answer: Any) -> Any:  # noqa: ANN401 - any JSON
        if isinstance(answer, dict) and sum(key in answer for key in _ANSWER_KEYS) != 1:
            raise PydanticCustomError("answer", "must have one of the fields body, text and error")
        return answer


class _Answers(BaseModel):
    model_config = ConfigDict(extra="forbid")

    asked_at: _Time
    at: _Time
    connectors: list[_Answer]
    engine: _Answer
    metrics: _Answer | None = None


class _Look(BaseModel):
    model_config = ConfigDict(extra="forbid")

    at: _Time
    services: list[_Object]
    pools: list[_Pool]
    stateful_sets: list[_StatefulSet]
    pods: list[_Pod]
    answers: dict[str, _Answers]


class _Recording(BaseModel):
    looks: Annotated[list[_Look], Field(min_length=1)]


def first_fault(body: object) -> str | None:
    """Return which field of a recording is wrong, and what would be right, or None if all are as `replay` needs them.

    The field is a path as `jq` writes it.
    """
    try:
        looks = _Recording.model_validate(body).looks
    except ValidationError as error:
        return _fault(error.errors(include_url=False)[0])
    times = [datetime.fromisoformat(look.at) for look in looks]
    for number, (before, at) in enumerate(pairwise(times), 1):
        if at < before:
            return f".looks[{number}].at: must not be before that of the look before, {before}, but is {at}"
    return None


def _fault(first: ErrorDetails) -> str:
    where, words = _path(first["loc"]), first["msg"].replace("Input should be", "must be")
    match first["type"]:
        case "missing":
            return f"{where} is missing"
        case "extra_forbidden":
            return f"{where} is no field of a recording"
        case "model_type" | "dict_type":
            words = "must be an object"
    return f"{where}: {words}, not {_shown(first['input'])}"


def _path(parts: Sequence[str | int]) -> str:
    """Return a path that `jq` takes."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" if part.isidentifier() else f'["{part}"]' for part in parts
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}…"
