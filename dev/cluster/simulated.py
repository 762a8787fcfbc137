"""Simulated nodes: objects that kwok keeps Ready. The real scheduler assigns their GPUs and RDMA devices."""

import json
from pathlib import Path
from typing import Any

from dev.cluster.layout import State
from dev.shell import run
from dev.tools.build import binary

PREFIX = "sim-"
# A usual inference node: eight accelerators, each with a network card.
RESOURCES = {"cpu": "128", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": "8", "rdma/ib": "8"}
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}


def converge(state: State, count: int) -> None:
    """Create or delete simulated nodes until the cluster has exactly `count`.

    Raises:
        CommandError: the API server refused.
    """
    present = set(_kubectl(state, "get", "nodes", "-l", "type=kwok", "-o", "name").split())
    wanted = {f"node/{PREFIX}{number}" for number in range(count)}
    if surplus := sorted(present - wanted):
        _kubectl(state, "delete", "--wait=false", *surplus)
    if missing := sorted(wanted - present):
        nodes = {"apiVersion": "v1", "kind": "List", "items": [_node(n.removeprefix("node/")) for n in missing]}
        _kubectl(state, "create", "-f", "-", stdin=json.dumps(nodes))


def _node(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake", "node.alpha.kubernetes.io/ttl": "0"},
            "labels": {"type": "kwok", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
        },
        "spec": {"taints": [TAINT]},
        "status": {"allocatable": RESOURCES, "capacity": RESOURCES},
    }


def _kubectl(state: State, *arguments: str | Path, stdin: str | None = None) -> str:
    return run(binary("kubectl"), f"--kubeconfig={state.kubeconfig}", *arguments, stdin=stdin)
