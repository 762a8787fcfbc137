"""What a drill is."""

from collections.abc import Callable
from dataclasses import dataclass

from proof.cluster.stage import Stage
from proof.cluster.words import Expected


@dataclass(frozen=True)
class Scenario:
    """One drill.

    Attributes:
        name: As in `--only`.
        about: One line.
        deed: Does it on the stage. It ends when the fault has ended.
        expected: The words that pdpool must give, and what the drill may cost.
        lasts_s: Typical duration in seconds, for the time left.
        recovers_within_s: Longest time in seconds from the end of the deed until all is Ready again.
    """

    name: str
    about: str
    deed: Callable[[Stage], None]
    expected: Expected
    lasts_s: float = 90.0
    recovers_within_s: float = 150.0
