"""The mutants of the runtime can be made from today's code; `make simulate` runs the tests against each of them."""

import pytest

from tests.simulation.mutants import MUTANTS, NOT_APPLICABLE
from tests.simulation.wiring import ROOT, WIRING, mutated


@pytest.mark.parametrize("name", WIRING)
def test_each_fault_is_a_change_of_today_s_code_and_names_tests_that_exist(name: str) -> None:
    fault = WIRING[name]
    compile(mutated(fault), fault.file, "exec")
    assert f"def {fault.sign}" in (ROOT / fault.tests[0]).read_text()


def test_every_hazard_of_the_catalogue_is_among_the_mutants_or_said_not_to_apply() -> None:
    brought_back = {fault.hazard for fault in (*MUTANTS.values(), *WIRING.values())}
    assert brought_back.isdisjoint(NOT_APPLICABLE)
    assert brought_back | NOT_APPLICABLE.keys() == {f"H{number}" for number in range(1, 38)}
