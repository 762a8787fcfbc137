"""What the operator must say and do in each scenario. Read from tests/cluster/faults.yaml."""

from enum import StrEnum
from pathlib import Path
from typing import Final, Literal, Self

import yaml
from pdpool_operator.api.reasons import Reason
from pdpool_operator.diagnose.model import Verdict
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from dev.paths import CHECKOUT

FILE: Final = CHECKOUT / "tests" / "cluster" / "faults.yaml"
ACCUSES: Final = frozenset({Verdict.STUCK, Verdict.FAILING})
"""Verdicts on which an instance is repaired."""

Side = Literal["prefill", "decode"]


class Mode(StrEnum):
    """Value of `spec.repair.mode` in a run."""

    OBSERVE = "Observe"
    ENFORCE = "Enforce"


class Restart(StrEnum):
    """Whether the instance at fault is to be restarted."""

    REQUIRED = "Required"
    ALLOWED = "Allowed"
    FORBIDDEN = "Forbidden"


class Expectation(BaseModel):
    """One scenario of the file. The file documents the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str = Field(min_length=1)
    verdicts: tuple[Verdict, ...]
    side: Side | None = None
    reasons: tuple[Reason, ...] = ()
    never: tuple[Reason, ...] = ()
    within_s: float | None = Field(default=None, gt=0)
    repair: Restart
    may_lose: int = Field(ge=0)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if strange := set(self.verdicts) - ACCUSES:
            raise ValueError(f"verdicts: {', '.join(sorted(strange))} accuses no instance; use Stuck and Failing")
        if (self.verdicts or self.reasons) and (self.side is None or self.within_s is None):
            raise ValueError("side and within_s are required with verdicts and reasons")
        if self.repair is Restart.REQUIRED and not self.verdicts:
            raise ValueError("repair: Required needs verdicts, because only an instance at fault is restarted")
        return self


def read(file: Path = FILE) -> dict[str, Expectation]:
    """Return all scenarios by name.

    Raises:
        ValueError: the file has a fault. The message names the scenario and the field.
    """
    try:
        return TypeAdapter(dict[str, Expectation]).validate_python(yaml.safe_load(file.read_text()))
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"{file.name}: {'; '.join(faults)}") from None
