"""Only pods whose controllers lead to the service by UID are sent the routers' key."""

from typing import Any

import pytest
from pdpool_operator.observe.router_pods import own_pods


def made(uid: str, owner: str = "", *, controls: bool = True, kind: str = "X") -> dict[str, Any]:
    owners = [{"uid": owner, "kind": kind, "name": "chat-router", "controller": controls}] if owner else []
    return {"metadata": {"uid": uid, "name": "chat-router", "ownerReferences": owners}}


DEPLOYMENT = made("deployment", "service")
SETS = [made("old", "deployment"), made("new", "deployment"), made("foreign", "another")]


def own(pod: dict[str, Any], deployment: dict[str, Any] | None = DEPLOYMENT) -> bool:
    return bool(own_pods("service", deployment, SETS, [pod]))


@pytest.mark.parametrize("replica_set", ["old", "new"])
def test_pods_of_every_replica_set_of_the_deployment_are_own(replica_set: str):
    assert own(made("pod", replica_set))


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(made("pod"), id="labels only"),
        pytest.param(made("pod", "foreign"), id="a set of another Deployment"),
        pytest.param(made("pod", "gone"), id="a set that does not exist"),
        pytest.param(made("pod", "new", controls=False), id="owner that does not control"),
        pytest.param(made("pod", "deployment", kind="ReplicaSet"), id="owned by the Deployment itself"),
        pytest.param(made("pod", "service"), id="owned by the service itself"),
    ],
)
def test_other_pods_are_not_own(pod: dict[str, Any]):
    assert not own(pod)


@pytest.mark.parametrize("deployment", [None, made("deployment"), made("deployment", "another service")])
def test_pods_of_a_foreign_or_missing_deployment_are_not_own(deployment: dict[str, Any] | None):
    assert not own(made("pod", "new"), deployment)
