"""What a deed needs: the stage, the watch, the traffic, and the instance at fault."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from proof.cluster.stage import Stage
from proof.faults.watch import VerdictWatch
from tests.cluster.stack import Object
from tests.cluster.stack_setup import Answers
from tests.cluster.stack_traffic import Traffic

CHOSEN: Final = 1
"""Index of the instance at fault."""


@dataclass
class Scene:
    """What a deed needs.

    Attributes:
        stage: Where it is done.
        watch: Its clock starts with the fault.
        answers: Right answers to the prompts of the traffic.
        patience_s: Longest wait of a client, in seconds.
        number: Of the run, from 1.
        more: Traffic that the deed has added.
    """

    stage: Stage
    watch: VerdictWatch
    answers: Answers
    patience_s: float
    number: int
    more: list[Traffic] = field(default_factory=list)

    def pod(self, side: str) -> Object:
        """Return the pod of the instance at fault."""
        pod: Object = self.stage.stack.look("pod", f"chat-{side}-{CHOSEN}-0")
        return pod


Deed = Callable[[Scene], str]
"""Begins a fault and starts the clock. Returns the instance at fault, empty if there is none."""
