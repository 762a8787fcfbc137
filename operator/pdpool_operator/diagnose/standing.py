"""What is remembered of an instance that failed requests."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class Phase(StrEnum):
    """Whether an instance gets requests."""

    SERVING = "serving"
    OUT = "out"
    TRIAL = "trial"


@dataclass(frozen=True, slots=True)
class Standing:
    """What is remembered of one pod's failures."""

    incarnation: str
    phase: Phase
    since: datetime
    """When the phase began. Earlier outcomes do not count any more."""
    times: int = 0
    """How often the instance was taken out in a row."""
    evidence: str = ""
    """Why it was taken out, as of that moment."""

    @property
    def out(self) -> bool:
        """Whether routers must not list the instance."""
        return self.phase is Phase.OUT

    @property
    def failing(self) -> bool:
        """Whether the instance failed and has not succeeded since."""
        return self.phase is not Phase.SERVING
