"""Random worlds: no run breaks a promise, the same seed gives the same runs, and faults are shortened."""

import os

import pytest

from tests.simulation.common import ViolationError
from tests.simulation.machine_mutants import MUTANTS
from tests.simulation.mutants import faulty_machines
from tests.simulation.random_world import play

RUNS = int(os.environ.get("PDPOOL_SIMULATION_RUNS", "30"))


@pytest.mark.parametrize("seed", range(2))
def test_no_random_run_breaks_a_promise(seed: int) -> None:
    happened = play(seed, RUNS)
    assert happened["d done"] > happened["requests"] / 8, "faults everywhere prove little"


def test_same_seed_gives_the_same_runs() -> None:
    assert play(3, 5) == play(3, 5)


def test_violation_shows_a_short_run() -> None:
    with pytest.raises(ViolationError, match="what happened:") as found:
        play(3, 100, faulty_machines(MUTANTS["releases on abort"]))
    steps = str(found.value).split("what happened:\n")[1].splitlines()
    assert len(steps) < 60
