"""Both machines under the deterministic scheduler: no seed may break a promise, and every fault put back must."""

import os

import pytest

from tests.simulation.faults import Fault, faulty_machines
from tests.simulation.memory import ViolationError
from tests.simulation.mutants import MUTANTS
from tests.simulation.player import Player, explain, replay
from tests.simulation.shrink import shrink

SEEDS = int(os.environ.get("PDPOOL_SIMULATION_SEEDS", "60"))
FIRST = int(os.environ.get("PDPOOL_SIMULATION_FIRST", "0"))
QUICK = ("releases on abort", "one writer's Drained is enough", "a late Open resurrects", "one part's Done is all")
"""`make simulate` catches all of them; these few show in seconds that the simulation has eyes."""


def test_no_seed_breaks_a_promise() -> None:
    """A failure names its seed; `python -m dev.simulate --seed N` plays it again."""
    players = [Player(seed) for seed in range(FIRST, FIRST + SEEDS)]
    for player in players:
        try:
            player.run()
        except ViolationError as error:
            pytest.fail(str(explain(player, str(error))))
    asked, done = sum(len(player.world.asks) for player in players), sum(player.world.done for player in players)
    if SEEDS >= 50:
        assert 0.2 < done / asked < 2, "faults everywhere or nowhere prove little"


def test_the_same_seed_plays_the_same_game() -> None:
    first, second = Player(4), Player(4)
    first.run(), second.run()
    assert (first.schedule, first.world.now) == (second.schedule, second.world.now)
    assert first.world.happened == second.world.happened


def test_a_schedule_can_be_played_again_and_shortened() -> None:
    player, what = caught(MUTANTS["releases on abort"])
    failure = explain(player, what)
    assert 0 < len(failure.trace) < len(player.schedule) / 5
    assert replay(player, failure.trace) == failure.what
    for left_out in range(len(failure.trace)):
        assert replay(player, failure.trace[:left_out] + failure.trace[left_out + 1 :]) != failure.what


def test_shrinking_keeps_just_what_fails() -> None:
    assert shrink(range(100), lambda items: {7, 50, 51} <= set(items)) == [7, 50, 51]


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_put_back_is_caught(name: str) -> None:
    caught(MUTANTS[name])


@pytest.mark.parametrize("name", MUTANTS)
def test_each_fault_is_a_change_of_today_s_code(name: str) -> None:
    prefill, decode = faulty_machines(MUTANTS[name])
    assert prefill.__name__ == "PrefillMachine"
    assert decode.__name__ == "DecodeMachine"


def caught(fault: Fault, most_seeds: int = 60) -> tuple[Player, str]:
    for seed in range(most_seeds):
        player = Player(seed, faulty_machines(fault))
        try:
            player.run()
        except ViolationError as error:
            return player, str(error)
    pytest.fail(f"{fault.name} survived {most_seeds} seeds")
