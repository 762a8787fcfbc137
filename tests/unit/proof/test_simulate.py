"""When `make simulate` may say ok: nothing broken, and everything tried that it promises to try."""

from collections import Counter
from dataclasses import replace

import pytest
from click.testing import CliRunner

from proof.simulate import __main__ as command
from proof.simulate import jobs
from proof.simulate.jobs import FAULTS, Explored, Mutant, Played
from proof.simulate.verdict import shortcomings, violations
from tests.simulation.explore import SCENARIOS, Explorer

SEARCHED = Explored(0, "one request", 4456, 10, 10, complete=False, machines=90, violations=[])
PLAYED = Played(runs=1000, requests=2000, done=900, happened=Counter(dict.fromkeys(FAULTS, 1)))
CAUGHT = Mutant("releases on abort", "H4", "seed 3", "pages are touched")


def test_nothing_is_missing_where_all_was_tried_and_noticed() -> None:
    assert shortcomings([SEARCHED], PLAYED, [CAUGHT]) == violations([SEARCHED], PLAYED) == []


def test_a_scenario_that_stayed_above_its_depth_is_named_with_it() -> None:
    shallow = replace(SEARCHED, number=1, name="two requests", depth=9)
    assert shortcomings([SEARCHED, shallow], PLAYED, [CAUGHT]) == [
        "two requests: searched to depth 9, at least 10 is promised"
    ]


def test_there_is_no_depth_below_all_states_there_are() -> None:
    assert shortcomings([replace(SEARCHED, depth=4, complete=True)], PLAYED, [CAUGHT]) == []


@pytest.mark.parametrize("kind", FAULTS)
def test_a_kind_of_fault_that_no_run_had_is_named(kind: str) -> None:
    happened = PLAYED.happened - Counter([kind])
    assert shortcomings([SEARCHED], replace(PLAYED, happened=happened), []) == [f"no run had the fault {kind}"]


def test_a_mutant_that_survived_is_named() -> None:
    survivor = replace(CAUGHT, how="", what="survived 1000 runs and the search")
    assert shortcomings([SEARCHED], PLAYED, [survivor, CAUGHT]) == ["mutant releases on abort (H4) survived"]


def test_what_is_broken_is_a_violation_wherever_it_was_found() -> None:
    broken = replace(SEARCHED, depth=2, violations=["found by the search"])
    assert violations([broken], replace(PLAYED, violations=["found at random"])) == [
        "found by the search",
        "found at random",
    ]
    assert shortcomings([broken], PLAYED, []) == [], "it ended there"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({}, ""),
        ({"explored": replace(SEARCHED, depth=9)}, "NOT SHOWN one request: searched to depth 9"),
        ({"explored": replace(SEARCHED, violations=["pages are touched"])}, "VIOLATION pages are touched"),
        ({"played": replace(PLAYED, happened=Counter(lose=1))}, "NOT SHOWN no run had the fault crash"),
        ({"played": replace(PLAYED, violations=["false success"])}, "VIOLATION false success"),
        ({"mutant": replace(CAUGHT, how="")}, "NOT SHOWN mutant releases on abort (H4) survived"),
    ],
    ids=["nothing is missing", "depth", "found by the search", "fault", "found at random", "mutant"],
)
def test_the_last_line_says_ok_only_if_nothing_is_missing(monkeypatch, broken: dict, said: str) -> None:
    given = {"explored": SEARCHED, "played": PLAYED, "mutant": CAUGHT} | broken
    row = given["mutant"]
    monkeypatch.setattr(command, "explore", lambda *_: [given["explored"]])
    monkeypatch.setattr(command, "play", lambda *_: given["played"])
    monkeypatch.setattr(command, "catch", lambda *_: [(row.name, row.hazard, row.how, row.what)])
    ran = CliRunner().invoke(command.main, ["--no-wiring"])
    last = ran.output.splitlines()[-1]
    assert (ran.exit_code, last.split(":")[0]) == ((1, "simulate failed") if broken else (0, "simulate ok"))
    assert said in ran.output


def test_every_scenario_has_a_depth_that_means_something() -> None:
    assert min(scenario.least_depth for scenario in SCENARIOS) >= 5


def test_a_scenario_is_searched_to_its_depth_when_its_time_is_over_before() -> None:
    deep = jobs.explore(4, cpu_s=0.0)
    assert (deep.depth, deep.least_depth, deep.deep_enough) == (5, 5, True)


def test_a_machine_that_does_not_come_to_a_depth_in_time_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(jobs, "DEPTH_S", 0.05)
    shallow = jobs.explore(0, cpu_s=0.0)
    assert 0 < shallow.depth < shallow.least_depth
    assert [shallow.name in text for text in shortcomings([shallow], PLAYED, [])] == [True]


def test_a_search_without_a_least_depth_ends_with_its_time() -> None:
    explorer = Explorer(SCENARIOS[0])
    explorer.run(cpu_s=0.0)
    assert explorer.depth == 0
