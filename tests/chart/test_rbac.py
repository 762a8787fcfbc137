"""The permissions that the chart grants."""

from typing import Any

import pytest
import yaml
from pdpool_operator.api import names

from .conftest import CHART, Render, Rendered

TABLE = yaml.safe_load((CHART / "files" / "rbac.yaml").read_text())
SCOPES = [pytest.param({}, id="all-namespaces"), pytest.param({"watchNamespaces": ["a", "b"]}, id="two-namespaces")]


def rules_of(rendered: Rendered, kind: str, name: str, namespace: str | None = None) -> list[dict[str, Any]]:
    rules = rendered.one(kind, name, namespace)["rules"]
    assert isinstance(rules, list)
    return rules


def test_table_is_granted_in_the_whole_cluster_when_all_namespaces_are_watched(default: Rendered) -> None:
    assert rules_of(default, "ClusterRole", "pdpool-operator") == TABLE["cluster"] + TABLE["pools"]
    assert rules_of(default, "Role", "pdpool-operator-own", "pdpool-system") == TABLE["own"]
    assert len(default.all("Role")) == 1


def test_table_is_granted_in_just_the_watched_namespaces(render: Render) -> None:
    rendered = render({"watchNamespaces": ["a", "b"]})
    for namespace in ("a", "b"):
        assert rules_of(rendered, "Role", "pdpool-operator", namespace) == TABLE["pools"]
    assert rules_of(rendered, "Role", "pdpool-operator-own", "pdpool-system") == TABLE["own"]
    cluster_wide = [role for role in rendered.all("ClusterRole") if role["metadata"]["name"] == "pdpool-operator"]
    assert [role["rules"] for role in cluster_wide] == ([TABLE["cluster"]] if TABLE["cluster"] else [])


def test_nodes_may_be_read_one_by_one_and_nothing_else_is_granted_cluster_wide() -> None:
    assert TABLE["cluster"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]


@pytest.mark.parametrize("values", SCOPES)
@pytest.mark.parametrize("rbac", [{"nodes": False}, {"watchOnly": True}])
def test_nodes_are_not_granted_where_no_fence_needs_them(
    render: Render, values: dict[str, Any], rbac: dict[str, bool]
) -> None:
    rendered = render(values | {"rbac": rbac})
    for role in rendered.all("Role") + rendered.all("ClusterRole"):
        assert all("nodes" not in rule["resources"] for rule in role["rules"])


@pytest.mark.parametrize("values", SCOPES)
def test_every_role_is_bound_to_the_operator_s_account_alone(render: Render, values: dict[str, Any]) -> None:
    rendered = render(values)
    account = {"kind": "ServiceAccount", "name": "pdpool-operator", "namespace": "pdpool-system"}
    rendered.one("ServiceAccount", "pdpool-operator")
    bound = set()
    for binding in rendered.all("RoleBinding") + rendered.all("ClusterRoleBinding"):
        assert binding["subjects"] == [account]
        bound.add((binding["roleRef"]["kind"], binding["roleRef"]["name"], binding["metadata"].get("namespace")))
    roles = {
        (role["kind"], role["metadata"]["name"], role["metadata"].get("namespace"))
        for role in rendered.all("Role") + rendered.all("ClusterRole")
        if "aggregate" not in str(role["metadata"]["labels"])
    }
    assert bound == roles


@pytest.mark.parametrize("values", SCOPES)
def test_nothing_is_granted_by_a_wildcard(render: Render, values: dict[str, Any]) -> None:
    rendered = render(values)
    for role in rendered.all("Role") + rendered.all("ClusterRole"):
        for rule in role["rules"]:
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
            assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])
            assert not {"pods/exec", "pods/attach", "nodes/proxy"} & set(rule["resources"])


def test_rbac_of_ones_own_leaves_no_roles(render: Render) -> None:
    rendered = render({"rbac": {"create": False, "aggregate": False}})
    for kind in ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"):
        assert rendered.all(kind) == []


def test_only_one_secret_of_each_namespace_may_be_patched() -> None:
    # The answer to a patch holds the whole object, so `patch` without a name would be a right to read every Secret.
    secrets = [rule for rule in TABLE["pools"] if "secrets" in rule["resources"]]
    assert [(rule["verbs"], rule.get("resourceNames")) for rule in secrets] == [
        (["create"], None),
        (["patch"], [names.KEYS_SECRET]),
    ]


def test_no_grant_is_written_twice() -> None:
    for scope, rules in TABLE.items():
        written = [
            (group, resource, verb)
            for rule in rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        ]
        assert len(written) == len(set(written)), scope


@pytest.mark.parametrize("values", SCOPES)
def test_watching_alone_writes_only_status_and_events(render: Render, values: dict[str, Any]) -> None:
    rendered = render(values | {"rbac": {"watchOnly": True}})
    roles = [r for r in rendered.all("Role") + rendered.all("ClusterRole") if "aggregate" not in str(r["metadata"])]
    granted = [rule for role in roles if not role["metadata"]["name"].endswith("-own") for rule in role["rules"]]
    writes = {
        (resource, verb)
        for rule in granted
        for resource in rule["resources"]
        for verb in set(rule["verbs"]) - {"get", "list", "watch"}
    }
    kinds = ("prefillpools", "decodepools", "disaggregatedservices", "pooloperations")
    assert writes == {*((f"{kind}/status", "patch") for kind in kinds), ("events", "create"), ("events", "patch")}
    assert "secrets" not in {resource for rule in granted for resource in rule["resources"]}


def test_watching_alone_reads_what_pools_read() -> None:
    def reads(table: str) -> set[tuple[str, str]]:
        return {
            (resource, verb)
            for rule in TABLE[table]
            for resource in rule["resources"]
            for verb in set(rule["verbs"]) & {"get", "list", "watch"}
        }

    assert reads("watch") == reads("pools")
