"""Values that the schema refuses, with the words a user sees."""

import json
from typing import Any

import pytest
import yaml

from .conftest import CHART, Render


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"operatr": {}}, ["operatr", "not allowed"]),
        ({"operator": {"replica": 1}}, ["/operator", "replica", "not allowed"]),
        ({"operator": {"replicas": 3}}, ["/operator/replicas", "maximum", "2"]),
        ({"operator": {"replicas": "1"}}, ["/operator/replicas", "got string, want integer"]),
        ({"operator": {"logLevel": "loud"}}, ["/operator/logLevel", "'debug', 'info', 'warning', 'error'"]),
        ({"operator": {"terminationGracePeriodSeconds": 0}}, ["/operator/terminationGracePeriodSeconds", "minimum"]),
        ({"image": {"registry": ""}}, ["/image/registry", "minLength"]),
        ({"image": {"tag": "a b"}}, ["/image/tag", "pattern"]),
        ({"image": {"pullPolicy": "Sometimes"}}, ["/image/pullPolicy", "IfNotPresent"]),
        ({"watchNamespaces": "llm"}, ["/watchNamespaces", "got string, want array"]),
        ({"watchNamespaces": ["LLM"]}, ["/watchNamespaces/0", "pattern"]),
        ({"watchNamespaces": ["llm", "llm"]}, ["/watchNamespaces", "equal"]),
        ({"crds": {"keep": "yes"}}, ["/crds/keep", "got string, want boolean"]),
        ({"rules": {"windows": {"noProgress": "1 minute"}}}, ["/rules/windows/noProgress", "pattern"]),
        ({"rules": {"windows": {"noProgres": "1m"}}}, ["/rules/windows", "noProgres", "not allowed"]),
        ({"test": {"router": {"port": 0}}}, ["/test/router/port", "minimum"]),
        ({"networkPolicy": {"prometheus": {"podSelector": {"app": "x"}}}}, ["podSelector", "app", "not allowed"]),
    ],
)
def test_bad_values_are_refused_with_the_field_s_name(render: Render, values: dict[str, Any], words: list[str]) -> None:
    refused = render(values)
    assert refused.failed
    for word in words:
        assert word in refused.error


def test_a_foreign_service_account_must_be_named(render: Render) -> None:
    refused = render({"serviceAccount": {"create": False}})
    assert refused.failed
    assert "serviceAccount.name: must name an existing ServiceAccount" in refused.error


def test_values_of_a_parent_chart_pass(render: Render) -> None:
    assert not render({"global": {"anything": 1}}).failed


def keys(node: dict[str, Any], path: str = "") -> set[str]:
    """Paths of all keys of a schema's objects with fixed properties."""
    found = set()
    for name, child in node.get("properties", {}).items():
        found |= {f"{path}{name}"} | keys(child, f"{path}{name}.")
    return found


def paths(values: dict[str, Any], known: set[str], path: str = "") -> set[str]:
    """Paths of all keys of the values, down to where the schema leaves them free."""
    found = set()
    for name, value in values.items():
        here = f"{path}{name}"
        found.add(here)
        if isinstance(value, dict) and any(key.startswith(f"{here}.") for key in known):
            found |= paths(value, known, f"{here}.")
    return found


def test_schema_and_values_have_the_same_keys() -> None:
    known = keys(json.loads((CHART / "values.schema.json").read_text()))
    written = paths(yaml.safe_load((CHART / "values.yaml").read_text()), known)
    # Free-form parts that Kubernetes defines, and Helm's own key.
    optional = {"global", "operator.resources.claims", "networkPolicy.prometheus.podSelector.matchLabels"}
    optional |= {key for key in known if key.endswith(".matchExpressions")}
    assert written <= known
    assert known - written <= optional
