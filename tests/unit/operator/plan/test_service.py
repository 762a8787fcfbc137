import json
from dataclasses import replace
from typing import Any

import pytest
from pdpool_operator.api import names
from pdpool_operator.api.key_epochs import KeyEpochs
from pdpool_operator.api.names import Role
from pdpool_operator.api.reasons import Reason
from pdpool_operator.api.services import DisaggregatedService
from pdpool_operator.build import router
from pdpool_operator.build.common import keys_secret
from pdpool_operator.build.network_policy import NetworkPeers, router_network_policy
from pdpool_operator.observe.model import (
    ObservedDeployment,
    ObservedInstance,
    ObservedPod,
    ObservedRouter,
    ObservedService,
    RouterWorker,
)
from pdpool_operator.plan.model import WorkerAction
from pdpool_operator.plan.pool import plan_pool
from pdpool_operator.plan.service import ASK_AGAIN_S, READ_BACK_S, plan_service, router_url, worker_events

from tests.unit.operator.plan.makers import (
    SETTINGS,
    T0,
    as_observed,
    make_instance,
    make_observed,
    make_pod,
    make_pool,
    make_service,
    seconds,
)

PEERS = NetworkPeers(watchers=({"podSelector": {}},))
WITH_POLICIES = replace(SETTINGS, peers=PEERS)
PREFILL_0 = RouterWorker("p0", "http://10.0.1.1:30000", Role.PREFILL, 8998)
DECODE_0 = RouterWorker("d0", "http://10.0.2.1:30000", Role.DECODE, None)
DECODE_1 = RouterWorker("d1", "http://10.0.2.2:30000", Role.DECODE, None)


def router_pod(number: int = 0, **changes: Any) -> ObservedPod:
    pod = make_pod(f"chat-router-{number}", ip=f"10.0.9.{number + 1}")
    return replace(pod, **{"labelled_reachable": "true", **changes})


def deployment(service: DisaggregatedService, **changes: Any) -> ObservedDeployment:
    annotations = router.router_deployment(service, SETTINGS)["metadata"]["annotations"]
    observed = ObservedDeployment(
        name="chat-router",
        uid="uid-of-deployment",
        controller_uid=service.metadata.uid,
        spec_hash=annotations[names.ANNOTATION_SPEC_HASH],
        build_hash=annotations[names.ANNOTATION_BUILD_HASH],
        replicas=service.spec.router.replicas,
        ready_replicas=service.spec.router.replicas,
        updated_replicas=service.spec.router.replicas,
        generation=1,
        observed_generation=1,
    )
    return replace(observed, **changes)


def observe(
    *,
    service: DisaggregatedService | None = None,
    prefill: tuple[ObservedInstance, ...] | None = None,
    decode: tuple[ObservedInstance, ...] | None = None,
    workers: tuple[RouterWorker, ...] | None = (PREFILL_0, DECODE_0, DECODE_1),
    **changes: Any,
) -> ObservedService:
    """Return a service at its goal, one prefill and two decode engines, except for the given values."""
    service = service or make_service()
    pools = make_pool(), make_pool(Role.DECODE, replicas=2)
    prefill = (make_instance(pools[0]),) if prefill is None else prefill
    decode = (make_instance(pools[1]), make_instance(pools[1], 1)) if decode is None else decode
    workers_json = router.workers_json({"10.0.1.1"}, {"10.0.2.1", "10.0.2.2"})
    keys = keys_secret("llm", SETTINGS.keys)
    objects = (
        keys,
        router.worker_list_config_map(service, workers_json),
        router.router_service(service, keys),
        router.router_disruption_budget(service),
    )
    observed = ObservedService(
        service=service,
        prefill=make_observed(pools[0], *prefill),
        decode=make_observed(pools[1], *decode),
        deployment=deployment(service),
        objects=tuple(as_observed(obj) for obj in objects),
        routers=(ObservedRouter(router_pod(), workers),),
        workers_json=workers_json,
    )
    return replace(observed, **changes)


def decode_instance(index: int, **changes: Any) -> ObservedInstance:
    return make_instance(make_pool(Role.DECODE, replicas=2), index, **changes)


def unready(instance: ObservedInstance) -> ObservedInstance:
    assert instance.pod is not None
    return replace(instance, pod=replace(instance.pod, ready=False))


def changes_of(observed: ObservedService) -> list[tuple[str, str]]:
    return [(str(c.action), c.url) for c in plan_service(observed, SETTINGS).workers]


def test_at_the_goal_there_is_nothing_to_do() -> None:
    plan = plan_service(observe(), SETTINGS)
    assert not plan.acts
    assert plan.progress is None
    assert plan.requeue_after_s is None
    assert plan.events == ()


def test_key_and_worker_list_are_made_before_the_routers_that_need_them() -> None:
    plan = plan_service(observe(deployment=None, objects=(), routers=(), workers_json=None), SETTINGS)
    kinds = [obj["kind"] for obj in plan.apply]
    assert kinds == ["Secret", "ConfigMap", "Service", "PodDisruptionBudget", "Deployment"]


def with_policy(observed: ObservedService) -> ObservedService:
    policy = as_observed(router_network_policy(observed.service, PEERS))
    return replace(observed, objects=(*observed.objects, policy))


def test_network_policy_is_made_before_the_router_and_only_with_the_setting() -> None:
    empty = observe(deployment=None, objects=(), routers=(), workers_json=None)
    kinds = [obj["kind"] for obj in plan_service(empty, WITH_POLICIES).apply]
    assert kinds[-2:] == ["NetworkPolicy", "Deployment"]
    assert not plan_service(with_policy(observe()), WITH_POLICIES).acts


def test_network_policy_is_deleted_with_the_setting() -> None:
    plan = plan_service(with_policy(observe()), SETTINGS)
    assert [(gone.kind, gone.name) for gone in plan.delete] == [("NetworkPolicy", "chat-router")]
    assert plan.apply == ()


def test_network_policy_is_deleted_with_the_router() -> None:
    off = with_policy(observe(service=make_service(router={"enabled": False})))
    assert "NetworkPolicy" in [gone.kind for gone in plan_service(off, WITH_POLICIES).delete]


def test_network_policy_of_another_owner_is_a_name_conflict() -> None:
    observed = observe()
    policy = as_observed(router_network_policy(observed.service, PEERS))
    policy = replace(policy, controller_uid="other", controller="Other/other")
    plan = plan_service(replace(observed, objects=(*observed.objects, policy)), SETTINGS)
    assert [fault.reason for fault in plan.faults] == ["NameConflict"]
    assert plan.delete == ()


def test_a_new_engine_is_added_to_every_router_with_its_bootstrap_port() -> None:
    routers = tuple(ObservedRouter(router_pod(n), (DECODE_0, DECODE_1)) for n in (0, 1))
    plan = plan_service(observe(routers=routers), SETTINGS)
    assert [(c.router, c.router_ip, c.action, c.url, c.role, c.bootstrap_port) for c in plan.workers] == [
        ("chat-router-0", "10.0.9.1", WorkerAction.ADD, "http://10.0.1.1:30000", Role.PREFILL, 8998),
        ("chat-router-1", "10.0.9.2", WorkerAction.ADD, "http://10.0.1.1:30000", Role.PREFILL, 8998),
    ]
    (event,) = worker_events(plan.workers)
    assert (event.reason, event.message) == (
        Reason.WORKER_ADDED,
        "Adding to rotation: prefill http://10.0.1.1:30000",
    )
    assert plan.requeue_after_s == READ_BACK_S


@pytest.mark.parametrize(
    "leaving",
    [
        decode_instance(1, drain_started=T0, drain_reason="Update"),
        decode_instance(1, deleting=True),
        decode_instance(1, pod=None),
        unready(decode_instance(1)),
        decode_instance(1, controller_uid="somebody-else"),
        decode_instance(1, pod=make_pod("chat-decode-1-0", ip="10.0.2.2", terminating=True)),
        decode_instance(1, pod=make_pod("chat-decode-1-0", ip=None)),
    ],
    ids=["draining", "deleting", "no pod", "not ready", "foreign", "terminating", "no address"],
)
def test_only_engines_that_can_serve_are_in_rotation(leaving: ObservedInstance) -> None:
    plan = plan_service(observe(decode=(decode_instance(0), leaving)), SETTINGS)
    assert [(c.action, c.url, c.worker_id) for c in plan.workers] == [(WorkerAction.REMOVE, DECODE_1.url, "d1")]
    assert [list(obj["data"]) for obj in plan.apply] == [[names.WORKERS_KEY]]
    written = json.loads(plan.apply[0]["data"][names.WORKERS_KEY])
    assert written["decode"] == [{"url": DECODE_0.url}]


def test_an_address_under_the_wrong_role_is_removed_before_it_is_added() -> None:
    wrong = replace(DECODE_1, url=PREFILL_0.url)
    assert changes_of(observe(workers=(wrong, DECODE_0, DECODE_1))) == [
        ("remove", PREFILL_0.url),
        ("add", PREFILL_0.url),
    ]


def test_no_side_of_a_list_is_empty_while_one_engine_takes_over_from_another() -> None:
    """A pool drains its engine as soon as the next one is Ready, which routers may not know yet."""
    decode = make_pool(Role.DECODE, replicas=2)
    instances = decode_instance(0, spec_hash="earlier", pod=make_pod(ip="10.0.2.1", spec_hash="earlier"))
    plan = plan_pool(make_observed(decode, instances, decode_instance(1)), SETTINGS, T0)
    assert [patch.name for patch in plan.patch] == ["chat-decode-0"]
    drains = replace(instances, drain_started=T0, drain_reason="Update")
    observed = observe(decode=(drains, decode_instance(1)), workers=(PREFILL_0, DECODE_0))
    assert changes_of(observed) == [("add", DECODE_1.url), ("remove", DECODE_0.url)]


def test_engines_that_leave_are_removed_at_once_where_others_stay() -> None:
    gone = RouterWorker("d7", "http://10.0.2.8:30000", Role.DECODE, None)
    assert changes_of(observe(workers=(PREFILL_0, DECODE_0, gone))) == [("remove", gone.url), ("add", DECODE_1.url)]
    assert changes_of(observe(workers=(DECODE_0, DECODE_1, gone))) == [("remove", gone.url), ("add", PREFILL_0.url)]


def test_a_prefill_engine_with_another_bootstrap_port_is_entered_anew() -> None:
    wrong = replace(PREFILL_0, bootstrap_port=None)
    assert changes_of(observe(workers=(wrong, DECODE_0, DECODE_1))) == [
        ("remove", PREFILL_0.url),
        ("add", PREFILL_0.url),
    ]


def test_an_outage_of_readiness_alone_does_not_empty_a_list() -> None:
    observed = observe(decode=(unready(decode_instance(0)), unready(decode_instance(1))))
    plan = plan_service(observed, SETTINGS)
    assert not plan.acts


def test_engines_that_were_never_in_rotation_do_not_enter_it_before_they_are_ready() -> None:
    observed = observe(
        decode=(unready(decode_instance(0)),), workers=(PREFILL_0,), workers_json=router.workers_json({"10.0.1.1"}, ())
    )
    assert changes_of(observed) == []


def test_a_drain_takes_the_last_engine_out_of_rotation_too() -> None:
    observed = observe(decode=(decode_instance(0, drain_started=T0),), workers=(PREFILL_0, DECODE_0))
    assert changes_of(observed) == [("remove", DECODE_0.url)]


def test_engines_that_could_not_be_sampled_stay_in_rotation() -> None:
    observed = observe()
    assert observed.decode is not None
    assert all(instance.ranks == {} for instance in observed.decode.instances)
    assert changes_of(observed) == []


def test_a_router_that_does_not_answer_is_asked_again_soon() -> None:
    plan = plan_service(observe(workers=None), SETTINGS)
    assert not plan.acts
    assert plan.requeue_after_s == ASK_AGAIN_S
    assert plan.progress is not None
    assert plan.progress.reason is Reason.ROUTER_LIST_OUTDATED


def test_a_router_that_ends_is_told_who_leaves_for_as_long_as_it_answers() -> None:
    ending = router_pod(terminating=True)
    leaves = (decode_instance(0), decode_instance(1, drain_started=T0, drain_reason="Update"))
    still = ObservedRouter(ending, (PREFILL_0, DECODE_0, DECODE_1))
    assert changes_of(observe(decode=leaves, routers=(still,))) == [("remove", DECODE_1.url)]
    past = plan_service(observe(routers=(ObservedRouter(ending, None, "refused"),)), SETTINGS)
    assert not past.acts
    assert past.progress is None
    assert past.requeue_after_s is None


def test_a_router_without_an_address_is_left_alone() -> None:
    assert changes_of(observe(routers=(ObservedRouter(router_pod(ip=None), ()),))) == []


def test_the_worker_list_is_written_only_when_it_changed() -> None:
    observed = observe(workers=())
    assert plan_service(observed, SETTINGS).apply == ()
    assert changes_of(observed) != []


@pytest.mark.parametrize(
    "text", ["not json", "[]", '{"decode": 5}', '{"decode": [{}]}', '{"decode": ["x"]}', "null", "[" * 200_000]
)
def test_an_unreadable_worker_list_is_written_anew(text: str) -> None:
    observed = observe(decode=(unready(decode_instance(0)),), workers_json=text)
    objects = tuple(obj for obj in observed.objects if obj.kind != "ConfigMap")
    plan = plan_service(replace(observed, objects=objects), SETTINGS)
    assert json.loads(plan.apply[0]["data"][names.WORKERS_KEY])["decode"] == []


def test_a_missing_pool_takes_its_engines_out_and_keeps_the_router() -> None:
    observed = observe(decode=())
    plan = plan_service(replace(observed, decode=None), SETTINGS)
    assert [(c.action, c.url) for c in plan.workers] == [
        (WorkerAction.REMOVE, DECODE_0.url),
        (WorkerAction.REMOVE, DECODE_1.url),
    ]
    assert plan.delete == ()


def test_more_routers_are_a_patch_of_that_number_alone() -> None:
    service = make_service(router={"replicas": 3})
    present = deployment(service, replicas=1, ready_replicas=1, updated_replicas=1)
    plan = plan_service(observe(service=service, deployment=present), SETTINGS)
    assert plan.apply == ()
    assert [patch.body for patch in plan.patch] == [{"metadata": {"uid": present.uid}, "spec": {"replicas": 3}}]


def test_another_build_restarts_no_router_and_shows_as_available() -> None:
    newer = replace(SETTINGS, router_image="localhost/pdpool-router:next")
    plan = plan_service(observe(), newer)
    assert not plan.acts
    assert plan.update_available == ("chat-router",)


def test_another_service_port_changes_the_service_and_no_router() -> None:
    service = make_service(router={"port": 9000})
    before = observe()
    plan = plan_service(replace(before, service=service), SETTINGS)
    assert [obj["kind"] for obj in plan.apply] == ["Service"]


def test_without_a_router_everything_of_ours_is_removed_and_nothing_else() -> None:
    observed = observe(service=make_service(router={"enabled": False}))
    foreign = replace(observed.objects[2], controller_uid="somebody-else")
    plan = plan_service(replace(observed, objects=(*observed.objects[:2], foreign)), SETTINGS)
    assert [(deletion.kind, deletion.name) for deletion in plan.delete] == [
        ("Deployment", "chat-router"),
        ("ConfigMap", "chat-router"),
    ]
    assert router_url(observed.service) == ""


@pytest.mark.parametrize("which", ["Deployment", "Service"])
def test_an_object_of_somebody_else_under_our_name_is_a_conflict(which: str) -> None:
    observed = observe()
    if which == "Deployment":
        observed = replace(observed, deployment=deployment(observed.service, controller_uid="x"))
    else:
        objects = tuple(replace(o, controller_uid="x") if o.kind == which else o for o in observed.objects)
        observed = replace(observed, objects=objects)
    plan = plan_service(observed, SETTINGS)
    assert not plan.acts
    assert [fault.reason for fault in plan.faults] == [Reason.NAME_CONFLICT]


def test_a_service_that_is_being_deleted_is_left_to_garbage_collection() -> None:
    service = make_service()
    meta = service.metadata.model_copy(update={"deletion_timestamp": T0 + seconds(1)})
    deleted = service.model_copy(update={"metadata": meta})
    assert not plan_service(observe(service=deleted, deployment=None, objects=()), SETTINGS).acts


def test_routers_that_start_or_roll_are_progress() -> None:
    service = make_service()
    starting = plan_service(observe(deployment=deployment(service, ready_replicas=0)), SETTINGS)
    rolling = plan_service(observe(deployment=deployment(service, updated_replicas=0)), SETTINGS)
    assert starting.progress is not None
    assert starting.progress.reason is Reason.STARTING
    assert rolling.progress is not None
    assert rolling.progress.reason is Reason.UPDATING


def test_failing_instance_leaves_rotation_while_another_serves() -> None:
    plan = plan_service(observe(decode=(decode_instance(0), decode_instance(1, out=True))), SETTINGS)
    assert [(c.action, c.url) for c in plan.workers] == [(WorkerAction.REMOVE, DECODE_1.url)]


@pytest.mark.parametrize(
    "other", [decode_instance(1, out=True), unready(decode_instance(1))], ids=["failing too", "not ready"]
)
def test_failing_instance_stays_where_no_other_serves(other: ObservedInstance) -> None:
    observed = observe(decode=(decode_instance(0, out=True), other))
    assert DECODE_0.url not in [url for action, url in changes_of(observed) if action == str(WorkerAction.REMOVE)]


def test_failing_instance_comes_back_to_the_list() -> None:
    observed = observe(workers=(PREFILL_0, DECODE_0))
    assert [(action, url) for action, url in changes_of(observed)] == [(str(WorkerAction.ADD), DECODE_1.url)]


def test_failing_instances_enter_the_list_where_no_other_serves() -> None:
    both = (decode_instance(0, out=True), decode_instance(1, out=True))
    observed = observe(decode=both, workers=(PREFILL_0,), workers_json=None)
    assert {url for action, url in changes_of(observed)} == {DECODE_0.url, DECODE_1.url}


def test_deployment_that_lost_labels_gets_them_back_without_a_restart() -> None:
    service = make_service()
    labels = router.router_deployment(service, SETTINGS)["metadata"]["labels"]
    kept = {key: value for key, value in labels.items() if key != names.LABEL_ROLE}
    plan = plan_service(observe(deployment=deployment(service, labels=kept)), SETTINGS)
    assert plan.apply == ()
    lost = {names.LABEL_ROLE: labels[names.LABEL_ROLE]}
    assert [patch.body for patch in plan.patch] == [{"metadata": {"uid": "uid-of-deployment", "labels": lost}}]
    assert [event.reason for event in plan.events] == [Reason.OBJECT_RESTORED]
    assert not plan_service(observe(deployment=deployment(service, labels=labels)), SETTINGS).acts


@pytest.mark.parametrize(
    ("router", "message"),
    [
        ({"args": ["--port=1"]}, "spec.router.args: '--port=1': pdpool sets --port from the fields of spec.router"),
        ({"args": ["--control-plane-api-keys", "x"]}, "spec.router.args: '--control-plane-api-keys'"),
        ({"template": {"spec": {"containers": [{"name": "router", "args": ["--policy=x"]}]}}}, "[router].args"),
        ({"template": {"spec": {"terminationGracePeriodSeconds": 1}}}, "running streams have 180 s to finish"),
        ({"template": {"metadata": {"labels": {"pdpool.dev/role": "decode"}}}}, "labels[pdpool.dev/role]"),
        ({"service": {"annotations": {"pdpool.dev/keys-hash": "x"}}}, "service.annotations[pdpool.dev/keys-hash]"),
    ],
)
def test_wrong_router_spec_is_named_and_rotation_goes_on(router: dict[str, Any], message: str) -> None:
    observed = replace(observe(workers=(PREFILL_0, DECODE_0)), service=make_service(router=router))
    plan = plan_service(observed, SETTINGS)
    (fault,) = plan.faults
    assert fault.reason is Reason.TEMPLATE_INVALID
    assert message in fault.message
    assert [(change.action, change.url) for change in plan.workers] == [(WorkerAction.ADD, DECODE_1.url)]
    assert not plan.apply
    assert not plan.delete


@pytest.mark.parametrize(
    "router", [{"image": "x"}, {"args": ["--x"]}, {"policy": {"prefill": "CacheAware"}}, {"resources": {"limits": {}}}]
)
def test_changed_router_spec_replaces_routers(router: dict[str, Any]) -> None:
    plan = plan_service(observe(service=make_service(router=router), deployment=deployment(make_service())), SETTINGS)
    assert [obj["kind"] for obj in plan.apply] == ["Deployment"]


def test_changed_service_type_keeps_routers() -> None:
    service = make_service(router={"service": {"type": "LoadBalancer", "annotations": {"a": "b"}}})
    before = observe()
    plan = plan_service(replace(before, service=service), SETTINGS)
    assert [(obj["kind"], obj["spec"]["type"]) for obj in plan.apply] == [("Service", "LoadBalancer")]


def test_raised_key_epoch_replaces_routers_after_their_secret() -> None:
    keys = {**SETTINGS.keys, "router-2.key": "k2"}
    plan = plan_service(observe(), replace(SETTINGS, keys=keys, key_epoch=2))
    assert [obj["kind"] for obj in plan.apply] == ["Secret", "Service", "Deployment"]
    template = plan.apply[-1]["spec"]["template"]
    assert template["metadata"]["annotations"][names.ANNOTATION_KEY_EPOCH] == "2"


def test_each_router_is_asked_with_the_key_of_its_own_epoch() -> None:
    routers = [ObservedRouter(router_pod(n, keys=KeyEpochs(n + 1)), (PREFILL_0, DECODE_0)) for n in (0, 1)]
    plan = plan_service(observe(routers=tuple(routers)), SETTINGS)
    assert [(change.router, change.key_epoch) for change in plan.workers] == [
        ("chat-router-0", 1),
        ("chat-router-1", 2),
    ]
