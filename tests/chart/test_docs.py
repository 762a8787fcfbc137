"""Values that the documentation names exist, have the documented defaults, and accept the documented settings."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.paths import CHECKOUT

from .conftest import CHART, Render

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
DOCUMENTS = [*sorted((CHECKOUT / "docs").glob("*.md")), CHECKOUT / "README.md", CHART / "README.md"]
# `operator.replicas: 2`, `crds.enabled=false` or `crds.keep`.
QUOTED = re.compile(r"`([a-z][A-Za-z]*(?:\.[A-Za-z]+)*)(?:(?:: |=)([^`]+))?`")
SET = re.compile(r"--set(?:-string)? ([\w.]+)=([^\s`]+)")


def named(text: str) -> dict[str, str]:
    """Return the values that a document names, with the settings it shows ("" if none)."""
    found = dict(SET.findall(text))
    for path, value in QUOTED.findall(text):
        if path.split(".")[0] in VALUES and ("." in path or value):
            found.setdefault(path, value)
    return found


def exists(path: str) -> bool:
    node: Any = VALUES
    for name in path.split("."):
        if not isinstance(node, dict) or name not in node:
            return False
        node = node[name]
    return True


def test_what_counts_as_a_named_value() -> None:
    text = (
        "`crds.kep` `operator.replica: 2` `watchNamespaces: [a]` `seed` --set imagee.tag=1.0 --set-string image.tag=2"
    )
    assert named(text) == {
        "crds.kep": "",
        "operator.replica": "2",
        "watchNamespaces": "[a]",
        "imagee.tag": "1.0",
        "image.tag": "2",
    }
    assert [path for path in named(text) if not exists(path)] == ["imagee.tag", "crds.kep", "operator.replica"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_values_that_a_document_names_exist(document: Path) -> None:
    assert [path for path in named(document.read_text()) if not exists(path)] == []


def test_values_may_be_set_as_the_documents_say(render: Render) -> None:
    settings = named("".join((CHECKOUT / "docs" / name).read_text() for name in ("install.md", "quickstart.md")))
    values: dict[str, Any] = {}
    for path, text in settings.items():
        if text:
            *folders, name = path.split(".")
            node = values
            for folder in folders:
                node = node.setdefault(folder, {})
            node[name] = yaml.safe_load(text)
    assert {"image", "operator", "watchNamespaces", "networkPolicy", "crds", "test"} <= set(values)
    rendered = render(values)
    assert not rendered.failed, rendered.error


def test_the_chart_s_readme_tells_the_defaults() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|", (CHART / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 40
    for path, default in rows:
        node: Any = VALUES
        for name in path.split("."):
            node = node[name]
        assert json.loads(default) == node, path


def test_the_chart_s_readme_says_of_each_value_what_its_comment_says() -> None:
    readme = (CHART / "README.md").read_text()
    comments = re.findall(r"((?:^ *# .*\n)+) *(\w+):", (CHART / "values.yaml").read_text(), re.MULTILINE)
    told = [" ".join(line.strip("# ") for line in block.splitlines()).partition("-- ")[2] for block, _ in comments]
    told = [words for words in told if words]
    assert len(told) > 40
    assert [words for words in told if f"| {words} |" not in readme] == []
