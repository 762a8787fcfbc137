"""When `make simulate` says ok: nothing is broken, and everything was tried that it promises to try."""

from collections import Counter
from dataclasses import replace

import pytest
from click.testing import CliRunner

from proof.simulate import __main__ as command
from proof.simulate import jobs
from proof.simulate.jobs import Explored, Mutant, Played
from proof.simulate.verdict import shortcomings, violations
from tests.simulation.explore import SCENARIOS, Explorer
from tests.simulation.random_world import FAULTS

SEARCHED = Explored(0, "one request", 4456, 10, 10, complete=False, machines=90, violations=[])
PLAYED = Played(runs=1000, happened=Counter(dict.fromkeys(FAULTS, 1)))
CAUGHT = Mutant("releases on abort", "H4", "seed 3", "pages are touched")


def test_complete_run_has_no_shortcoming() -> None:
    assert shortcomings([SEARCHED], PLAYED, [CAUGHT]) == violations([SEARCHED], PLAYED) == []


def test_shallow_scenario_is_named_with_its_depth() -> None:
    shallow = replace(SEARCHED, number=1, name="two requests", depth=9)
    assert shortcomings([SEARCHED, shallow], PLAYED, [CAUGHT]) == [
        "two requests: searched to depth 9, at least 10 is promised"
    ]


def test_complete_scenario_is_deep_enough() -> None:
    assert shortcomings([replace(SEARCHED, depth=4, complete=True)], PLAYED, [CAUGHT]) == []


@pytest.mark.parametrize("kind", FAULTS)
def test_fault_that_no_run_had_is_named(kind: str) -> None:
    happened = PLAYED.happened - Counter([kind])
    assert shortcomings([SEARCHED], replace(PLAYED, happened=happened), []) == [f"no run had the fault {kind}"]


def test_mutant_that_survived_is_named() -> None:
    survivor = replace(CAUGHT, how="", what="survived 1000 runs and the search")
    assert shortcomings([SEARCHED], PLAYED, [survivor, CAUGHT]) == ["mutant releases on abort (H4) survived"]


def test_violations_of_search_and_runs_are_both_shown() -> None:
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
def test_last_line_is_ok_only_without_shortcomings(monkeypatch, broken: dict, said: str) -> None:
    given = {"explored": SEARCHED, "played": PLAYED, "mutant": CAUGHT} | broken
    monkeypatch.setattr(command, "explore", lambda *_: [given["explored"]])
    monkeypatch.setattr(command, "play", lambda *_: given["played"])
    monkeypatch.setattr(command, "catch", lambda *_: [given["mutant"]])
    ran = CliRunner().invoke(command.main, ["--no-wiring"])
    last = ran.output.splitlines()[-1]
    assert (ran.exit_code, last.split(":")[0]) == ((1, "simulate failed") if broken else (0, "simulate ok"))
    assert said in ran.output


def test_every_scenario_promises_some_depth() -> None:
    assert min(scenario.least_depth for scenario in SCENARIOS) >= 5


def test_search_reaches_its_depth_beyond_its_time() -> None:
    deep = jobs.explore(5, cpu_s=0.0)
    assert (deep.depth, deep.least_depth, deep.deep_enough) == (5, 5, True)


def test_search_gives_up_after_its_limit(monkeypatch) -> None:
    monkeypatch.setattr(jobs, "DEPTH_S", 0.05)
    shallow = jobs.explore(1, cpu_s=0.0)
    assert 0 < shallow.depth < shallow.least_depth
    assert [shallow.name in text for text in shortcomings([shallow], PLAYED, [])] == [True]


def test_search_without_least_depth_ends_with_its_time() -> None:
    explorer = Explorer(SCENARIOS[0])
    explorer.run(cpu_s=0.0)
    assert explorer.depth == 0
