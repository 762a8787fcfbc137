"""A part of the catalogue in every test run; `make hazards` plays all of it on every data plane."""

import pytest

from proof.hazards import abort_by_name, corruption, leaks, lifecycle, losses, ranks, served, wedges
from proof.hazards.__main__ import judge
from proof.hazards.stage import CATALOGUE, Hazard, Stage

QUICK = (1, 2, 3, 4, 5, 7, 8, 11, 13, 14, 17, 18, 19, 22, 23, 24, 25, 26, 27, 28, 33, 37)


@pytest.fixture(scope="module")
def stage():
    stage = Stage("nixl-tcp")
    yield stage
    stage.close()


@pytest.mark.parametrize("number", QUICK)
def test_a_hazard_of_the_catalogue_is_absent(stage: Stage, number: int) -> None:
    found = judge(CATALOGUE[number], stage)
    assert found.verdict == "absent", found.detail


def test_the_catalogue_is_complete() -> None:
    assert sorted(CATALOGUE) == list(range(1, 38)), (
        abort_by_name,
        corruption,
        leaks,
        lifecycle,
        losses,
        ranks,
        served,
        wedges,
    )


@pytest.mark.parametrize("fault", ["write", "leave"])
def test_a_hazard_that_is_there_is_found(stage: Stage, fault: str) -> None:
    def scenario(stage: Stage) -> str:
        name, _ = stage.open_both(pages=[8])
        if fault == "write":
            stage.prefill.send(name, [1])
            stage.decode.until(name, "done")
            assert stage.blank([8]), "somebody wrote into the page"
        return "nothing"

    assert judge(Hazard(0, "made up", scenario), stage).verdict == "present"
