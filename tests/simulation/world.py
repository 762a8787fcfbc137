"""A world in which both machines run, one named step at a time; what each step breaks is noticed at once.

Nothing here is random: a step that does not apply where the world stands says so and changes nothing. A schedule is
therefore replayed by playing its steps again, and shortened by leaving some out.
"""

from collections.abc import Callable
from typing import NamedTuple

from pdpool_connector.protocol.events import Tick

from tests.simulation.engines import Engines
from tests.simulation.hosts import DEADLINE_S
from tests.simulation.kinds import MACHINES, Direction, Machines
from tests.simulation.links import Links
from tests.simulation.memory import ViolationError
from tests.simulation.wires import Wires

LATE_S = 1.0
"""By so much a hand-off may be over its deadline: the world's clock goes in steps."""


class Step(NamedTuple):
    """One thing that happens. `kind` names the method of `World` that does it."""

    kind: str
    args: tuple[object, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.kind, *(f"{arg:.3f}" if isinstance(arg, float) else str(arg) for arg in self.args)])


class World(Engines, Links, Wires):
    """Time, and everything that happens in it. See the module's docstring."""

    def __init__(
        self,
        shape: dict[str, int],
        machines: Machines = MACHINES,
        direction: Direction = "write",
        *,
        prompts: bool = True,
    ) -> None:
        super().__init__(shape, machines, direction, prompts)
        for instance, ranks in shape.items():
            for rank in range(ranks):
                self.boot(f"{instance}.{rank}")

    def apply(self, step: Step) -> bool:
        """Take a step; False when it does not apply. Raises ViolationError when it breaks a promise."""
        method: Callable[..., bool] = getattr(self, step.kind)
        applied = method(*step.args)
        if applied:
            self.happened[step.kind] += 1
        return applied

    def wait(self, seconds: float) -> bool:
        """Time passes."""
        self.now += seconds
        for process in self.processes.values():
            due = process.machine.next_deadline
            if due is not None and due <= self.now and not process.frozen:
                self.do(process, Tick())
        for process in self.processes.values():
            for half in process.halves.values():
                if not half.ended and self.now > half.posted + DEADLINE_S + LATE_S and not process.frozen:
                    raise ViolationError(f"a hand-off outlived its deadline: {half}")
        return True

    def wait_for_due(self) -> bool:
        """Time passes up to the next deadline of anybody."""
        due = [p.machine.next_deadline for p in self.processes.values() if not p.frozen]
        nearest = min((when for when in due if when is not None), default=self.now)
        return self.wait(max(nearest - self.now, 0.0))
