"""A part of the catalogue in every test run; `make hazards` plays all of it on every data plane."""

import re

import pytest

from dev.paths import CHECKOUT
from proof.hazards.__main__ import HAZARDS, judge
from proof.hazards.stage import CATALOGUE, Hazard, Stage

QUICK = (1, 2, 3, 4, 5, 7, 8, 10, 11, 13, 14, 17, 18, 19, 22, 23, 24, 25, 26, 27, 28, 33, 37)
PAGE = (CHECKOUT / "docs" / "hazards.md").read_text()
ROWS = re.findall(r"^\| H(\d+) \| ([^|]+) \| [^|]+ \| [^|]+ \| ([^|]+) \|$", PAGE, re.MULTILINE)
DOCUMENTED = {int(number): (name, verdict) for number, name, verdict in ROWS}
"""Name and verdict of each hazard by its number, as docs/hazards.md has them."""


@pytest.fixture(scope="module")
def stage():
    stage = Stage("nixl-tcp")
    yield stage
    stage.close()


@pytest.mark.parametrize("number", QUICK)
def test_hazard_has_its_documented_verdict(stage: Stage, number: int) -> None:
    found = judge(CATALOGUE[number], stage)
    assert found.verdict == DOCUMENTED[number][1], found.detail


def test_page_names_every_hazard_once() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, HAZARDS + 1))
    assert {number: name for number, (name, _) in DOCUMENTED.items()} == {
        number: hazard.name for number, hazard in CATALOGUE.items()
    }
    assert {verdict for _, verdict in DOCUMENTED.values()} == {"absent", "not applicable"}


@pytest.mark.parametrize("fault", ["write", "leave"])
def test_fault_makes_its_hazard_present(stage: Stage, fault: str) -> None:
    def scenario(stage: Stage) -> str:
        name, _ = stage.open_both(pages=[8])
        if fault == "write":
            stage.prefill.send(name, [1])
            stage.decode.until(name, "done")
            assert stage.blank([8]), "the page was written"
        return "nothing"

    assert judge(Hazard(0, "made up", scenario), stage).verdict == "present"
