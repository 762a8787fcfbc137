"""Without a router of pdpool's, a pod ends by its readiness and its preStop hook, with its whole grace period."""

from dataclasses import replace
from typing import Any

import pytest
from pdpool_operator.observe.model import ObservedInstance
from pdpool_operator.plan.pool import plan_pool

from tests.unit.operator.plan.makers import SETTINGS, T0, make_instance, make_observed, make_pool, make_sample, seconds
from tests.unit.operator.plan.test_selection import outdated

POOL = make_pool(replicas=2)
BUSY: dict[str, Any] = {"ranks": {0: make_sample(running=8)}}


def deletions(*instances: ObservedInstance, routed: bool = False) -> list[tuple[str, str, int | None]]:
    plan = plan_pool(make_observed(POOL, *instances, routed=routed), SETTINGS, T0 + seconds(5))
    return [(deletion.kind, deletion.name, deletion.grace_period_s) for deletion in plan.delete]


def test_update_under_traffic_keeps_the_grace_period() -> None:
    instances = outdated(POOL, 0, **BUSY), outdated(POOL, 1, **BUSY)
    assert deletions(*instances) == [("Pod", "chat-prefill-1-0", None)]
    assert deletions(*instances, routed=True) == []


def test_update_takes_one_pod_at_a_time() -> None:
    leaving = outdated(POOL, 1)
    assert leaving.pod is not None
    ending = make_instance(POOL, 1, pod=replace(leaving.pod, terminating=True))
    assert deletions(outdated(POOL, 0, **BUSY), ending) == []


def test_scale_in_under_traffic_needs_no_drain() -> None:
    instances = [make_instance(POOL, index, **BUSY) for index in range(3)]
    assert deletions(*instances) == [("StatefulSet", "chat-prefill-2", None)]


def test_router_turned_off_during_a_drain_ends_it() -> None:
    drains = outdated(POOL, 1, drain_started=T0, drain_seen=T0, drain_reason="Update", **BUSY)
    other = outdated(POOL, 0, **BUSY)
    assert deletions(other, drains, routed=True) == []
    assert deletions(other, drains) == [("Pod", "chat-prefill-1-0", None)]


@pytest.mark.parametrize("listed_by", [("chat-router-x",), None], ids=["lists it", "silent"])
def test_router_that_still_ends_keeps_the_drain(listed_by: Any) -> None:
    assert deletions(outdated(POOL, 0), outdated(POOL, 1, listed_by=listed_by, **BUSY)) == []
