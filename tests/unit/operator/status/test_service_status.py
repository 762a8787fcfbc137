from dataclasses import replace
from typing import Any

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.api.services import DisaggregatedServiceStatus
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict
from pdpool_operator.observe.model import ObservedRouter, ObservedService
from pdpool_operator.plan.service import plan_service
from pdpool_operator.status.chain import find
from pdpool_operator.status.service import ServiceFacts, service_status

from tests.unit.operator.plan.makers import (
    SETTINGS,
    T0,
    make_instance,
    make_observed,
    make_pod,
    make_pool,
    make_service,
)
from tests.unit.operator.plan.test_service import decode_instance, deployment, observe, router_pod, unready


def status_of(observed: ObservedService, diagnoses: tuple[Diagnosis, ...] = ()) -> DisaggregatedServiceStatus:
    return service_status(ServiceFacts(observed, plan_service(observed, SETTINGS), diagnoses), T0)


def outcome(status: DisaggregatedServiceStatus, kind: str = "Ready") -> tuple[str, str, str]:
    found = find(status.conditions, kind)
    assert found is not None
    return str(found.status), found.reason, found.message


def test_at_the_goal_requests_can_be_served() -> None:
    status = status_of(observe())
    assert outcome(status)[:2] == ("True", "Ready")
    assert outcome(status, "Available")[:2] == ("True", "Serving")
    assert find(status.conditions, "Reconciling") is None
    assert outcome(status, "RouterReady") == ("True", "Ready", "1 router is Ready")
    assert status.url == "http://chat-router.llm.svc:8000"
    assert status.ready == "1/1 prefill, 2/2 decode"
    assert status.router_replicas == 1


def test_a_missing_pool_is_named() -> None:
    status = status_of(replace(observe(), decode=None))
    words = "DecodePool chat not found in this namespace; create it, or name another pool in poolRef"
    assert outcome(status) == ("False", "PoolNotFound", words)
    assert status.ready == "1/1 prefill, no decode"


def observe_pools(prefill: dict[str, Any], decode: dict[str, Any]) -> ObservedService:
    """Return a service at its goal, except for the given specs of its pools."""
    sides = make_pool(**prefill), make_pool(Role.DECODE, **decode)
    observed = [make_observed(pool, make_instance(pool)) for pool in sides]
    return replace(observe(), prefill=observed[0], decode=observed[1])


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        (
            {"model": {"servedName": "a"}},
            {"model": {"servedName": "b"}},
            "Requests fail: model.servedName is a in PrefillPool chat, but b in DecodePool chat; give both pools",
        ),
        (
            {"transfer": {"backend": "Local"}},
            {},
            "transfer.backend is Local in PrefillPool chat, but NIXL in DecodePool chat",
        ),
        (
            {"model": {"path": "/models/a/"}},
            {"model": {"path": "/models/b"}},
            "model.servedName is a (from model.path /models/a/) in PrefillPool chat, but b (from model.path /models/b)",
        ),
        (
            {"model": {"path": "tiny", "servedName": "m"}},
            {"model": {"path": "/models/m"}},
            "model.path is tiny in PrefillPool chat, but /models/m in DecodePool chat",
        ),
    ],
    ids=["names", "backends", "names that follow from paths", "models"],
)
def test_pools_that_cannot_work_together_are_named_with_the_field_and_both_values(
    prefill: dict[str, Any], decode: dict[str, Any], words: str
) -> None:
    status = status_of(observe_pools(prefill, decode))
    assert outcome(status)[:2] == ("False", "PoolsContradict")
    assert words in outcome(status)[2]
    assert outcome(status, "Stalled")[:2] == ("True", "PoolsContradict")
    assert outcome(status, "Available")[:2] == ("False", "PoolsContradict")


def test_every_contradiction_of_two_pools_is_told_at_once() -> None:
    prefill = {"model": {"path": "tiny"}, "transfer": {"backend": "Local"}}
    message = outcome(status_of(observe_pools(prefill, {})))[2]
    assert [field in message for field in ("model.path", "model.servedName", "transfer.backend")] == [True] * 3


def test_one_model_may_stand_under_two_paths() -> None:
    here, there = {"path": "/models/m", "servedName": "m"}, {"path": "/mnt/hub/m"}
    assert outcome(status_of(observe_pools({"model": here}, {"model": there})))[:2] == ("True", "Ready")


def test_a_contradiction_hides_no_router_of_a_service_and_keeps_its_engines_listed() -> None:
    observed = observe_pools({}, {"transfer": {"backend": "Local"}})
    status = status_of(observed)
    assert outcome(status, "RouterReady")[:2] == ("True", "Ready")
    assert not plan_service(observed, SETTINGS).faults


def test_one_engine_of_each_side_is_enough_to_serve() -> None:
    one_down = status_of(observe(decode=(decode_instance(0), unready(decode_instance(1)))))
    all_down = status_of(observe(decode=(unready(decode_instance(0)), unready(decode_instance(1)))))
    assert outcome(one_down)[:2] == ("True", "Ready")
    words = "No instance of DecodePool chat can serve; see its own conditions"
    assert outcome(all_down) == ("False", "PoolsNotReady", words)


def test_a_side_that_cannot_serve_is_told_with_what_keeps_its_pods_down() -> None:
    pulling = decode_instance(0, pod=make_pod("chat-decode-0-0", ready=False, waiting_reason="ErrImagePull"))
    message = outcome(status_of(observe(decode=(pulling,))))[2]
    assert message == "No instance of DecodePool chat can serve: chat-decode-0-0 cannot pull its image: ErrImagePull"


@pytest.mark.parametrize("ready_replicas", [0, 1])
def test_a_side_at_zero_is_as_wanted_and_cannot_serve(ready_replicas: int) -> None:
    routers = deployment(make_service(), ready_replicas=ready_replicas)
    observed = replace(observe(deployment=routers), decode=make_observed(make_pool(Role.DECODE, replicas=0)))
    status = status_of(observed)
    assert outcome(status)[:2] == ("True", "ScaledToZero")
    assert outcome(status, "Available") == ("False", "ScaledToZero", "DecodePool chat is scaled to 0")
    assert find(status.conditions, "Reconciling") is None


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"deployment": None}, "RouterNotReady", "not created yet"),
        ({"deployment": deployment(make_service(), ready_replicas=0)}, "RouterNotReady", "0 of 1 routers are Ready"),
        ({"deployment": deployment(make_service(), failure="quota")}, "PodRejected", "chat-router: quota"),
        (
            {"routers": (ObservedRouter(router_pod(ready=False, waiting_reason="ErrImagePull"), None),)},
            "ImagePullFailed",
            "ErrImagePull",
        ),
        (
            {
                "routers": (
                    ObservedRouter(
                        make_pod(
                            "chat-router-0",
                            ready=False,
                            waiting_reason="CreateContainerConfigError",
                            waiting_message='secret "pdpool-keys" not found',
                        ),
                        None,
                    ),
                )
            },
            "MissingSecret",
            "Secret pdpool-keys does not exist",
        ),
    ],
)
def test_why_routers_are_not_ready_is_named(changes: dict[str, Any], reason: str, words: str) -> None:
    status = status_of(observe(**changes))
    for kind in ("Ready", "RouterReady"):
        assert outcome(status, kind)[:2] == ("False", reason)
        assert words in outcome(status, kind)[2]


def test_queues_of_both_sides_count() -> None:
    subject = Subject("chat", Role.DECODE, 1, None, leaving=False, tracks=())
    stuck = Diagnosis(subject, Verdict.STUCK, "decode chat-decode-1 rank 0: engine loop has not run")
    status = status_of(observe(), (stuck,))
    assert outcome(status, "QueuesHealthy") == ("False", "QueuesStuck", stuck.message)
    assert status.queues == "Stuck (decode 1)"
    assert outcome(status)[:2] == ("True", "Ready")


@pytest.mark.parametrize(("unsettled", "expected"), [((), "True"), (("does not show yet",), "False")])
def test_worker_lists_count_until_they_are_read_back(unsettled: tuple[str, ...], expected: str) -> None:
    observed = observe(workers=())
    plan = plan_service(observed, SETTINGS)
    status = service_status(ServiceFacts(observed, plan, (), (), unsettled), T0)
    assert outcome(status)[0] == expected
    assert outcome(status, "Available")[0] == "True"


def test_the_status_fits_its_schema_when_written() -> None:
    status = status_of(observe())
    assert DisaggregatedServiceStatus.model_validate(status.to_dict()) == status
