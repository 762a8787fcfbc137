"""NetworkPolicies of pools and routers: who may connect to their pods, in every namespace with pools."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..api import names
from ..api.names import Role
from ..api.pools import Pool
from ..api.services import DisaggregatedService
from .common import metadata, with_build_hash

MAX_RANKS = 256
"""Ranks of a pod whose admin endpoints can be reached: as many as the operator asks."""

FIRST_UNPRIVILEGED_PORT, LAST_PORT = 1024, 65535

Peer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NetworkPeers:
    """Who may connect beside engines and routers of the namespace. Each is a NetworkPolicyPeer."""

    watchers: tuple[Peer, ...] = ()
    """The operator and Prometheus: they read state and metrics."""
    clients: tuple[Peer, ...] = ()
    """Gateways that send requests to engines in place of pdpool's router."""


def engine_network_policy(pool: Pool, peers: NetworkPeers) -> dict[str, Any]:
    """NetworkPolicy of a pool. All other connections to its pods are refused, if the CNI plugin enforces policies."""
    name, role = pool.metadata.name, pool.role
    made = {names.LABEL_MANAGED_BY: names.MANAGED_BY}
    roles = [str(Role.PREFILL), str(Role.DECODE)]
    engines = {"matchLabels": made, "matchExpressions": [{"key": names.LABEL_ROLE, "operator": "In", "values": roles}]}
    routers = {"matchLabels": {**made, names.LABEL_ROLE: str(Role.ROUTER)}}
    # The kernel picks the ports on which transfer backends listen, so engines reach all ports of engines.
    between_engines = _ports((FIRST_UNPRIVILEGED_PORT, LAST_PORT))
    http = (names.ENGINE_HTTP_PORT, names.ENGINE_HTTP_PORT)
    rules = [
        {"from": [{"podSelector": engines}], "ports": between_engines},
        {"from": [{"podSelector": routers}, *map(dict, peers.clients)], "ports": _ports(http)},
    ]
    if peers.watchers:
        admin = (names.ADMIN_PORT, names.ADMIN_PORT + MAX_RANKS - 1)
        rules.append({"from": [*map(dict, peers.watchers)], "ports": _ports(admin, http)})
    meta = metadata(pool, names.pool_workload(name, role), names.pool_labels(name, role))
    return _policy(meta, names.pool_selector(name, role), rules)


def router_network_policy(service: DisaggregatedService, peers: NetworkPeers) -> dict[str, Any]:
    """NetworkPolicy of a service's routers: only their metrics are closed to others than `peers.watchers`.

    Clients come from anywhere, also from outside the cluster. So the port of requests has no list of peers. The
    operator reaches `/workers` on the same port, where the routers' key protects it.
    """
    name = service.metadata.name
    http, metrics = names.ROUTER_HTTP_PORT, names.ROUTER_METRICS_PORT
    rules: list[dict[str, Any]] = [{"ports": _ports((http, http))}]
    if peers.watchers:
        rules.append({"from": [*map(dict, peers.watchers)], "ports": _ports((metrics, metrics))})
    meta = metadata(service, names.router(name), names.router_labels(name))
    return _policy(meta, names.router_selector(name), rules)


def _policy(meta: dict[str, Any], selector: dict[str, str], rules: list[dict[str, Any]]) -> dict[str, Any]:
    return with_build_hash(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": meta,
            "spec": {"podSelector": {"matchLabels": selector}, "policyTypes": ["Ingress"], "ingress": rules},
        }
    )


def _ports(*ranges: tuple[int, int]) -> list[dict[str, Any]]:
    return [_port(first, last) for first, last in ranges]


def _port(first: int, last: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": first} | ({"endPort": last} if last > first else {})
