"""Objects in full, against committed YAML in the folder `golden` beside the test."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import yaml


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing with them")


@pytest.fixture
def same_as_golden(request: pytest.FixtureRequest) -> Callable[[str, Iterable[Any]], None]:
    """Return a function that compares objects with the file of a case, or rewrites it."""

    def compare(case: str, objects: Iterable[Any]) -> None:
        path = request.path.parent / "golden" / f"{case}.yaml"
        text = yaml.safe_dump_all(objects, sort_keys=True, width=120)
        if request.config.getoption("--update-golden", default=False):
            path.write_text(text, "utf-8")
        assert text == path.read_text("utf-8"), f"{path.name} differs; if it should, run pytest with --update-golden"

    return compare
