"""What a worker process of `make simulate` does; plain data in, plain data out."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.simulation import random_world
from tests.simulation.common import Machines, ViolationError
from tests.simulation.explore import SCENARIOS, Explorer
from tests.simulation.machine_mutants import MUTANTS
from tests.simulation.mutants import NotTriedError, faulty_machines
from tests.simulation.scene import Scenario
from tests.simulation.wiring import WIRING, caught_by, outcome_of

EASY_RUNS = 150
"""Random runs that catch most mutants; the small worlds are searched for the others, then more runs follow."""
DEPTH_S = 180.0
"""CPU time within which each scenario must come to its least depth, about fifty times of what that takes."""
SEARCH_S = 1.0, 8.0
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
        """Whether it came to the depth that it promises."""
        return self.complete or self.depth >= self.least_depth


@dataclass
class Played:
    """Random runs. `happened`: how often each fault, and each end of a half, occurred."""

    runs: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, other: "Played") -> None:
        """Take another's runs in."""
        self.runs += other.runs
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
        """Whether the simulation or a test noticed it."""
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


def play(seed: int, runs: int) -> Played:
    """Random runs from one seed."""
    try:
        happened = random_world.play(seed, runs)
    except ViolationError as error:
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
        return Played(violations=[f"{said}\n(python -m proof.simulate --seed {seed})"])
    return Played(happened.pop("runs"), happened)


def catch(name: str, most: int) -> Mutant:
    """Run random worlds with a fault and search the small worlds, by turns, until something breaks."""
    mutant = MUTANTS[name]
    machines = faulty_machines(mutant)
    easy = min(EASY_RUNS, most)
    tries: tuple[Callable[[Machines], tuple[str, str] | None], ...] = (
        partial(search_faulty, SCENARIOS[:1], SEARCH_S[0]),
        partial(play_faulty, 0, easy),
        partial(search_faulty, SCENARIOS, SEARCH_S[0]),
        partial(play_faulty, 1, max(most - easy, 1)),
        partial(search_faulty, SCENARIOS, SEARCH_S[1]),
    )
    for one in tries:
        if how := one(machines):
            return Mutant(name, mutant.hazard, *how)
    return Mutant(name, mutant.hazard, "", f"survived {most} runs and the search")


def play_faulty(seed: int, runs: int, machines: Machines) -> tuple[str, str] | None:
    """How, and what, random runs break; None if nothing."""
    try:
        random_world.play(seed, runs, machines, shorten=False)
    except ViolationError as error:
        return f"seed {seed}", str(error)
    return None


def search_faulty(scenarios: Sequence[Scenario], each_s: float, machines: Machines) -> tuple[str, str] | None:
    """What is broken in some small world, each of which is searched for so long; None if nothing is."""
    for scenario in scenarios:
        try:
            Explorer(scenario, machines).run(each_s)
        except ViolationError as error:
            return "search", str(error)
    return None


def wiring_without_fault() -> str:
    """Which of the tests of the wiring's mutants fails on the code as it is; "" when they pass."""
    files = dict.fromkeys(mutant.tests[0] for mutant in WIRING.values())
    names = dict.fromkeys(mutant.sign for mutant in WIRING.values())
    try:
        return str(outcome_of((*files, "-k", " or ".join(names))))
    except NotTriedError as error:
        return str(error)


def break_wiring(name: str) -> Mutant:
    """Run the tests of a mutant of the wiring against it."""
    mutant = WIRING[name]
    try:
        failed = caught_by(mutant)
    except NotTriedError as error:
        return Mutant(name, mutant.hazard, "", str(error))
    return Mutant(name, mutant.hazard, "test" if failed else "", failed or "no test failed for it")
