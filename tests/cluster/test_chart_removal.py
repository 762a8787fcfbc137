"""Deleting pools and services removes all their objects, whether the operator runs or not."""

import os

import pytest

from dev.shell import wait_for
from tests.cluster.stack import KINDS, POOLS, Stack

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]

OTHERS = {
    "configmap/kube-root-ca.crt",  # Kubernetes creates it in every namespace, and also the next one
    "serviceaccount/default",
}


def everything(stack: Stack) -> set[str]:
    """Return all objects in the pools' namespace except events, of every kind."""
    kinds = stack.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    kinds = [kind for kind in kinds if not kind.startswith("events") and not kind.endswith("metrics.k8s.io")]
    return set(stack.kubectl("get", ",".join(kinds), "-n", POOLS, "-o", "name").split()) - OTHERS


@pytest.mark.parametrize("operator", ["running", "away"])
def test_deleting_pools_and_service_removes_everything_that_was_made_for_them(serving: Stack, operator):
    made = everything(serving)
    assert {"secret/pdpool-keys", "statefulset.apps/chat-decode-1", "deployment.apps/chat-router"} < made
    if operator == "away":
        serving.scale_operator(0)
    try:
        serving.kubectl("delete", KINDS, "--all", "-n", POOLS)

        def left() -> str | None:
            # The chart's own NetworkPolicies for engines stay with the release, and the keys with the namespace.
            kept = ("networkpolicy", "secret/pdpool-keys")
            return ", ".join(sorted(x for x in everything(serving) if not x.startswith(kept))) or None

        wait_for("everything that was made for them to be gone", left, deadline_s=120, interval_s=2)
    finally:
        if operator == "away":
            serving.scale_operator(1)
