"""Both machines under the deterministic scheduler: no seed may break a promise, and every fault put back must."""

import os

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.world import ViolationError, World

SEEDS = int(os.environ.get("PDPOOL_SIMULATION_SEEDS", "60"))
FIRST = int(os.environ.get("PDPOOL_SIMULATION_FIRST", "0"))
MUTANT_SEEDS = 150


def test_no_seed_breaks_a_promise() -> None:
    """A failure names its seed; `PDPOOL_SIMULATION_FIRST=<seed> PDPOOL_SIMULATION_SEEDS=1` plays it again."""
    worlds = [World(seed).run() for seed in range(FIRST, FIRST + SEEDS)]
    requests, done = sum(world.posted for world in worlds), sum(world.done for world in worlds)
    print(f"\nseeds {FIRST}..{FIRST + SEEDS - 1}: {requests} requests, {done} handed over, 0 violations")  # noqa: T201 - for pytest -s
    if SEEDS >= 50:
        assert 0.2 < done / requests < 0.9, "faults everywhere or nowhere prove little"


def test_the_same_seed_plays_the_same_game() -> None:
    first, second = World(4).run(), World(4).run()
    assert (first.now, first.done, first.log) == (second.now, second.done, second.log)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_put_back_is_caught(name: str) -> None:
    prefill, decode = MUTANTS[name]
    for seed in range(MUTANT_SEEDS):
        try:
            World(seed, prefill=prefill, decode=decode).run()
        except ViolationError:
            return
    pytest.fail(f"{name} survived {MUTANT_SEEDS} seeds")
