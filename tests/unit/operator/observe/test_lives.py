"""What counts as the kubelet's report that a container has ended, and how long it is remembered."""

from typing import Any

import pytest
from pdpool_operator.observe.lives import Lives
from pdpool_operator.observe.model import PodLife
from pdpool_operator.observe.parse import pod_life

ENDED = {"terminated": {"containerID": "containerd://c1", "exitCode": 137}}
RUNNING = {"running": {"startedAt": "2026-11-22T06:00:00Z"}}


def pod(
    state: Any,
    last: Any = None,
    *,
    phase: str = "Running",
    deleted: bool = False,
    collected: bool = False,
    uid: str = "u",
    name: str = "engine",
) -> dict[str, Any]:
    meta = {"name": "chat-prefill-0-0", "uid": uid}
    if deleted:
        meta["deletionTimestamp"] = "2026-11-22T06:00:00Z"
    container = {"name": name, "state": state, "lastState": last or {}}
    target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC" if collected else "Evicted"}
    return {"metadata": meta, "status": {"phase": phase, "containerStatuses": [container], "conditions": [target]}}


@pytest.mark.parametrize(
    ("seen", "life"),
    [
        (pod(RUNNING), None),
        (pod(RUNNING, deleted=True), None),
        (pod(RUNNING, phase="Failed"), None),
        (pod(RUNNING, phase="Unknown"), None),
        ({"metadata": {"name": "p", "uid": "u"}, "status": {"phase": "Failed", "reason": "NodeLost"}}, None),
        (pod({"terminated": {"reason": "ContainerStatusUnknown", "exitCode": 137}}, phase="Failed"), None),
        (pod(ENDED, phase="Failed", name="sidecar"), None),
        (pod(RUNNING, ENDED), PodLife("chat-prefill-0-0", "containerd://c1", over=False)),
        (
            pod({"waiting": {"reason": "CrashLoopBackOff"}}, ENDED),
            PodLife("chat-prefill-0-0", "containerd://c1", False),
        ),
        (pod(ENDED), PodLife("chat-prefill-0-0", "containerd://c1", over=False)),
        pytest.param(
            pod(ENDED, deleted=True),
            PodLife("chat-prefill-0-0", "containerd://c1", over=False),
            id="the kubelet may not know that the pod is to go, and start it again",
        ),
        pytest.param(
            pod(ENDED, deleted=True, phase="Failed", collected=True),
            PodLife("chat-prefill-0-0", "containerd://c1", over=False),
            id="the phase is not the kubelet's",
        ),
        (pod(ENDED, deleted=True, phase="Failed"), PodLife("chat-prefill-0-0", "containerd://c1", over=True)),
        (pod(ENDED, phase="Succeeded"), PodLife("chat-prefill-0-0", "containerd://c1", over=True)),
    ],
)
def test_only_a_container_that_the_kubelet_names_as_terminated_has_ended(seen, life):
    assert pod_life(seen) == life


def test_what_was_said_of_a_pod_outlives_it_and_is_not_taken_back():
    lives = Lives()
    assert lives.note(pod(ENDED, deleted=True, phase="Failed"))
    assert not lives.note(pod(RUNNING, ENDED, deleted=True))
    found = lives.of("u")
    assert found is not None
    assert found.over


def test_the_oldest_are_forgotten_first():
    lives = Lives(remembered=2)
    for uid in "abc":
        lives.note(pod(ENDED, phase="Failed", uid=uid))
    assert [lives.of(uid) is not None for uid in "abc"] == [False, True, True]
