"""On which node a pod ran is remembered after its deletion."""

from typing import Any

from pdpool_operator.observe.pod_nodes import PodNodes


def pod(uid: str, node: str | None = "gpu-17") -> dict[str, Any]:
    return {"metadata": {"uid": uid}, "spec": {} if node is None else {"nodeName": node}}


def test_node_of_a_pod_is_known_once_it_is_scheduled() -> None:
    nodes = PodNodes()
    nodes.note(pod("a", None))
    assert nodes.of("a") is None
    nodes.note(pod("a"))
    assert nodes.of("a") == "gpu-17"


def test_pod_that_was_not_seen_for_longest_is_forgotten_first() -> None:
    nodes = PodNodes(remembered=2)
    for uid in ("a", "b", "a", "c"):
        nodes.note(pod(uid))
    assert [nodes.of(uid) for uid in "abc"] == ["gpu-17", None, "gpu-17"]
