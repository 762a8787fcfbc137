"""The exhaustive search: it breaks nothing, finds what is broken by the shortest way, and merges only what is equal."""

import pytest
from pdpool_connector.protocol.events import Tick

from tests.simulation.explore import SCENARIOS, Explorer, Scenario
from tests.simulation.faults import faulty_machines
from tests.simulation.kinds import MACHINES, Direction
from tests.simulation.memory import ViolationError
from tests.simulation.mutants import MUTANTS
from tests.simulation.player import Player
from tests.simulation.snapshot import copied, form


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_no_interleaving_breaks_a_promise(scenario: Scenario) -> None:
    explorer = Explorer(scenario)
    explorer.run(cpu_s=0.6, least_depth=3)
    assert explorer.depth >= 3, "so little shows nothing"


@pytest.mark.parametrize(
    ("fault", "scenario", "last"),
    [
        ("releases on abort", 0, "abort d0 r0"),
        ("an error is the end of writing", 0, "unsettled p0-d0 r0 0"),
        ("trusts a lost connection", 1, "break d0-p0 at d"),
        ("READ: drained means told to stop", 5, "abort d0 r0"),
        ("READ: telling the abort is enough", 5, "abort p0 r0"),
        ("one part's failure is not passed on", 10, "timer d1"),
        ("one writer's Drained is enough", 12, "timer p0"),
    ],
)
def test_a_fault_is_found_by_a_shortest_trace(fault: str, scenario: int, last: str) -> None:
    with pytest.raises(ViolationError) as found:
        Explorer(SCENARIOS[scenario], faulty_machines(MUTANTS[fault])).run(cpu_s=30)
    steps = str(found.value).split("steps:\n")[1].splitlines()
    assert steps[0].strip().startswith("post")
    assert last in [step.strip() for step in steps]
    assert len(steps) <= 12


@pytest.mark.parametrize("direction", MACHINES)
def test_a_copy_does_what_its_original_does_and_shares_nothing_with_it(direction: Direction) -> None:
    player = Player(6, direction, steps=300)
    player.play()
    for process in player.world.processes.values():
        machine = process.machine
        other = copied(machine)
        before = form(machine)
        assert form(other) == before
        if (due := machine.next_deadline) is not None:
            effects = other.handle(Tick(), due)
            assert form(machine) == before
            assert machine.handle(Tick(), due) == effects
            assert form(machine) == form(other) != before
