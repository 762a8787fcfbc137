"""What `make simulate` asks of its runs before it says `simulate ok`."""

from collections.abc import Sequence

from proof.simulate.jobs import Explored, Mutant, Played
from tests.simulation.random_world import FAULTS


def violations(explored: Sequence[Explored], played: Played) -> list[str]:
    """Every promise that was broken, with how it came to that."""
    return [text for one in explored for text in one.violations] + played.violations


def shortcomings(explored: Sequence[Explored], played: Played, mutants: Sequence[Mutant]) -> list[str]:
    """What was not tried, or not noticed, so that nothing broken means little; a line each."""
    shallow = [
        f"{one.name}: searched to depth {one.depth}, at least {one.least_depth} is promised"
        for one in sorted(explored, key=lambda one: one.number)
        if not one.deep_enough and not one.violations  # the search ends with the first
    ]
    unseen = [f"no run had the fault {kind}" for kind in FAULTS if not played.happened[kind]]
    survived = [f"mutant {one.name} ({one.hazard}) survived" for one in mutants if not one.caught]
    return shallow + unseen + survived
