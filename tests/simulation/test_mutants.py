"""Mutants are found in the syntax tree, each in today's code; `make simulate` shows that each is caught."""

import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulation import mutants
from tests.simulation.common import ViolationError
from tests.simulation.machine_mutants import MUTANTS, NOT_APPLICABLE
from tests.simulation.mutants import Mutant, NotTriedError, faulty_machines, mutated
from tests.simulation.random_world import play
from tests.simulation.wiring import ROOT, WIRING

SOURCE = """
class Table:
    def take(self, key):
        if key in self.rows:  # a comment
            return self.rows.pop(
                key, None,
            )
        self.count += 1
        self.full = False
        return None

    def drop(self, key):
        return self.rows.pop(key, None)
"""
Table = Callable[..., str]
QUICK = ("releases on abort", "one writer's result is enough", "ends are by room", "prompts are not compared")
"""A few that show in seconds that the simulation notices faults."""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(mutants, "PACKAGE", tmp_path)
    (tmp_path / "table.py").write_text(SOURCE)

    def change(old: str, new: str, function: str = "Table.take") -> str:
        return ast.unparse(mutated(Mutant("m", "H1", "why", "table.py", function, old, new)))

    return change


class TestMutated:
    def test_expression_is_found_whatever_its_layout(self, table: Table) -> None:
        changed = table("self.rows.pop(key, None)", "None")
        assert changed.count("self.rows.pop(key, None)") == 1, "the other function is as it was"

    def test_statements_in_a_row_are_replaced(self, table: Table) -> None:
        changed = table("self.count += 1\nself.full = False", "self.count = 0")
        assert "self.count = 0\n        return None" in changed

    def test_deleted_body_becomes_pass(self, table: Table) -> None:
        assert "def drop(self, key):\n        pass" in table("return self.rows.pop(key, None)", "", "Table.drop")

    def test_dots_stand_for_any_body(self, table: Table) -> None:
        assert "if key" not in table("if key in self.rows: ...", "")

    @pytest.mark.parametrize(
        ("old", "function", "said"),
        [
            ("self.gone()", "Table.take", "0 places"),
            ("key", "Table.take", "2 places"),
            ("key", "Table.gone", "has no Table.gone"),
        ],
    )
    def test_code_that_is_not_there_once_is_refused(self, table: Table, old: str, function: str, said: str) -> None:
        with pytest.raises(NotTriedError, match=said):
            table(old, "None", function)


@pytest.mark.parametrize("name", MUTANTS)
def test_machine_mutant_applies_to_todays_code(name: str) -> None:
    machines = faulty_machines(MUTANTS[name])
    assert [kind.__name__ for kind in machines] == ["PrefillMachine", "DecodeMachine"]


@pytest.mark.parametrize("name", WIRING)
def test_wiring_mutant_applies_and_its_test_exists(name: str) -> None:
    mutant = WIRING[name]
    compile(mutated(mutant), mutant.file, "exec")
    assert f"def {mutant.sign}(" in (ROOT / mutant.tests[0].split("::")[0]).read_text()


@pytest.mark.parametrize("name", QUICK)
def test_random_runs_catch_a_mutant(name: str) -> None:
    with pytest.raises(ViolationError):
        play(0, 100, faulty_machines(MUTANTS[name]), shorten=False)


def test_every_hazard_has_a_mutant_or_a_reason() -> None:
    covered = {mutant.hazard for mutant in (*MUTANTS.values(), *WIRING.values())}
    assert covered.isdisjoint(NOT_APPLICABLE)
    assert covered | NOT_APPLICABLE.keys() == {f"H{number}" for number in range(1, 38)}
    assert len(MUTANTS) + len(WIRING) >= 40
    assert max(Counter([*MUTANTS, *WIRING]).values()) == 1, "each mutant has a name of its own"
