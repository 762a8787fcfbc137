from dataclasses import replace
from typing import Any

import pytest
from pdpool_operator.observe.model import ObservedInstance
from pdpool_operator.observe.samples import EngineSample
from pdpool_operator.plan.drain import SETTLE_S, deadline, has_work_to_lose, work_left

from tests.unit.operator.plan.makers import T0, make_instance, make_pod, make_pool, make_sample, seconds

LATER = T0 + seconds(SETTLE_S)


def draining(**changes: Any) -> ObservedInstance:
    defaults = {"drain_started": T0, "drain_seen": T0, "drain_reason": "Update", "ranks": {0: make_sample(LATER)}}
    return make_instance(make_pool(), **{**defaults, **changes})


def test_an_idle_engine_that_no_router_lists_is_drained() -> None:
    assert work_left(draining(), routed=True) == ()


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"listed_by": ("chat-router-x",)}, "in the worker list of chat-router-x"),
        ({"listed_by": None}, "a router did not return its worker list"),
        ({"ranks": {}}, "no rank has been sampled"),
        ({"ranks": {0: make_sample(LATER, running=2)}}, "rank 0 has 2 running"),
        ({"ranks": {0: make_sample(LATER, holds=1)}}, "rank 0 has 1 held"),
        (
            {"ranks": {0: make_sample(LATER, queues={"prefill_inflight": (3, 1.0, 9)})}},
            "rank 0 has 3 in prefill_inflight",
        ),
        ({"ranks": {0: make_sample(LATER, running=None)}}, "rank 0 does not answer (timeout)"),
        ({"ranks": {0: make_sample(LATER, connector_error="refused")}}, "rank 0 does not answer (refused)"),
        ({"ranks": {0: make_sample(LATER), 1: make_sample(LATER, rank=1, running=1)}}, "rank 1 has 1 running"),
        (
            {"ranks": {0: make_sample(LATER - seconds(0.001))}},
            "rank 0 has not been sampled since it left the rotation",
        ),
        (
            {"ranks": {0: replace(make_sample(LATER), asked_at=LATER - seconds(0.001))}},
            "rank 0 has not been sampled since it left the rotation",
        ),
        (
            {"ranks": {0: make_sample(LATER), 1: make_sample(LATER, rank=1, connector_error="timeout")}},
            "rank 1 does not answer (timeout)",
        ),
        (
            {"ranks": {0: make_sample(LATER), 1: replace(make_sample(LATER, rank=1, holds=2), engine=None)}},
            "rank 1 has 2 held",
        ),
    ],
)
def test_what_is_left_or_cannot_be_seen_keeps_a_drain_going(changes: dict[str, Any], left: str) -> None:
    assert work_left(draining(**changes), routed=True) == (left,)


def test_paused_engine_is_not_drained() -> None:
    """SGLang puts the requests that it retracts for a pause aside, and counts them nowhere."""
    sample = make_sample(LATER)
    assert sample.connector is not None
    paused = replace(sample, connector=replace(sample.connector, paused=True))
    assert work_left(draining(ranks={0: paused}), routed=True) == ("rank 0 is paused on request, and hides its work",)


def test_ranks_whose_requests_another_rank_counts_do_not_keep_a_drain_going() -> None:
    counted_elsewhere = replace(make_sample(LATER, rank=1), engine=None)
    assert work_left(draining(ranks={0: make_sample(LATER), 1: counted_elsewhere}), routed=True) == ()


def test_a_pod_that_is_not_ready_has_only_the_work_it_is_known_to_have() -> None:
    gone_quiet = make_instance(
        make_pool(), ready=False, ranks={0: make_sample(connector_error="timeout", running=None)}
    )
    assert not has_work_to_lose(gone_quiet)
    assert has_work_to_lose(replace(gone_quiet, ranks={0: make_sample(running=1)}))


def test_a_pod_that_is_not_ready_is_drained_only_when_no_router_lists_it() -> None:
    listed = draining(pod=make_pod(ready=False), ranks={}, listed_by=("chat-router-x",))
    assert "in the worker list of chat-router-x" in work_left(listed, routed=True)
    assert work_left(replace(listed, listed_by=()), routed=True) == ()


@pytest.mark.parametrize("change", [{"terminating": True}, {"phase": "Failed"}, {"phase": "Succeeded"}])
def test_a_pod_that_ends_or_has_ended_has_nothing_to_lose(change: dict[str, Any]) -> None:
    instance = draining(ranks={0: make_sample(LATER, running=5)})
    assert instance.pod is not None
    assert not has_work_to_lose(replace(instance, pod=replace(instance.pod, **change)))
    assert not has_work_to_lose(replace(instance, pod=None))


def test_the_deadline_counts_from_the_start_of_the_drain() -> None:
    assert deadline(T0, 60) == T0 + seconds(60)


def test_no_drain_waits_for_leaked_requests() -> None:
    waits = replace(make_sample(LATER), engine=EngineSample(0, 0, {"prefill_inflight": 3}))
    left = draining(ranks={0: waits}, leaked={0: {"prefill_inflight": 2}})
    assert work_left(left, routed=True) == ("rank 0 has 1 in prefill_inflight",)
    assert work_left(replace(left, leaked={0: {"prefill_inflight": 3}}), routed=True) == ()
