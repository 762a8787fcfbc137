"""A silent node makes a pod not Ready. Pods whose kubelet reports are not Ready for other reasons."""

from typing import Any

import pytest
from pdpool_operator.observe import parse

META = {"name": "p", "uid": "u", "creationTimestamp": "2026-11-22T06:00:00Z"}
AT = "2026-11-22T06:01:00Z"


def pod(ready: dict[str, str], containers_ready: str = "True") -> Any:
    conditions = [
        {"type": "Ready", "lastTransitionTime": AT, **ready},
        {"type": "ContainersReady", "status": containers_ready},
    ]
    return parse.observed_pod({"metadata": META, "status": {"phase": "Running", "conditions": conditions}})


@pytest.mark.parametrize(
    ("ready", "containers", "silent"),
    [
        ({"status": "False"}, "True", True),
        ({"status": "False", "reason": "ReadinessGatesNotReady"}, "True", False),
        ({"status": "False", "reason": "ContainersNotReady"}, "False", False),
        ({"status": "False"}, "False", False),
        ({"status": "True"}, "True", False),
    ],
    ids=["node controller", "readiness gate", "probe", "no containers", "Ready"],
)
def test_silence_is_told_from_reports(ready: dict[str, str], containers: str, silent: bool) -> None:
    assert pod(ready, containers).node_silent is silent


def test_ready_since_is_known_only_while_ready() -> None:
    assert pod({"status": "True"}).ready_since == parse.moment(AT)
    assert pod({"status": "False"}).ready_since is None
