from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from pdpool_operator.api.base import Condition, ConditionStatus
from pdpool_operator.api.pools import Pool, PoolStatus
from pdpool_operator.api.reasons import Reason
from pdpool_operator.build.settings import BuildSettings
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict
from pdpool_operator.observe.model import ObservedInstance
from pdpool_operator.observe.samples import HoldSample
from pdpool_operator.plan.fences import Unproven
from pdpool_operator.plan.model import Fault, Plan
from pdpool_operator.plan.pool import plan_pool
from pdpool_operator.plan.repair_model import Stop
from pdpool_operator.status.chain import find
from pdpool_operator.status.pool import PoolFacts, pool_status

from tests.unit.operator.plan.makers import (
    SETTINGS,
    T0,
    follow_all,
    make_instance,
    make_observed,
    make_pod,
    make_pool,
    make_sample,
    seconds,
)


def diagnosis(
    index: int = 0, verdict: Verdict = Verdict.IDLE, message: str = "nothing waits", **changes: Any
) -> Diagnosis:
    subject = Subject("chat", make_pool().role, index, make_pod(), leaving=False, tracks=())
    return replace(Diagnosis(subject, verdict, message), **changes)


def status_of(
    pool: Pool,
    *instances: ObservedInstance,
    diagnoses: Sequence[Diagnosis] | None = None,
    plan: Plan | None = None,
    faults: tuple[Fault, ...] = (),
    settings: BuildSettings = SETTINGS,
    unproven: tuple[Unproven, ...] = (),
    stops: tuple[Stop, ...] = (),
    at: float = 0.0,
) -> PoolStatus:
    observed = make_observed(pool, *instances)
    plan = plan or plan_pool(observed, settings, T0)
    found = tuple(diagnosis(i.index) for i in instances) if diagnoses is None else tuple(diagnoses)
    return pool_status(PoolFacts(observed, plan, found, T0 + seconds(at), faults, unproven, stops=stops))


def condition(status: PoolStatus, kind: str) -> Condition:
    found = find(status.conditions, kind)
    assert found is not None
    return found


def outcome(status: PoolStatus, kind: str = "Ready") -> tuple[str, str]:
    found = condition(status, kind)
    return str(found.status), found.reason


def with_pod(instance: ObservedInstance, **changes: Any) -> ObservedInstance:
    assert instance.pod is not None
    return replace(instance, pod=replace(instance.pod, **changes))


def test_at_the_goal_everything_is_good_and_belongs_to_the_generation() -> None:
    pool = make_pool(replicas=2)
    status = status_of(pool, make_instance(pool), make_instance(pool, 1))
    assert outcome(status) == ("True", "Ready")
    assert outcome(status, "Available") == ("True", "Serving")
    assert {c.type for c in status.conditions} == {"Available", "Ready", "QueuesHealthy", "HoldsProvable"}
    assert outcome(status, "QueuesHealthy") == ("True", "QueuesFlowing")
    assert status.observed_generation == pool.metadata.generation
    assert {c.observed_generation for c in status.conditions} == {pool.metadata.generation}
    assert (status.replicas, status.ready_replicas, status.updated_replicas, status.ready) == (2, 2, 2, "2/2")
    assert status.selector == "pdpool.dev/pool=chat,pdpool.dev/role=prefill"
    assert status.queues == "Idle"


def test_memory_that_nobody_can_prove_free_is_a_condition_that_names_holder_and_peer_and_leaves_ready_alone() -> None:
    pool = make_pool()
    why = "its pod is gone from all pools, and no kubelet reported the end of its container"
    lost = [
        Unproven(f"chat-decode-{holder}-0", rank, HoldSample(letter * 32, "gone", "run"), why)
        for holder in range(7)
        for rank, letter in enumerate("ddef")
    ]
    status = status_of(pool, make_instance(pool), unproven=tuple(lost))
    assert outcome(status, "HoldsProvable") == ("False", "PeerUnproven")
    message = condition(status, "HoldsProvable").message
    assert message.count("chat-decode-0-0 holds memory for process dddddddd, eeeeeeee, ffffffff: its pod is gone") == 1
    assert "and 2 more" in message
    assert outcome(status) == ("True", "Ready")
    assert outcome(status_of(pool, make_instance(pool)), "HoldsProvable") == ("True", "NothingUnproven")


def test_stopped_repair_is_a_condition_while_it_lasts() -> None:
    pool = make_pool()
    stops = (Stop(Reason.RESTART_DID_NOT_HELP, "Instance 0 is not restarted"), Stop(Reason.MANY_AT_FAULT, "nor is 1"))
    status = status_of(pool, make_instance(pool), stops=stops)
    assert outcome(status, "RepairStopped") == ("True", "RestartDidNotHelp")
    assert condition(status, "RepairStopped").message == "Instance 0 is not restarted nor is 1"
    assert outcome(status) == ("True", "Ready")
    assert find(status_of(pool, make_instance(pool)).conditions, "RepairStopped") is None


def test_a_pod_that_a_dead_node_does_not_let_go_is_told_once_its_time_is_over() -> None:
    pool = make_pool(replicas=2)
    stuck = make_instance(pool, 1, ready=False)
    assert stuck.pod is not None
    stuck = replace(stuck, pod=replace(stuck.pod, terminating=True, gone_by=T0, node="node-7"))
    assert outcome(status_of(pool, make_instance(pool), stuck, at=60)) == ("False", "Starting")
    for at in (61, 3600):
        status = status_of(pool, make_instance(pool), stuck, at=at)
        assert outcome(status) == ("False", "PodLingers")
        message = condition(status, "Ready").message
        assert message.startswith("chat-prefill-1-0 should have terminated by 2026-11-21T12:00:00Z, but node node-7")


def test_a_new_pool_has_no_pods_and_progresses() -> None:
    status = status_of(make_pool(replicas=2))
    assert outcome(status) == ("False", "NoPods")
    assert outcome(status, "Reconciling") == ("True", "ScalingUp")
    assert outcome(status, "Available") == ("False", "NoPods")
    assert status.ready == "0/2"


def test_a_pool_scaled_to_zero_is_ready() -> None:
    status = status_of(make_pool(replicas=0))
    assert outcome(status) == ("True", "ScaledToZero")
    assert outcome(status, "Available") == ("False", "ScaledToZero")
    assert outcome(status, "QueuesHealthy") == ("True", "NoInstances")


@pytest.mark.parametrize(
    ("pod", "verdict", "reason"),
    [
        ({}, Verdict.STARTING, "Starting"),
        ({}, Verdict.UNKNOWN, "Starting"),
        ({"was_ready": True}, Verdict.STARTING, "EnginesNotReady"),
        ({"was_ready": True}, Verdict.UNKNOWN, "EnginesNotReady"),
        ({}, Verdict.STUCK, "EnginesNotReady"),
    ],
)
def test_engines_that_cannot_serve_start_or_have_served(pod: dict[str, Any], verdict: Verdict, reason: str) -> None:
    pool = make_pool()
    instance = with_pod(make_instance(pool, ready=False), **pod)
    status = status_of(pool, instance, diagnoses=[diagnosis(verdict=verdict)])
    for kind in ("Ready", "Available"):
        assert outcome(status, kind) == ("False", reason)
        assert "chat-prefill-0" in condition(status, kind).message
    assert outcome(status, "Reconciling") == ("True", reason)


@pytest.mark.parametrize(
    ("pod", "reason", "words"),
    [
        (
            {"waiting_reason": "ImagePullBackOff", "waiting_message": 'Back-off pulling image "x:1"'},
            "ImagePullFailed",
            'cannot pull its image: Back-off pulling image "x:1"',
        ),
        (
            {"waiting_reason": "CreateContainerConfigError", "waiting_message": 'secret "hf-token" not found'},
            "MissingSecret",
            "Secret hf-token does not exist",
        ),
        (
            {"warnings": ('MountVolume.SetUp failed for volume "k" : secret "tls" not found',)},
            "MissingSecret",
            "Secret tls does not exist",
        ),
        (
            {"waiting_reason": "CreateContainerConfigError", "waiting_message": 'configmap "cfg" not found'},
            "MissingReference",
            "ConfigMap cfg does not exist",
        ),
        (
            {"unschedulable": '0/2 nodes are available: persistentvolumeclaim "models" not found.'},
            "MissingReference",
            "PersistentVolumeClaim models does not exist",
        ),
        (
            {"waiting_reason": "CreateContainerConfigError", "waiting_message": "container has runAsNonRoot"},
            "ContainerConfigInvalid",
            "runAsNonRoot",
        ),
        ({"keeps_ending": True}, "CrashLoop", "keeps ending; see kubectl logs"),
        (
            {"keeps_ending": True, "last_end": "exit code 1: no such file"},
            "CrashLoop",
            "keeps ending (exit code 1: no such file); see",
        ),
        (
            {"keeps_ending": True, "waiting_container": "fetch"},
            "CrashLoop",
            "-0-0 -c fetch",
        ),
        ({"unschedulable": "0/2 nodes are available: 2 Insufficient cpu."}, "Unschedulable", "Insufficient cpu"),
    ],
)
def test_why_a_pod_does_not_come_up_is_named(pod: dict[str, Any], reason: str, words: str) -> None:
    pool = make_pool()
    status = status_of(pool, with_pod(make_instance(pool, ready=False), **pod))
    assert outcome(status) == ("False", reason)
    assert words in condition(status, "Ready").message


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ('pods "chat-prefill-0-0" is forbidden: violates PodSecurity "restricted:latest"', "PodRejected"),
        (
            'pods "x" is forbidden: error looking up service account llm/a: serviceaccount "a" not found',
            "MissingReference",
        ),
    ],
)
def test_why_a_pod_cannot_be_created_is_named(error: str, reason: str) -> None:
    pool = make_pool()
    status = status_of(pool, make_instance(pool, pod=None, create_error=error))
    assert outcome(status) == ("False", reason)


def test_the_past_troubles_of_a_pod_that_is_ready_do_not_count() -> None:
    pool = make_pool()
    assert outcome(status_of(pool, with_pod(make_instance(pool), keeps_ending=True))) == (
        "True",
        "Ready",
    )


def test_troubles_of_a_surplus_instance_do_not_count() -> None:
    pool = make_pool()
    surplus = with_pod(make_instance(pool, 1, ready=False), waiting_reason="ImagePullBackOff")
    assert outcome(status_of(pool, make_instance(pool), surplus)) == ("False", "ScalingDown")


def test_a_fault_comes_before_everything_and_stalls() -> None:
    pool = make_pool(template={"spec": {"containers": "x"}})
    status = status_of(pool)
    assert outcome(status) == ("False", "TemplateInvalid")
    assert outcome(status, "Stalled") == ("True", "TemplateInvalid")
    assert "spec.template.spec.containers" in condition(status, "Ready").message


def test_the_words_of_the_api_server_are_shown() -> None:
    pool = make_pool()
    words = 'spec.template.spec.containers[0].resources.limits: Invalid value: "x"'
    status = status_of(pool, make_instance(pool), faults=(Fault(Reason.TEMPLATE_INVALID, words),))
    assert outcome(status) == ("False", "TemplateInvalid")
    assert condition(status, "Ready").message == words


def test_an_instance_that_is_stuck_is_not_said_to_start() -> None:
    pool = make_pool(replicas=2)
    stuck = make_instance(pool, 1, ready=False)
    status = status_of(pool, make_instance(pool), stuck, diagnoses=[diagnosis(1, verdict=Verdict.STUCK)])
    assert outcome(status) == ("False", "EnginesNotReady")
    assert condition(status, "Ready").message == "1 of 2 instances cannot serve: chat-prefill-1 (stuck)"


def test_an_update_is_not_ready_before_every_instance_runs_the_new_spec() -> None:
    before, after = make_pool(replicas=2), make_pool(replicas=2, model={"path": "/models/next"})
    instances = [replace(make_instance(before, index), controller_uid=after.metadata.uid) for index in (0, 1)]
    status = status_of(after, *instances)
    assert outcome(status) == ("False", "Updating")
    assert outcome(status, "Available") == ("True", "Serving")
    assert outcome(status, "Reconciling") == ("True", "Draining")
    assert "chat-prefill-1" in condition(status, "Reconciling").message
    assert (status.ready_replicas, status.updated_replicas) == (2, 0)
    assert [instance.updated for instance in status.instances] == [False, False]


def test_another_build_keeps_the_pool_ready_and_says_how_to_adopt_it() -> None:
    pool = make_pool()
    status = status_of(pool, make_instance(pool), settings=BuildSettings(engine_image="other", router_image=""))
    assert outcome(status) == ("True", "UpdateAvailable")
    assert "pdpool.dev/restarted-at" in condition(status, "Ready").message


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Verdict.STUCK, ("False", "QueuesStuck")),
        (Verdict.BLOCKED, ("False", "QueuesBlocked")),
        (Verdict.UNKNOWN, ("Unknown", "QueuesUnknown")),
        (Verdict.GONE, ("Unknown", "QueuesUnknown")),
        (Verdict.STARTING, ("Unknown", "Starting")),
        (Verdict.DRAINING, ("Unknown", "Draining")),
        (Verdict.SATURATED, ("True", "QueuesSaturated")),
        (Verdict.FLOWING, ("True", "QueuesFlowing")),
        (Verdict.IDLE, ("True", "QueuesFlowing")),
    ],
)
def test_queues_are_as_healthy_as_the_worst_verdict(verdict: Verdict, expected: tuple[str, str]) -> None:
    pool = make_pool()
    track = follow_all([make_sample()])
    assert track is not None
    subject = replace(diagnosis().subject, tracks=(track,))
    found = diagnosis(verdict=verdict, message="evidence", subject=subject)
    status = status_of(pool, make_instance(pool), diagnoses=[found])
    assert outcome(status, "QueuesHealthy") == expected


def test_instances_on_their_way_in_do_not_hide_that_the_others_are_fine() -> None:
    pool = make_pool(replicas=2)
    found = [diagnosis(0), diagnosis(1, Verdict.STARTING)]
    status = status_of(pool, make_instance(pool), make_instance(pool, 1), diagnoses=found)
    assert outcome(status, "QueuesHealthy") == ("True", "QueuesFlowing")
    assert status.queues == "Starting (instance 1)"


@pytest.mark.parametrize(
    ("verdict", "column"),
    [
        (Verdict.IDLE, "Idle"),
        (Verdict.FLOWING, "Flowing"),
        (Verdict.BLOCKED, "Blocked (decode)"),
        (Verdict.STUCK, "Stuck (instance 0)"),
    ],
)
def test_the_queue_column_says_it_in_a_word(verdict: Verdict, column: str) -> None:
    pool = make_pool()
    assert status_of(pool, make_instance(pool), diagnoses=[diagnosis(verdict=verdict)]).queues == column


def test_a_condition_keeps_its_time_until_its_status_flips() -> None:
    pool = make_pool()
    ready, waiting = make_instance(pool), make_instance(pool, ready=False)
    first = status_of(pool, waiting)
    pool = pool.model_copy(update={"status": first})
    still = status_of(pool, with_pod(waiting, waiting_reason="ImagePullBackOff"), at=60)
    assert condition(still, "Ready").reason == "ImagePullFailed"
    assert condition(still, "Ready").last_transition_time == T0
    flipped = status_of(pool, ready, at=60)
    assert condition(flipped, "Ready").last_transition_time == T0 + seconds(60)


def test_the_same_facts_give_the_same_status_at_another_time() -> None:
    pool = make_pool()
    first = status_of(pool, make_instance(pool))
    assert status_of(pool.model_copy(update={"status": first}), make_instance(pool), at=3600) == first


def test_the_moment_of_waiting_does_not_tremble_with_the_samples() -> None:
    pool = make_pool()
    since = T0 - seconds(10)
    first = status_of(pool, make_instance(pool), diagnoses=[diagnosis(waiting_since=since)])
    assert first.oldest_waiting_since == since
    later = pool.model_copy(update={"status": first})
    trembling = status_of(later, make_instance(pool), diagnoses=[diagnosis(waiting_since=since + seconds(1.9))])
    moved = status_of(later, make_instance(pool), diagnoses=[diagnosis(waiting_since=since + seconds(2))])
    gone = status_of(later, make_instance(pool))
    assert trembling.oldest_waiting_since == since
    assert moved.oldest_waiting_since == since + seconds(2)
    assert gone.oldest_waiting_since is None


def test_a_message_that_is_too_long_for_the_schema_is_cut() -> None:
    pool = make_pool()
    status = status_of(
        pool,
        make_instance(pool),
        diagnoses=[diagnosis(verdict=Verdict.STUCK, message="x" * 5000)],
        faults=(Fault(Reason.TEMPLATE_INVALID, "y" * 5000),),
    )
    assert PoolStatus.model_validate(status.to_dict()) == status


def test_objects_of_somebody_else_are_not_counted() -> None:
    pool = make_pool()
    status = status_of(pool, make_instance(pool, controller_uid="somebody-else"))
    assert outcome(status) == ("False", "NameConflict")
    assert (status.replicas, status.ready_replicas, status.instances) == (0, 0, ())


def test_conditions_have_the_shape_that_kubectl_wait_reads() -> None:
    pool = make_pool()
    (_, ready, *_) = status_of(pool, make_instance(pool)).to_dict()["conditions"]
    assert ready == {
        "type": "Ready",
        "status": str(ConditionStatus.TRUE),
        "reason": "Ready",
        "message": "1 instance serves",
        "lastTransitionTime": "2026-11-21T12:00:00Z",
        "observedGeneration": 1,
    }
