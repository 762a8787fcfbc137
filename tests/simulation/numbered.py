"""Machines by number, so that a state of the world is a tuple of numbers, and each move is worked out once."""

from typing import Any

from pdpool_connector.protocol.events import Effect, Event
from pdpool_connector.protocol.timeouts import Timeouts

from tests.simulation.common import Machines, ViolationError
from tests.simulation.snapshot import copied, form

TIMEOUTS = Timeouts(
    match_s=3.0,
    quiesce_s=2.0,
    retry_first_s=1.0,
    retry_max_s=1.0,
    query_s=2.0,
    result_s=3.0,
    acked_s=2.0,
    max_attempts=8,
)


class Numbered:
    """Machines by number: equal numbers behave alike, and what an event does to one is worked out once."""

    def __init__(self, classes: Machines) -> None:
        self._classes = classes
        self._known: dict[object, int] = {}
        self._machines: list[Any] = []
        self._moves: dict[tuple[int, Event, float], tuple[int, tuple[Effect, ...]]] = {}

    def __len__(self) -> int:
        return len(self._machines)

    def fresh(self, rank: int, life: int, *, decode: bool) -> int:
        """A machine that has just started."""
        return self._number(self._classes[decode](name(rank, life), TIMEOUTS))

    def due(self, number: int) -> float | None:
        """Seconds of its own clock until its next deadline."""
        machine = self._machines[number]
        when = machine.next_deadline
        return None if when is None else max(when - machine._now, 0.0)

    def get(self, number: int) -> Any:
        """The machine; do not change it."""
        return self._machines[number]

    def move(self, number: int, event: Event, after: float = 0.0) -> tuple[int, tuple[Effect, ...]]:
        """What becomes of a machine that takes `event` in, `after` so many seconds of its clock."""
        key = (number, event, after)
        if key not in self._moves:
            machine = copied(self._machines[number])
            try:
                effects = machine.handle(event, machine._now + after)
            except Exception as error:
                raise ViolationError(f"the machine raised {error!r} on {event}") from error
            self._moves[key] = (self._number(machine), tuple(effects))
        return self._moves[key]

    def _number(self, machine: Any) -> int:
        key = (type(machine), machine.incarnation, form(machine))
        if key not in self._known:
            self._known[key] = len(self._machines)
            self._machines.append(machine)
        return self._known[key]


def name(rank: int, life: int) -> str:
    """Incarnation of a life."""
    return f"{rank:016x}{life:016x}"


def rank_of(incarnation: str) -> int:
    """Whose life it is."""
    return int(incarnation[:16], 16)


def life_of(incarnation: str) -> int:
    """Which of its lives it is."""
    return int(incarnation[16:], 16)
