"""Least permissions, from the API server's log of the operator during all other tests of the stack."""

import os
from pathlib import Path

import pytest

from tests.cluster.stack import OPERATOR, SYSTEM, Object, Stack, audited

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(120, func_only=True),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]

Right = tuple[str, str, str]
"""API group, resource, verb."""


def granted(stack: Stack) -> set[Right]:
    """Return the permissions in the operator's roles, as the chart installed them."""
    roles = stack.get("role", f"{OPERATOR}-own", within=SYSTEM), stack.get("clusterrole", OPERATOR)
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def rights(event: Object) -> set[Right]:
    """Return the permissions that one request needed."""
    reference = event["objectRef"]
    resource = "/".join(filter(None, (reference["resource"], reference.get("subresource"))))
    # Server-side apply of an object that does not exist also needs the permission to create.
    verbs = {event["verb"]} | (
        {"create"} if event["verb"] == "patch" and event["responseStatus"]["code"] == 201 else set()
    )
    return {(reference.get("apiGroup", ""), resource, verb) for verb in verbs}


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> None:
    """Skip unless all tests of the stack ran: only then is an unused permission known."""
    files = set(Path(__file__).parent.glob("test_chart_*.py"))
    ran = {item.path for item in request.session.items}
    narrowed = request.config.getoption("keyword") or any("::" in arg for arg in request.config.args)
    if narrowed or not files <= ran:
        pytest.skip("some tests of the stack were not run, so rights may look unused")


def test_the_operator_was_refused_nothing(stack: Stack):
    def while_uninstalled(event: Object) -> bool:
        # Helm removes the permissions while the operator is still ending.
        return any(began <= event["requestReceivedTimestamp"] <= ended for began, ended in stack.uninstalls)

    refused = [
        (event["verb"], event["requestURI"], event["responseStatus"].get("message"))
        for event in audited(stack)
        if event["responseStatus"]["code"] in (401, 403) and not while_uninstalled(event)
    ]
    assert refused == []


def test_the_operator_used_every_right_that_the_chart_grants_and_needs_no_other(whole: None, stack: Stack):
    used: set[Right] = set()
    for event in audited(stack):
        if event.get("objectRef", {}).get("resource"):
            used |= rights(event)
    assert sorted(granted(stack) - used) == [], "granted, and never used"
    assert sorted(used - granted(stack)) == [], "used without being granted by the chart"
