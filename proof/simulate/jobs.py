"""What a worker process of `make simulate` does; plain data in, plain data out."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from tests.simulation.explore import SCENARIOS, Explorer
from tests.simulation.faults import faulty_machines
from tests.simulation.kinds import Direction, Machines
from tests.simulation.memory import ViolationError
from tests.simulation.mutants import MUTANTS
from tests.simulation.player import Player, explain
from tests.simulation.wiring import WIRING, NotTriedError, caught_by, outcome_of

FAULTS = (
    "lose",
    "double",
    "linger",
    "forge",
    "cut",
    "lost",
    "refuse",
    "crash",
    "shut_down",
    "drain",
    "freeze",
    "fence",
    "abort",
    "ask_again",
    "lose_post",
    "decline",
    "transfer_failed",
    "transfer_unsettled",
    "land_late",
)
"""What happens in the random world that is a fault, or that engines do unasked; see `World` for what each of it is.
`land_late` counts units that land when their mover was told that it is over, or is dead."""
EASY_SEEDS = 200
"""Runs that catch most mutants; what is left is first searched for in the small worlds, then played on with."""
DEPTH_S = 180.0
"""CPU time within which each scenario must come to its least depth, about fifty times of what that takes."""
SEARCH_S = 2.0, 6.0
"""CPU time of each small world, at first and when nothing else has caught the mutant."""


@dataclass
class Explored:
    """One scenario of the exhaustive search."""

    number: int
    name: str
    states: int
    depth: int
    least_depth: int
    complete: bool
    machines: int
    violations: list[str]

    @property
    def deep_enough(self) -> bool:
        """It came to the depth that it promises."""
        return self.complete or self.depth >= self.least_depth


@dataclass
class Played:
    """Random runs."""

    runs: int = 0
    requests: int = 0
    done: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, other: "Played") -> None:
        """Take another's runs in."""
        self.runs += other.runs
        self.requests += other.requests
        self.done += other.done
        self.happened += other.happened
        self.violations += other.violations


@dataclass
class Mutant:
    """A fault put back. `how` it was caught, "" when it was not; `what` broke."""

    name: str
    hazard: str
    how: str
    what: str

    @property
    def caught(self) -> bool:
        """Somebody noticed."""
        return bool(self.how)


def explore(number: int, cpu_s: float) -> Explored:
    """Search one scenario: for so long, and on to its least depth."""
    explorer = Explorer(scenario := SCENARIOS[number])
    violations = []
    try:
        explorer.run(cpu_s, least_depth=scenario.least_depth, most_s=max(cpu_s, DEPTH_S))
    except ViolationError as error:
        violations.append(f"{explorer.scenario}: {error}")
    return Explored(
        number,
        str(scenario),
        len(explorer.parents),
        explorer.depth,
        scenario.least_depth,
        explorer.complete,
        len(explorer.machines),
        violations,
    )


def play(direction: Direction, first: int, count: int) -> Played:
    """Play a few seeds."""
    played = Played()
    for seed in range(first, first + count):
        player = Player(seed, direction)
        try:
            player.run()
        except ViolationError as error:
            played.violations.append(
                f"{explain(player, str(error))}\n(python -m proof.simulate --direction {direction} --seed {seed})"
            )
        played.runs += 1
        played.requests += len(player.world.asks)
        played.done += player.world.done
        played.happened += player.world.happened
    return played


def one(direction: Direction, seed: int) -> tuple[list[str], str]:
    """The steps of one seed, and what it breaks."""
    player = Player(seed, direction)
    try:
        player.run()
    except ViolationError as error:
        return [str(step) for step in player.schedule], str(explain(player, str(error)))
    return [str(step) for step in player.schedule], ""


def catch(name: str, most: int) -> Mutant:
    """Play with a fault and search the small worlds, by turns, until something breaks."""
    fault = MUTANTS[name]
    machines = faulty_machines(fault)
    easy = min(EASY_SEEDS, most)
    tries = (
        partial(play_faulty, range(easy)),
        partial(search_faulty, SEARCH_S[0]),
        partial(play_faulty, range(easy, most)),
        partial(search_faulty, SEARCH_S[1]),
    )
    for one in tries:
        if how := one(fault.direction, machines):
            return Mutant(name, fault.hazard, *how)
    return Mutant(name, fault.hazard, "", f"survived {most} runs and the search")


def play_faulty(seeds: range, direction: Direction, machines: Machines) -> tuple[str, str] | None:
    """Which seed breaks what, None if none does."""
    for seed in seeds:
        try:
            Player(seed, direction, machines).run()
        except ViolationError as error:
            return f"seed {seed}", str(error)
    return None


def search_faulty(each_s: float, direction: Direction, machines: Machines) -> tuple[str, str] | None:
    """What is broken in some small world, which is searched for so long; None if nothing is."""
    for scenario in (one for one in SCENARIOS if one.direction == direction):
        try:
            Explorer(scenario, machines).run(each_s)
        except ViolationError as error:
            return "search", str(error)
    return None


def wiring_without_fault() -> str:
    """All tests that the wiring's mutants are held against, on the code as it is; "" when they pass."""
    for tests in {tuple(fault.tests): fault.tests for fault in WIRING.values()}.values():
        try:
            failed: str = outcome_of(tests)
        except NotTriedError as error:
            return str(error)
        if failed:
            return failed
    return ""


def break_wiring(name: str) -> Mutant:
    """Run a mutant of the runtime against its tests."""
    fault = WIRING[name]
    try:
        failed = caught_by(fault)
    except NotTriedError as error:
        return Mutant(name, fault.hazard, "", str(error))
    return Mutant(name, fault.hazard, "test" if failed else "", failed or "no test failed for it")
