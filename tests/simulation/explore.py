"""Every interleaving of a small world: few ranks, few requests, all faults up to a budget.

States are visited breadth first and each once, so that a violation comes with a shortest trace. What makes that cheap:
a machine's state has a canonical form, and what an event does to it is worked out once (`Numbered`). A state of the
world is then a tuple of numbers. Three choices make the search wider than the world, never narrower:

- A frame that was sent stays deliverable for ever, to its process: that covers loss, delay, reordering and doubling.

- Each process has a clock of its own, and any clock may stop while others run: a timer fires at any time.

- From every state that is reached, faults stop and frames in flight are lost: all must then come to an end by itself.
"""

import math
import time
from collections import Counter
from collections.abc import Callable

from pdpool_connector.protocol.events import Received, Tick
from pdpool_connector.protocol.status import Cause

from tests.simulation.common import MACHINES, Machines, ViolationError, require
from tests.simulation.scene import Scenario, State
from tests.simulation.smallworld import SmallWorld

ROUNDS = 400
"""So many rounds without a fault must suffice for everything to end; each has at least one timer or frame."""


WORLDS = (
    Scenario("an abort or a drain, a broken connection, no deadline passes", (1,), 1, aborts=1, breaks=1, timely=True),
    Scenario("two writes, aborts and data-plane errors", (2,), 2, aborts=2, errors=1),
    Scenario("aborts and broken connections", (1,), 1, aborts=1, breaks=2),
    Scenario("aborts and crashes of both sides", (1,), 1, aborts=1, crashes=2),
    Scenario("a room used again, aborts", (1, 1), 1, aborts=1),
    Scenario("a room used again, a crash or a broken connection", (1, 1), 1, breaks=1, crashes=1),
    Scenario("two requests of one prompt, aborts", (1, 1), 2, aborts=1, same=True),
    Scenario("two named requests of one prompt, a crash", (1, 1), 2, crashes=1, same=True, named=True),
    Scenario("an abort and a data-plane error", (1,), 1, aborts=1, errors=1, decode=2),
    Scenario("a crash or a broken connection", (1,), 1, breaks=1, crashes=1, decode=2),
    Scenario("an abort and a data-plane error", (1,), 1, aborts=1, errors=1, prefill=2),
    Scenario("a crash or a broken connection", (1,), 1, breaks=1, crashes=1, prefill=2),
)
LEAST_DEPTHS = (18, 12, 10, 7, 6, 5, 6, 5, 7, 5, 9, 6)
"""Of each world: reached within 4 s of CPU time; the first has no more states."""
SCENARIOS = tuple(one._replace(least_depth=depth) for one, depth in zip(WORLDS, LEAST_DEPTHS, strict=True))


class Explorer(SmallWorld):
    """Visits all states of a scenario that can be reached; see the module's docstring.

    `parents` knows each state by its hash (64 bits): from which it was reached, and by what. All states are known that
    are reached in `depth` steps; `complete`: there are no others.
    """

    def __init__(self, scenario: Scenario, classes: Machines = MACHINES) -> None:
        super().__init__(scenario, classes)
        self.parents: dict[int, tuple[int | None, str]] = {}
        self.ending: set[int] = set()
        self.depth = 0
        self.complete = False
        self.actions: Counter[str] = Counter()

    # --- The search ---

    def run(
        self,
        cpu_s: float,
        progress: Callable[[int, int], None] | None = None,
        *,
        least_depth: int = 0,
        most_s: float = math.inf,
    ) -> None:
        """Search breadth first for so long, and to `least_depth` even where that takes longer, or until everything was
        visited. Gives up after `most_s` of CPU time: then `depth` is smaller. Raises ViolationError with the trace.

        `progress` is called now and then with the depth that is being searched, and the number of states known.
        """
        start = self.start()
        origin = hash(start.key())
        self.parents[origin] = (None, "start")
        level = [(origin, start)]
        begun = time.process_time()
        while level:
            following: list[tuple[int, State]] = []
            for at, (number, state) in enumerate(level):
                most = cpu_s if self.depth >= least_depth else most_s
                if at % 16 == 0 and time.process_time() - begun > most:  # the call is slow on some machines
                    return
                if progress is not None and at % 1000 == 0:
                    progress(self.depth, len(self.parents))
                self._expand(number, state, following)
            level = following
            self.depth += 1
        self.complete = True

    def _expand(self, number: int, state: State, following: list[tuple[int, State]]) -> None:
        for label, act in self._actions(state):
            after = state.copy()
            try:
                act(after)
                key = hash(after.key())
                if key in self.parents:
                    continue
                self.parents[key] = (number, label)
                self.actions[label.split()[0]] += 1
                self._come_to_an_end(after)
            except ViolationError as error:
                steps = [*self._trace(number), label]
                lines = "\n".join(f"  {step}" for step in steps)
                raise ViolationError(f"{error}\nthe shortest trace, {len(steps)} steps:\n{lines}") from None
            following.append((key, after))

    def _trace(self, number: int | None) -> list[str]:
        steps: list[str] = []
        while number is not None:
            number, label = self.parents[number]
            steps.append(label)
        return steps[-2::-1]

    # --- The end ---

    def _come_to_an_end(self, state: State) -> None:
        """Faults stop, frames in flight are lost, and all must end: first what can, then, with proof, what is held."""
        state.mail.clear()
        calm = state.copy()
        calm.budget = (0, 0, 0, 0)
        calm.soup = frozenset()
        seen: list[int] = []
        proved = False
        for _ in range(ROUNDS):
            key = hash((proved, calm.key()))
            if key in self.ending:
                break
            seen.append(key)
            if self._round(calm):
                continue
            if proved and not self._left(calm):
                break
            if not proved and self._only_holds(calm):
                self._prove(calm)
                proved = True
            elif not self._wait(calm):
                raise ViolationError(f"it does not come to an end: {self._left(calm)}")
        else:
            raise ViolationError(f"it does not come to an end: {self._left(calm)}")
        self.ending.update(seen)

    def _round(self, state: State) -> bool:
        """Everything that can happen without a fault, once; False when there is nothing but to wait."""
        mail, state.mail = state.mail, []
        for frame in mail:
            rank, life, content = self.frames[frame]
            if state.lives[rank] == life:
                self.do(state, rank, Received(content))
        for link, (at_prefill, at_decode) in enumerate(state.up):
            if at_decode and not at_prefill:
                self.lose(state, link, at_prefill=False)
        action = next((act for _, act in self._ordinary(state, again=False)), None)
        if action is not None:
            action(state)
        state.soup = frozenset()
        return bool(mail) or action is not None

    def _wait(self, state: State) -> bool:
        """Time passes for all alike, to whichever deadline comes first."""
        dues = [due for machine in state.machines if (due := self.machines.due(machine)) is not None]
        if not dues:
            return False
        for rank in range(self.scenario.ranks):
            self.do(state, rank, Tick(), min(dues))
        if self.scenario.timely:
            late = [
                self.label(rank)
                for rank in self.decodes
                for half in state.halves[rank]
                if half.cause is Cause.TIMED_OUT
            ]
            require(not late, f"{late} waited for a deadline")
        return True

    def _only_holds(self, state: State) -> bool:
        """True when each wait is one for a proof."""
        waiting = any(half.phase and not half.ended for rank in state.halves for half in rank)
        aborting = (self.machines.get(state.machines[rank]).queues.count("aborting") for rank in self.decodes)
        return not waiting and not any(aborting)

    def _prove(self, state: State) -> None:
        """The dead are fenced, each once; only the end of one side proves that an unsettled write is over."""
        for ends in sorted(state.unsettled):
            left = sum(len(flight.left) for flight in state.flights if flight.reported)
            self._crash(state, ends[left % 2])
        for rank, life in self.dead(state):
            if (rank, life) not in state.fenced:
                self._fence(state, rank, life)
        state.flights = [flight for flight in state.flights if not flight.reported]

    def _left(self, state: State) -> str:
        """What is left behind; empty when nothing is."""
        ranks = range(self.scenario.ranks)
        rows = [(rank, self.machines.get(state.machines[rank]).rows) for rank in ranks]
        left = [f"{count} rows at {self.label(rank)}" for rank, count in rows if count]
        left += [
            f"r{request} at {self.label(rank)}: {half.phase} {half.cause}"
            for rank in ranks
            for request, half in enumerate(state.halves[rank])
            if half.phase and not half.releasable
        ]
        return ", ".join(left)
