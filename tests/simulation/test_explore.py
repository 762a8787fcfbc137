"""The exhaustive search: it breaks nothing, finds faults by a shortest trace, and merges only what is equal."""

import pytest
from pdpool_connector.protocol.events import Tick

from tests.simulation.common import ViolationError
from tests.simulation.ending import everyones
from tests.simulation.explore import SCENARIOS, Explorer
from tests.simulation.machine_mutants import MUTANTS
from tests.simulation.mutants import faulty_machines
from tests.simulation.parts import Ask
from tests.simulation.scene import Scenario
from tests.simulation.snapshot import copied, form
from tests.simulation.world import World


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_no_interleaving_breaks_a_promise(scenario: Scenario) -> None:
    explorer = Explorer(scenario)
    explorer.run(cpu_s=0.5, least_depth=3)
    assert explorer.depth >= 3, "fewer steps prove nothing"


@pytest.mark.parametrize(
    ("name", "scenario", "step"),
    [
        ("releases on abort", 1, "abort d0 r0"),
        ("an unsettled write counts as settled", 1, "unsettled p0-d0 r0 0"),
        ("one writer's settled result is enough", 10, "timer p0"),
    ],
)
def test_fault_is_found_by_a_shortest_trace(name: str, scenario: int, step: str) -> None:
    with pytest.raises(ViolationError) as found:
        Explorer(SCENARIOS[scenario], faulty_machines(MUTANTS[name])).run(cpu_s=30)
    steps = [line.strip() for line in str(found.value).split("steps:\n")[1].splitlines()]
    assert step in steps
    assert len(steps) <= 14


def test_copy_behaves_like_its_original_and_shares_nothing() -> None:
    world = World({"p0": 2, "d0": 2})
    world.ask(Ask(0, "p0", "d0", 1, 7, 0))
    for _ in range(14):
        world.take(list(world.progress())[-1])
    assert [str(half) for _, half in everyones(world)]
    for process in world.processes.values():
        machine = process.machine
        other = copied(machine)
        before = form(machine)
        assert form(other) == before
        due = machine.next_deadline
        assert due is not None
        effects = other.handle(Tick(), due)
        assert form(machine) == before
        assert machine.handle(Tick(), due) == effects
        assert form(machine) == form(other) != before
