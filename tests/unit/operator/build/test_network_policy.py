"""Who may connect to the engines of a pool, and to the routers of a service."""

from dataclasses import replace
from typing import Any

import pytest
from pdpool_operator.api import names
from pdpool_operator.api.names import Role
from pdpool_operator.build.network_policy import NetworkPeers, engine_network_policy, router_network_policy
from pdpool_operator.build.pool import instance_stateful_set
from pdpool_operator.build.router import router_deployment
from pdpool_operator.plan.pool import plan_pool

from tests.unit.operator.plan.makers import (
    SETTINGS,
    T0,
    as_observed,
    make_instance,
    make_observed,
    make_pool,
    make_service,
)

OPERATOR = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "pdpool-system"}}}
GATEWAY = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}
PEERS = NetworkPeers(watchers=(OPERATOR,), clients=(GATEWAY,))


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector matches, for the operators used here."""
    exact = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return exact and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", []))


def allowed(role: Role, labels: dict[str, str]) -> set[tuple[int, int]]:
    """Port ranges of the pool's engines that pods of the namespace with these labels reach."""
    spec = engine_network_policy(make_pool(role), PEERS)["spec"]
    return {
        (port["port"], port.get("endPort", port["port"]))
        for rule in spec["ingress"]
        for peer in rule["from"]
        if "podSelector" in peer and "namespaceSelector" not in peer and selects(peer["podSelector"], labels)
        for port in rule["ports"]
    }


def pod_labels(role: Role, pool: str = "other") -> dict[str, str]:
    labels: dict[str, str] = instance_stateful_set(make_pool(role, pool), 0, SETTINGS)["spec"]["template"]["metadata"][
        "labels"
    ]
    return labels


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_policy_selects_exactly_the_pods_of_its_pool(role: Role) -> None:
    selector = engine_network_policy(make_pool(role), PEERS)["spec"]["podSelector"]
    assert selects(selector, pod_labels(role, "chat"))
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    assert not selects(selector, pod_labels(other, "chat"))
    assert not selects(selector, pod_labels(role, "other"))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_engines_reach_every_port_on_which_engines_listen(role: Role) -> None:
    (ports,) = allowed(Role.PREFILL, pod_labels(role))
    assert ports[0] <= min(names.BOOTSTRAP_PORT, names.CONTROL_PORT, names.ADMIN_PORT)
    assert ports[1] == 65535


def test_routers_reach_only_the_requests_port() -> None:
    labels = router_deployment(make_service(), SETTINGS)["spec"]["template"]["metadata"]["labels"]
    assert allowed(Role.DECODE, labels) == {(names.ENGINE_HTTP_PORT, names.ENGINE_HTTP_PORT)}


def test_other_pods_of_the_namespace_reach_nothing() -> None:
    assert allowed(Role.DECODE, {"app": "notebook"}) == set()
    assert allowed(Role.DECODE, {names.LABEL_ROLE: "prefill"}) == set()


def test_watchers_reach_every_admin_port_and_gateways_only_requests() -> None:
    _, clients, watchers = engine_network_policy(make_pool(), PEERS)["spec"]["ingress"]
    assert GATEWAY in clients["from"]
    assert [port["port"] for port in clients["ports"]] == [names.ENGINE_HTTP_PORT]
    assert watchers["from"] == [OPERATOR]
    admin, http = watchers["ports"]
    assert (admin["port"], admin["endPort"]) == (names.ADMIN_PORT, names.ADMIN_PORT + 255)
    assert http["port"] == names.ENGINE_HTTP_PORT


def test_no_watchers_let_nobody_watch() -> None:
    # An empty `from` would let everybody in.
    rules = engine_network_policy(make_pool(), NetworkPeers())["spec"]["ingress"]
    assert all(rule["from"] for rule in rules)


def test_policies_are_created_and_deleted_with_the_setting() -> None:
    pool = make_pool()
    without = make_observed(pool, make_instance(pool))
    wanted = replace(SETTINGS, peers=PEERS)
    assert [obj["kind"] for obj in plan_pool(without, wanted, T0).apply] == ["NetworkPolicy"]
    policy = as_observed(engine_network_policy(pool, PEERS))
    present = replace(without, objects=(*without.objects, policy))
    assert not plan_pool(present, wanted, T0).acts
    (gone,) = plan_pool(present, SETTINGS, T0).delete
    assert (gone.kind, gone.name, gone.uid) == ("NetworkPolicy", "chat-prefill", policy.uid)


def test_router_policy_selects_exactly_the_routers_of_its_service() -> None:
    selector = router_network_policy(make_service(), PEERS)["spec"]["podSelector"]
    labels = router_deployment(make_service(), SETTINGS)["spec"]["template"]["metadata"]["labels"]
    assert selects(selector, labels)
    assert not selects(selector, labels | {names.LABEL_SERVICE: "other"})
    assert not selects(selector, pod_labels(Role.PREFILL, "chat"))


def test_any_client_reaches_requests_and_only_watchers_reach_metrics() -> None:
    requests, metrics = router_network_policy(make_service(), PEERS)["spec"]["ingress"]
    assert requests == {"ports": [{"protocol": "TCP", "port": 8000}]}
    assert metrics == {"from": [OPERATOR], "ports": [{"protocol": "TCP", "port": 29000}]}


def test_router_policy_opens_the_ports_on_which_the_router_listens() -> None:
    (container,) = router_deployment(make_service(), SETTINGS)["spec"]["template"]["spec"]["containers"]
    rules = router_network_policy(make_service(), PEERS)["spec"]["ingress"]
    opened = {port["port"] for rule in rules for port in rule["ports"]}
    assert opened == {port["containerPort"] for port in container["ports"]}


def test_without_watchers_router_metrics_are_closed() -> None:
    # An empty `from` would let everybody in.
    (requests,) = router_network_policy(make_service(), NetworkPeers())["spec"]["ingress"]
    assert [port["port"] for port in requests["ports"]] == [names.ROUTER_HTTP_PORT]
