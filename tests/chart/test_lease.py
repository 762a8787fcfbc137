"""The Lease of a release: its name, in the operator's environment and in its permissions."""

from typing import Any

import pytest

from .conftest import Render, Rendered

NAMES = [
    pytest.param({}, "pdpool-operator", id="default"),
    pytest.param({"fullnameOverride": "team-a"}, "team-a-operator", id="another name"),
]


def lease_of(rendered: Rendered) -> str:
    (operator,) = rendered.all("Deployment")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    (value,) = [entry["value"] for entry in container["env"] if entry["name"] == "PDPOOL_LEASE"]
    return str(value)


@pytest.mark.parametrize(("values", "name"), NAMES)
def test_lease_has_the_name_of_the_deployment(render: Render, values: dict[str, Any], name: str) -> None:
    rendered = render(values)
    assert lease_of(rendered) == name
    assert rendered.one("Deployment", name)


@pytest.mark.parametrize(("values", "name"), NAMES)
def test_operator_may_update_only_its_own_lease(render: Render, values: dict[str, Any], name: str) -> None:
    own = render(values).one("Role", f"{name}-own")
    named = [rule["resourceNames"] for rule in own["rules"] if "update" in rule["verbs"]]
    assert named == [[name]]
