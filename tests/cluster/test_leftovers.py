"""A killed session does not block later sessions."""

import json
import os
import secrets

import pytest

from dev.shell import run
from dev.tools.build import binary
from tests.cluster.leftovers import remove_benches
from tests.cluster.operator_harness import BENCH, NOBODY

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(180),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]


def test_what_a_killed_test_of_an_operator_left_is_removed_with_a_pod_that_a_finalizer_holds() -> None:
    kubectl = binary("kubectl")
    name = f"op-{secrets.token_hex(4)}"
    held = {"name": "held", "namespace": name, "finalizers": ["pdpool.dev/test"]}
    # An account of its own: a new namespace gets its default account only after some time.
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "held", "namespace": name}}
    containers = [{"name": "engine", "image": "none"}]
    spec = {"schedulerName": NOBODY, "serviceAccountName": "held", "containers": containers}
    things = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {BENCH: ""}}},
        account,
        {"apiVersion": "v1", "kind": "Pod", "metadata": held, "spec": spec},
    ]
    run(kubectl, "create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": things}))
    remove_benches(f"namespace/{name}")
    assert run(kubectl, "get", "namespace", name, "--ignore-not-found", "-o", "name") == ""
