"""A frozen engine is named, restarted and moved by the operator, without a person, where the service allows it."""

import os
from collections.abc import Iterator

import pytest

from dev.shell import wait_for
from tests.cluster.stack import DRAIN_S, HTTP_PORT, POOL_KINDS, POOLS, Object, Stack, ask, pool, service
from tests.cluster.stack_traffic import Traffic

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(400, func_only=True),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]

RESTARTED_WITHIN_S = 150.0
"""About 35 s until the verdict, 10 s after a purge, 30 s until repair may act, and the load of other tests."""
FROZEN = 1
ACCUSES = {"Stuck", "Failing"}


@pytest.fixture
def repaired(stack: Stack) -> Iterator[Stack]:
    """One prefill engine and two decode engines, which the operator may restart."""
    template = {"spec": {"containers": [{"name": "engine", "args": ["--enable-faults"]}]}}
    pools = [
        pool(kind, n, drainTimeoutSeconds=DRAIN_S, template=template)
        for kind, n in zip(POOL_KINDS, (1, 2), strict=True)
    ]
    stack.apply(*pools, service(router={"replicas": 1}, repair={"mode": "Enforce"}))
    stack.settle()
    stack.until_listed(1)
    yield stack
    # A new pool has no restarts that count for later tests.
    stack.kubectl("delete", "dpool", "chat", "-n", POOLS, "--timeout=60s", timeout_s=70)
    stack.serve()


def entries(stack: Stack, kind: str) -> dict[int, Object]:
    """Return the instances in a pool's status by index."""
    return {entry["index"]: entry for entry in stack.look(kind, "chat")["status"]["instances"]}


def node_of(stack: Stack, pod: str) -> str:
    return str(stack.look("pod", pod)["spec"]["nodeName"])


def freeze_until(stack: Stack, action: str) -> set[tuple[str, int, str]]:
    """Freeze the engine until the operator has made this repair and all is Ready again.

    Return who was accused meanwhile: kind, index and verdict.
    """
    pod = f"chat-decode-{FROZEN}-0"
    accused: set[tuple[str, int, str]] = set()

    def unmet() -> str | None:
        for kind in ("ppool", "dpool"):
            seen = entries(stack, kind).items()
            accused.update((kind, i, entry["verdict"]) for i, entry in seen if entry["verdict"] in ACCUSES)
        repairs = stack.look("dpool", "chat")["status"].get("repairs", [])
        done = any((one["action"], one["state"]) == (action, "Done") for one in repairs)
        return None if done else f"{repairs}; {accused}"

    ask(f"http://{stack.look('pod', pod)['status']['podIP']}:{HTTP_PORT}/faults", {"freeze_scheduler": True})
    wait_for(f"{pod} to get the repair {action}", unmet, deadline_s=RESTARTED_WITHIN_S)
    stack.settle()
    stack.until_listed(1)
    return accused


@pytest.mark.long
def test_frozen_decode_engine_is_restarted_and_then_moved_to_another_node(repaired: Stack, expected) -> None:
    stack, before, pod = repaired, repaired.uids(), f"chat-decode-{FROZEN}-0"
    bad = node_of(stack, pod)
    others = [name for name in stack.nodes if name != bad]
    with Traffic(stack.router_url(), expected, patience_s=200.0) as traffic:
        try:
            stack.kubectl("cordon", *others)  # so that the restarted pod starts there again
            accused = freeze_until(stack, "Restart")
            assert node_of(stack, pod) == bad
        finally:
            stack.kubectl("uncordon", *others)
        after = stack.uids()
        assert {name for name in before if after.get(name) != before[name]} == {pod}
        traffic.more()
        accused |= freeze_until(stack, "Replace")
        assert node_of(stack, pod) in others
        traffic.more()

    # The verdict on the frozen engine may last for less than the time between two looks.
    assert accused <= {("dpool", FROZEN, "Stuck")}, "an instance was accused that was not frozen"
    assert [error for error in traffic.errors if "instead of" in error] == []
    stateful_set = stack.get("statefulset", f"chat-decode-{FROZEN}")
    assert stateful_set["metadata"]["annotations"]["pdpool.dev/avoid-node"] == bad
    repairs = stack.look("dpool", "chat")["status"]["repairs"]
    assert {one["index"] for one in repairs} == {FROZEN}
    # The purge is withdrawn if no hand-off was opened before the engine froze.
    assert {one["state"] for one in repairs if one["action"] == "Purge"} <= {"Done", "Withdrawn"}
    made = [one for one in repairs if one["action"] != "Purge"]
    assert [(one["action"], one["node"], one["state"]) for one in made] == [
        ("Restart", bad, "Done"),
        ("Replace", bad, "Done"),
    ]
    assert all("engine loop does not run" in one["message"] for one in made)
