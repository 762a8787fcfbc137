"""Values that the schema refuses, with the words a user sees."""

from typing import Any

import pytest

from .conftest import Render


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
