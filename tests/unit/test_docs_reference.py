"""docs/reference/connector.md has every public name and setting; docs/architecture.md has every module."""

import dataclasses
import re
from pathlib import Path

import pdpool_connector
import pytest
from pdpool_connector import ConnectorConfig, Timeouts
from pdpool_connector.runtime.environment import VARIABLES

from dev.paths import CHECKOUT

DOCS = CHECKOUT / "docs"
LIBRARY = Path(pdpool_connector.__file__).parent
REFERENCE = (DOCS / "reference" / "connector.md").read_text(encoding="utf-8")
ARCHITECTURE = (DOCS / "architecture.md").read_text(encoding="utf-8")
NAMED = frozenset(re.findall(r"^#+ ([\w.]+)$", REFERENCE, re.MULTILINE)) | frozenset(re.findall(r"`(\w+)`", REFERENCE))
"""Words that are a heading or stand in backquotes by themselves."""


def rows(section: str) -> dict[str, str]:
    """First and second cell of each row of the table below a heading."""
    text = re.search(rf"^### {section}\n(.*?)(?=^#{{2,3}} )", REFERENCE, re.MULTILINE | re.DOTALL)
    assert text is not None, f"no heading {section}"
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text[1], re.MULTILINE))


def mapped_modules() -> set[str]:
    """Modules of the module map: `name.py` below a heading with the folder, or `folder/name.py`."""
    table = re.search(r"^## Module map\n(.*?)^## ", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    assert table is not None, "no heading Module map"
    found = set()
    for section in re.split(r"^### ", table[1], flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        for path in re.findall(r"`([\w/]+\.py)`", text):
            found.add(heading + path if heading.endswith("/") and "/" not in path else path)
    return found


@pytest.mark.parametrize("name", pdpool_connector.__all__)
def test_public_name_is_in_the_reference(name: str) -> None:
    assert name in NAMED


def test_configuration_fields_are_the_documented_ones() -> None:
    assert list(rows("ConnectorConfig")) == [field.name for field in dataclasses.fields(ConnectorConfig)]


def test_timeouts_have_the_documented_defaults() -> None:
    documented = {name: float(default.replace(" ", "")) for name, default in rows("Timeouts").items()}
    assert documented == {field.name: float(field.default) for field in dataclasses.fields(Timeouts)}


@pytest.mark.parametrize("variable", [*VARIABLES, "PDPOOL_POD_IP", "PDPOOL_OPERATOR_KEY"])
def test_variable_is_in_the_reference(variable: str) -> None:
    assert variable in NAMED


def test_module_map_has_the_modules_of_the_library() -> None:
    paths = [path.relative_to(LIBRARY) for path in LIBRARY.rglob("*.py") if path.name != "__init__.py"]
    assert mapped_modules() == {str(path) for path in paths}
