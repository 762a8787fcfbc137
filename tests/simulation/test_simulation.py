"""Both machines under the deterministic scheduler: no seed may break a promise, and every fault put back must."""

import os

import pytest
from pdpool_connector.protocol.events import WriteResult

from tests.simulation.faults import Fault, faulty_machines
from tests.simulation.ground import Ask
from tests.simulation.kinds import MACHINES, Direction
from tests.simulation.memory import ViolationError
from tests.simulation.mutants import MUTANTS
from tests.simulation.player import Player, explain, replay
from tests.simulation.shrink import shrink
from tests.simulation.world import Step, World

SEEDS = int(os.environ.get("PDPOOL_SIMULATION_SEEDS", "60"))
FIRST = int(os.environ.get("PDPOOL_SIMULATION_FIRST", "0"))
QUICK = (
    "releases on abort",
    "one writer's Drained is enough",
    "a late Open resurrects",
    "one part's Done is all",
    "READ: done before the last read landed",
    "READ: drained means told to stop",
    "READ: announced pages are still ours",
)
"""`make simulate` catches all of them; these few show in seconds that the simulation has eyes."""


@pytest.mark.parametrize("direction", MACHINES)
def test_no_seed_breaks_a_promise(direction: Direction) -> None:
    """A failure names its seed; `python -m proof.simulate --direction D --seed N` plays it again."""
    players = [Player(seed, direction) for seed in range(FIRST, FIRST + SEEDS)]
    for player in players:
        try:
            player.run()
        except ViolationError as error:
            pytest.fail(str(explain(player, str(error))))
    asked, done = sum(len(player.world.asks) for player in players), sum(player.world.done for player in players)
    if SEEDS >= 50:
        assert 0.2 < done / asked < 2, "faults everywhere or nowhere prove little"


def test_the_same_seed_plays_the_same_game() -> None:
    first, second = Player(4, "read"), Player(4, "read")
    first.run(), second.run()
    assert (first.schedule, first.world.now) == (second.schedule, second.world.now)
    assert first.world.happened == second.world.happened


def test_a_schedule_can_be_played_again_and_shortened() -> None:
    player, what = caught(MUTANTS["one writer's Drained is enough"])
    failure = explain(player, what)
    assert 0 < len(failure.trace) < len(player.schedule) / 5
    assert replay(player, failure.trace) == failure.what
    for left_out in range(len(failure.trace)):
        assert replay(player, failure.trace[:left_out] + failure.trace[left_out + 1 :]) != failure.what


def test_shrinking_keeps_just_what_fails() -> None:
    assert shrink(range(100), lambda items: {7, 50, 51} <= set(items)) == [7, 50, 51]


def test_decode_never_reports_success_with_bytes_from_pages_that_prefill_has_given_away() -> None:
    """A reader gets what is in the page by then; only its own content may ever count as success."""
    world = World({"p0": 1, "d0": 1}, faulty_machines(MUTANTS["READ: telling the abort is enough"]), "read")
    first, second = (Ask(tag, "p0", "d0", tag, 0, 8, 0, 0, f"r{tag}") for tag in range(2))
    world.check_untouched = lambda *_: None  # type: ignore[method-assign] # the invariant that would notice it before
    for step in [Step("ask", first), Step("post", (0, "p0.0")), Step("post", (0, "d0.0")), *pair_up()]:
        assert world.apply(step)
    for kind in ("Open", "Accepted"):
        assert world.apply(Step("deliver", (next(one.name for one in world.network.letters if kind in one.name),)))
    assert world.apply(Step("send", (0, "p0.0", 8)))
    assert world.apply(Step("deliver", ("p0.0>d0.0 Computed 0 r0",)))
    assert world.apply(Step("abort", (0, "p0.0")))
    assert world.apply(Step("ask", second))
    assert world.apply(Step("post", (1, "p0.0")))
    assert world.apply(Step("send", (1, "p0.0", 8)))
    while world.apply(Step("land", ("d0.0>p0.0 r0 read 1",))):
        pass
    with pytest.raises(ViolationError, match=r"false success: page 0 holds \('r1', 0\): r0"):
        world.apply(Step("settle", ("d0.0>p0.0 r0 read 1", WriteResult.LANDED)))


def pair_up() -> list[Step]:
    return [Step("greet", ("d0.0", "p0")), Step("link", ("d0.0", "p0"))]


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_put_back_is_caught(name: str) -> None:
    caught(MUTANTS[name])


@pytest.mark.parametrize("name", MUTANTS)
def test_each_fault_is_a_change_of_today_s_code(name: str) -> None:
    machines = faulty_machines(MUTANTS[name])
    names = {direction: [cls.__name__ for cls in pair] for direction, pair in machines.items()}
    assert names == {"write": ["PrefillMachine", "DecodeMachine"], "read": ["PrefillReadMachine", "DecodeReadMachine"]}


def caught(fault: Fault, most_seeds: int = 60) -> tuple[Player, str]:
    for seed in range(most_seeds):
        player = Player(seed, fault.direction, faulty_machines(fault))
        try:
            player.run()
        except ViolationError as error:
            return player, str(error)
    pytest.fail(f"{fault.name} survived {most_seeds} seeds")
