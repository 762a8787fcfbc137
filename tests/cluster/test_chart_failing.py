"""An engine answers its health check and fails every request. It leaves the rotation while its sibling serves."""

import os
from collections.abc import Iterator

import pytest

from dev.shell import wait_for
from tests.cluster.stack import (
    DRAIN_S,
    HTTP_PORT,
    POOL_KINDS,
    POOLS,
    SYSTEM,
    Object,
    Stack,
    condition,
    listed,
    pool,
    service,
)
from tests.cluster.stack_fault import CONFIG, FLAG, TEMPLATE
from tests.cluster.stack_traffic import Traffic

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600, func_only=True),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]

LEAVES_WITHIN_S = {"decode": 100.0, "prefill": 60.0}
"""A try that fails at decode lasts 15 s, while prefill waits for the other half; one at prefill lasts 3 s. The verdict
needs three of them."""
RETURNS_WITHIN_S = 100.0
"""The pause before a trial, and the time until the router adds the engine again."""


@pytest.fixture(scope="module")
def breakable(stack: Stack) -> Iterator[Stack]:
    """Two engines of each role whose HTTP side fails every POST while a file exists."""
    stack.apply(CONFIG)
    pools = [pool(kind, 2, drainTimeoutSeconds=DRAIN_S, template=TEMPLATE) for kind in POOL_KINDS]
    stack.apply(*pools, service(router={"replicas": 1}))
    stack.settle()
    stack.until_listed(1)
    yield stack
    stack.serve()
    stack.kubectl("delete", "configmap", "fault", "-n", POOLS, "--ignore-not-found")


def instance(stack: Stack, role: str, index: int) -> Object:
    """Return the entry of an instance in its pool's status."""
    status = stack.look("dpool" if role == "decode" else "ppool", "chat")["status"]
    return next(entry for entry in status["instances"] if entry["index"] == index)


def operator_metric(stack: Stack, text: str) -> list[str]:
    """Return the lines of the operator's metrics that begin with a text."""
    found = stack.kubectl("get", "--raw", f"/api/v1/namespaces/{SYSTEM}/pods/{operator_pod(stack)}:8080/proxy/metrics")
    return [line for line in found.splitlines() if line.startswith(text)]


def operator_pod(stack: Stack) -> str:
    (pod,) = stack.look("pod", labels="app.kubernetes.io/component=operator", within=SYSTEM)["items"]
    return pod["metadata"]["name"]


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_engine_that_fails_every_post_leaves_rotation_and_comes_back(breakable: Stack, expected, role: str) -> None:
    stack, pod = breakable, f"chat-{role}-1-0"
    url = f"http://{stack.look('pod', pod)['status']['podIP']}:{HTTP_PORT}"
    router, key = stack.pods("router")[0]["status"]["podIP"], stack.router_key()
    kind = "dpool" if role == "decode" else "ppool"
    other = "ppool" if role == "decode" else "dpool"
    innocent: set[str] = set()

    def still_listed() -> str | None:
        innocent.update(entry["verdict"] for entry in stack.look(other, "chat")["status"]["instances"])
        return f"{url} is listed; {instance(stack, role, 1)}" if url in listed(router, key) else None

    with Traffic(stack.router_url(), expected, patience_s=200.0) as traffic:
        stack.kubectl("exec", pod, "-n", POOLS, "-c", "engine", "--", "touch", FLAG)
        wait_for(f"{pod} to leave the rotation", still_listed, deadline_s=LEAVES_WITHIN_S[role], interval_s=0.5)
        stack.until(kind, "QueuesHealthy", status="False", reason="RequestsFailing", deadline_s=10)
        failing = instance(stack, role, 1)
        assert failing["verdict"] == "Failing"
        assert f"chat-{role}-0 finished" in failing["message"]
        assert condition(stack.look("pod", pod), "Ready")["status"] == "True"
        labels = f'{{instance="1",namespace="{POOLS}",pool="chat",role="{role}"'
        assert operator_metric(stack, f'pdpool_instance_verdict{labels},verdict="Failing"}} 1')
        assert operator_metric(stack, f"pdpool_instance_in_rotation{labels}}} 0")
        assert not innocent & {"Failing", "Stuck", "Saturated", "NothingFinishes"}

        stack.kubectl("exec", pod, "-n", POOLS, "-c", "engine", "--", "rm", FLAG)
        wait_for(
            f"{pod} to be back in the rotation",
            lambda: None if url in listed(router, key) else str(instance(stack, role, 1)),
            deadline_s=RETURNS_WITHIN_S,
        )

        def on_trial() -> str | None:
            verdict = instance(stack, role, 1)["verdict"]
            return f"it is still {verdict}" if verdict == "Failing" else None

        wait_for(f"{pod} to pass its trial", on_trial, deadline_s=60)
        traffic.more()
    assert [error for error in traffic.errors if "instead of" in error] == []
