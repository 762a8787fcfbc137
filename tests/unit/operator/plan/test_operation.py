"""Operations: a table of gates, the way of each type step by step, and what holds for every input."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdpool_operator.api.names import Role
from pdpool_operator.api.operations import OperationPhase, PoolOperation
from pdpool_operator.api.pools import Pool
from pdpool_operator.api.reasons import Reason
from pdpool_operator.observe.kept_out import keeps_out, with_operations
from pdpool_operator.observe.model import DrainReason, ObservedInstance, ObservedPool
from pdpool_operator.plan.drain import GIVEN_UP_GRACE_S
from pdpool_operator.plan.model import Delete
from pdpool_operator.plan.operation import OperationPlan, plan_operations
from pdpool_operator.plan.operation_gates import PoolSide
from pdpool_operator.plan.operation_step import Step

from .makers import T0, make_instance, make_observed, make_pod, make_pool, make_sample, seconds

POOL = make_pool(Role.DECODE, replicas=3)
PENDING, DRAINING, RESTARTING = OperationPhase.PENDING, OperationPhase.DRAINING, OperationPhase.RESTARTING
PURGING = OperationPhase.PURGING
SUCCEEDED, FAILED = OperationPhase.SUCCEEDED, OperationPhase.FAILED
PHASES_OF = {"Drain": {PENDING, DRAINING}, "Restart": {PENDING, DRAINING, RESTARTING}, "Purge": {PENDING, PURGING}}
ROUTER = ("chat-router-x",)


def operation(
    type_: str = "Drain", instance: str = "chat-decode-0", name: str = "one", *, age_s: float = 10, **status: Any
) -> PoolOperation:
    created = (T0 - seconds(age_s)).isoformat()
    meta = {"name": name, "namespace": "llm", "uid": f"uid-{name}", "creationTimestamp": created, "generation": 1}
    spec = {"type": type_, "instance": instance, "deadlineSeconds": 600}
    return PoolOperation.parse({"metadata": meta, "spec": spec, "status": status})


def begun(type_: str = "Drain", phase: OperationPhase = DRAINING, **changes: Any) -> PoolOperation:
    status = {
        "phase": phase,
        "startedAt": (T0 - seconds(changes.pop("drains_s", 5))).isoformat(),
        "instanceUID": "uid-of-chat-decode-0",
        "podUID": "uid-of-chat-decode-0-0" if type_ == "Restart" else "",
        "served": True,
    }
    return operation(type_, **{**status, **changes})


def idle(index: int, **changes: Any) -> ObservedInstance:
    """Return an instance that a router lists, and that has been seen idle after its drain began."""
    instance = make_instance(POOL, index)
    assert instance.pod is not None
    sample = make_sample(T0, pod_uid=instance.pod.uid)
    return replace(instance, **{"ranks": {0: sample}, "listed_by": ROUTER, "drain_seen": T0 - seconds(5), **changes})


def busy(index: int, running: int = 2) -> ObservedInstance:
    instance = idle(index)
    assert instance.pod is not None
    return replace(instance, ranks={0: make_sample(T0, pod_uid=instance.pod.uid, running=running)})


def no_pod(index: int) -> ObservedInstance:
    return replace(idle(index), pod=None, listed_by=(), ranks={})


def new_pod(index: int = 0, **changes: Any) -> ObservedInstance:
    """Return an instance whose pod was replaced."""
    listed = changes.pop("listed_by", ROUTER)
    return idle(index, pod=make_pod(f"chat-decode-{index}-0", **{"uid": "another", **changes}), listed_by=listed)


def terminating(index: int) -> ObservedInstance:
    instance = idle(index)
    assert instance.pod is not None
    return replace(instance, pod=replace(instance.pod, terminating=True))


def look(
    operations: PoolOperation | Iterable[PoolOperation],
    *instances: ObservedInstance,
    pool: Pool = POOL,
    routed: bool = True,
    broken: Iterable[int] = (),
) -> OperationPlan:
    """Plan as the controller does: with drains by operations, and with what serves."""
    some = (operations,) if isinstance(operations, PoolOperation) else tuple(operations)
    seen = [with_operations(i, some) for i in instances or (idle(0), idle(1))]
    # A drained instance is in no list of a router.
    seen = [replace(i, listed_by=()) if i.drain_started is not None else i for i in seen]
    serving = frozenset(i.index for i in seen if i.pod and i.pod.ready and not i.drain_started) - set(broken)
    observed: ObservedPool = make_observed(pool, *seen, routed=routed)
    return plan_operations(some, PoolSide(observed, serving), T0)


def one(plan: OperationPlan) -> Step:
    (step,) = plan.steps
    return step


RIVAL = {"name": "zwei", "age_s": 20}
GATES: dict[str, tuple[Any, ...]] = {
    "open": (operation(), (idle(0), idle(1)), DRAINING, Reason.DRAINING, "leaves the rotation"),
    "restart": (operation("Restart"), (idle(0), idle(1)), DRAINING, Reason.DRAINING, "leaves the rotation"),
    "by the pod's name": (operation(instance="chat-decode-0-0"), (), DRAINING, Reason.DRAINING, "chat-decode-0 leaves"),
    "unknown": (
        operation(instance="chat-decode-7"),
        (),
        FAILED,
        Reason.INSTANCE_NOT_FOUND,
        "DecodePool chat has no instance chat-decode-7; it has chat-decode-0, chat-decode-1",
    ),
    "being deleted": (operation(), (idle(0, deleting=True), idle(1)), FAILED, Reason.INSTANCE_NOT_FOUND, "it has "),
    "foreign": (operation(), (idle(0, controller_uid="x"), idle(1)), FAILED, Reason.INSTANCE_NOT_FOUND, "it has "),
    "older rival": (
        (operation(), operation(**RIVAL, instance="chat-decode-0-0")),
        (),
        FAILED,
        Reason.INSTANCE_TAKEN,
        "PoolOperation zwei (Drain) has chat-decode-0",
    ),
    "rival under way": ((operation(), begun("Restart", name="zwei")), (), FAILED, Reason.INSTANCE_TAKEN, "zwei"),
    "rival keeps it out": (
        (operation("Restart"), begun(phase=SUCCEEDED, name="zwei")),
        (),
        FAILED,
        Reason.INSTANCE_TAKEN,
        "zwei (Drain)",
    ),
    "rival of another": (
        (operation(), operation(**RIVAL, instance="chat-decode-1")),
        (idle(0), idle(1), idle(2)),
        DRAINING,
    ),
    "ended restart": ((operation(), begun("Restart", SUCCEEDED, name="zwei")), (), DRAINING),
    "failed drain": ((operation(), begun(phase=FAILED, name="zwei")), (), DRAINING),
    "drain of an earlier instance": (
        (operation(), begun(phase=SUCCEEDED, name="zwei", instanceUID="gone")),
        (),
        DRAINING,
    ),
    "restart without a pod": (operation("Restart"), (no_pod(0), idle(1)), PENDING, Reason.WAITING, "has no pod"),
    "restart of a terminating pod": (
        operation("Restart"),
        (terminating(0), idle(1)),
        PENDING,
        Reason.WAITING,
        "already being deleted",
    ),
    "drain without a pod": (operation(), (no_pod(0), idle(1)), DRAINING),
    "pool updates it": (
        operation(),
        (idle(0, drain_started=T0, drain_reason=DrainReason.UPDATE), idle(1)),
        PENDING,
        Reason.WAITING,
        "its spec has changed",
    ),
    "pool removes it": (
        operation(),
        (idle(0, drain_started=T0, drain_reason=DrainReason.SCALE_DOWN), idle(1)),
        PENDING,
        Reason.WAITING,
        "it is surplus",
    ),
    "last serving": (
        operation(),
        (idle(0), no_pod(1)),
        PENDING,
        Reason.WAITING,
        "no other instance of DecodePool chat serves",
    ),
    "restart of the last": (operation("Restart"), (idle(0),), PENDING, Reason.WAITING, "no other instance"),
    "alone, but not Ready": (operation("Restart"), (new_pod(0, ready=False),), DRAINING),
    "too late": (
        operation(age_s=600),
        (idle(0),),
        FAILED,
        Reason.DEADLINE_PASSED,
        "Not done within 600 s: chat-decode-0 stays in the rotation",
    ),
    "operator away": (operation(age_s=600), (), FAILED, Reason.DEADLINE_PASSED, "the operator did not run"),
    "almost too late": (operation(age_s=599), (), DRAINING),
}


@pytest.mark.parametrize("case", GATES)
def test_a_closed_gate_says_why(case: str) -> None:
    operations, instances, phase, *rest = GATES[case]
    plan = look(operations, *instances)
    step = next(step for step in plan.steps if step.operation.metadata.name == "one")
    assert step.status.phase is phase, step.status.message
    if rest:
        reason, words = rest
        assert {condition.reason for condition in step.status.conditions} == {reason}
        assert words in step.status.message
    assert step.delete is None


def test_a_stuck_instance_may_go_although_no_other_serves() -> None:
    assert one(look(operation("Restart"), idle(0), broken=[0])).status.phase is DRAINING


def test_two_operations_leave_one_instance_serving() -> None:
    both = operation(), operation(name="two", instance="chat-decode-1", age_s=5)
    assert [step.status.phase for step in look(both).steps] == [DRAINING, PENDING]


def test_a_drain_without_a_router_is_refused_and_a_restart_is_not() -> None:
    refused = one(look(operation(), routed=False))
    assert refused.status.phase is FAILED
    assert "No router of pdpool's sends requests to DecodePool chat" in refused.status.message
    assert one(look(operation("Restart"), routed=False)).status.phase is DRAINING


def test_the_pool_does_not_exist() -> None:
    step = one(plan_operations([operation()], None, T0))
    assert step.status.phase is FAILED
    assert step.status.message == "There is no DecodePool chat in the namespace llm"


@pytest.mark.parametrize("before", [operation(), begun(), begun("Restart", RESTARTING)])
def test_an_unreadable_pool_is_waited_for_until_the_deadline(before: PoolOperation) -> None:
    step = one(plan_operations([before], None, T0, "spec.replicas: too many"))
    assert step.status.phase is before.status.phase
    assert "spec.replicas: too many" in step.status.message
    late = one(plan_operations([before], None, before.due, "spec.replicas: too many"))
    assert late.status.phase is FAILED


def test_intent_is_written_before_anything_is_done() -> None:
    status = one(look(operation("Restart"))).status
    assert (status.instance_uid, status.pod_uid) == ("uid-of-chat-decode-0", "uid-of-chat-decode-0-0")
    assert (status.started_at, status.served, status.finished_at) == (T0, True, None)
    assert {c.type: str(c.status) for c in status.conditions} == {"Ready": "False", "Reconciling": "True"}


STEPS: dict[str, tuple[Any, ...]] = {
    "drain, busy": (begun(), (busy(0), idle(1)), DRAINING, "finishes its requests: rank 0 has 2 running"),
    "drain, done": (begun(), (), SUCCEEDED, "stays out of the rotation until this operation is deleted"),
    "drain, done late": (begun(age_s=700), (), SUCCEEDED, ""),
    "drain, late": (begun(age_s=600), (busy(0), idle(1)), FAILED, "chat-decode-0 is not drained: rank 0 has 2 running"),
    "drain, removed": (begun(), (idle(1),), FAILED, "was removed"),
    "drain, replaced": (begun(instanceUID="before"), (), FAILED, "another one has its name"),
    "drain, others fail": (begun(), (busy(0), no_pod(1)), PENDING, "no other instance"),
    "drain, others fail late": (begun(age_s=600), (idle(0), no_pod(1)), FAILED, "no other instance"),
    "drain of a broken one": (begun(served=False), (busy(0), no_pod(1)), DRAINING, ""),
    "drain goes on after 60 s": (begun(drains_s=61), (busy(0), idle(1)), DRAINING, ""),
    "restart, busy": (begun("Restart"), (busy(0), idle(1)), DRAINING, "2 running"),
    "restart, drained": (begun("Restart"), (), RESTARTING, "is drained, and its pod is replaced"),
    "restart, drain given up": (
        begun("Restart", drains_s=60),
        (busy(0), idle(1)),
        RESTARTING,
        "after 60 s",
    ),
    "restart, almost": (begun("Restart", drains_s=59), (busy(0), idle(1)), DRAINING, ""),
    "restart, late in the drain": (begun("Restart", age_s=600), (), FAILED, "its pod was not deleted"),
    "restart, pod was replaced": (begun("Restart"), (new_pod(), idle(1)), RESTARTING, "deleted during the drain"),
    "restart, pod goes": (begun("Restart"), (terminating(0), idle(1)), RESTARTING, "deleted during the drain"),
    "restart, others fail": (begun("Restart"), (idle(0), no_pod(1)), PENDING, "no other instance"),
    "intended": (begun("Restart", RESTARTING), (), RESTARTING, "is replaced"),
    "intended, others fail": (begun("Restart", RESTARTING), (idle(0), no_pod(1)), PENDING, "no other instance"),
    "intended, late": (begun("Restart", RESTARTING, age_s=600), (), FAILED, "its pod was not deleted"),
    "deleted": (begun("Restart", RESTARTING), (terminating(0), idle(1)), RESTARTING, "still terminates"),
    "gone": (begun("Restart", RESTARTING), (no_pod(0), idle(1)), RESTARTING, "no pod yet"),
    "gone, others fail": (begun("Restart", RESTARTING), (no_pod(0), no_pod(1)), RESTARTING, "no pod yet"),
    "starts": (
        begun("Restart", RESTARTING),
        (new_pod(ready=False, unschedulable="0/2 nodes"), idle(1)),
        RESTARTING,
        "not Ready: 0/2 nodes",
    ),
    "not listed": (begun("Restart", RESTARTING), (new_pod(listed_by=()), idle(1)), RESTARTING, "no router lists it"),
    "router silent": (begun("Restart", RESTARTING), (new_pod(listed_by=None), idle(1)), RESTARTING, "worker list"),
    "back": (begun("Restart", RESTARTING), (new_pod(), idle(1)), SUCCEEDED, "back in the rotation"),
    "back late": (begun("Restart", RESTARTING, age_s=700), (new_pod(), idle(1)), SUCCEEDED, ""),
    "not back in time": (
        begun("Restart", RESTARTING, age_s=600),
        (new_pod(ready=False), idle(1)),
        FAILED,
        "Not done within 600 s: its new pod is not Ready",
    ),
    "instance removed": (begun("Restart", RESTARTING), (idle(1),), FAILED, "was removed"),
}


@pytest.mark.parametrize("case", STEPS)
def test_each_step_follows_from_the_stored_one(case: str) -> None:
    before, instances, phase, words = STEPS[case]
    step = one(look(before, *instances))
    assert step.status.phase is phase, step.status.message
    assert words in step.status.message
    assert (step.status.finished_at is not None) == phase.finished
    assert (step.event is not None) == (phase is not before.status.phase)
    intended = Delete("Pod", "chat-decode-0-0", "uid-of-chat-decode-0-0", None)
    assert step.delete == (intended if case == "intended" else None)
    kinds = {condition.type: str(condition.status) for condition in step.status.conditions}
    assert kinds == {
        SUCCEEDED: {"Ready": "True"},
        FAILED: {"Ready": "False", "Stalled": "True"},
    }.get(phase, {"Ready": "False", "Reconciling": "True"})


def test_a_pod_with_work_left_is_deleted_with_a_short_grace() -> None:
    delete = one(look(begun("Restart", RESTARTING), busy(0), idle(1))).delete
    assert delete is not None
    assert delete.grace_period_s == GIVEN_UP_GRACE_S


def test_without_a_router_a_restart_ends_when_the_pod_is_ready() -> None:
    before = begun("Restart", RESTARTING)
    assert one(look(before, new_pod(listed_by=(), ready=False), routed=False)).status.phase is RESTARTING
    step = one(look(before, new_pod(listed_by=()), routed=False))
    assert (step.status.phase, step.status.message) == (SUCCEEDED, "chat-decode-0 runs as another pod, which is Ready")


@pytest.mark.parametrize("phase", [SUCCEEDED, FAILED])
@pytest.mark.parametrize("type_", ["Drain", "Restart"])
def test_an_ended_operation_does_nothing_more(type_: str, phase: OperationPhase) -> None:
    plan = look(begun(type_, phase))
    assert (plan.steps, plan.acts, plan.again_s) == ((), False, None)


def test_an_operation_returned_to_pending_begins_as_a_new_one() -> None:
    status = one(look(begun("Restart"), idle(0), no_pod(1))).status
    assert (status.started_at, status.instance_uid, status.pod_uid, status.served) == (None, "", "", False)


def test_planning_again_changes_nothing_but_the_message() -> None:
    before = one(look(begun(), busy(0), idle(1)))
    again = before.operation.model_copy(update={"status": before.status})
    step = one(look(again, busy(0), idle(1)))
    assert step.status == before.status
    assert not step.changes_phase
    assert look(again, busy(0), idle(1)).again_s == 1.0


HOLDS = {
    ("Drain", PENDING): False,
    ("Drain", DRAINING): True,
    ("Drain", SUCCEEDED): True,
    ("Drain", FAILED): False,
    ("Restart", PENDING): False,
    ("Restart", DRAINING): True,
    ("Restart", RESTARTING): True,
    ("Restart", SUCCEEDED): False,
    ("Restart", FAILED): False,
}


@pytest.mark.parametrize(("type_", "phase"), HOLDS)
def test_only_some_phases_keep_an_instance_out(type_: str, phase: OperationPhase) -> None:
    holder = begun(type_, phase)
    assert keeps_out(holder, idle(0)) is HOLDS[type_, phase]
    assert not keeps_out(holder, idle(1))
    assert not keeps_out(holder, idle(0, uid="another"))


def test_a_replaced_pod_returns_while_the_restart_still_waits() -> None:
    holder = begun("Restart", RESTARTING)
    assert not keeps_out(holder, new_pod())
    assert not keeps_out(holder, no_pod(0))


def test_a_drain_of_the_pool_itself_remains_beside_an_operation() -> None:
    own = idle(0, drain_started=T0, drain_reason=DrainReason.UPDATE)
    both = with_operations(own, [begun()])
    assert (both.drain_started, both.drain_reason, both.kept_out_by) == (T0, DrainReason.UPDATE, "one")
    alone = with_operations(idle(0), [operation(name="other"), begun()])
    assert (alone.drain_started, alone.drain_reason) == (T0 - seconds(5), DrainReason.OPERATION)


def instances() -> st.SearchStrategy[ObservedInstance]:
    makers = (idle, busy, no_pod, terminating, new_pod, lambda index: new_pod(index, ready=False, listed_by=None))
    return st.builds(lambda make: make(0), st.sampled_from(makers))


@given(
    type_=st.sampled_from(["Drain", "Restart", "Purge"]),
    phase=st.sampled_from([PENDING, DRAINING, RESTARTING, PURGING]),
    target=instances(),
    sibling=st.sampled_from([idle(1), no_pod(1), busy(1)]),
    age_s=st.sampled_from([0, 10, 599, 600, 10_000]),
    drains_s=st.sampled_from([0, 59, 60, 600]),
    routed=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_every_operation_ends_and_only_an_intended_pod_is_deleted(
    type_: str,
    phase: OperationPhase,
    target: ObservedInstance,
    sibling: ObservedInstance,
    age_s: float,
    drains_s: float,
    routed: bool,
) -> None:
    if phase not in PHASES_OF[type_]:
        return
    before = operation(type_, age_s=age_s) if phase is PENDING else begun(type_, phase, age_s=age_s, drains_s=drains_s)
    step = one(look(before, target, sibling, routed=routed))
    if age_s >= 600:
        assert step.status.phase.finished or step.status.phase is RESTARTING
    if step.delete is not None:
        assert phase is RESTARTING
        assert step.delete.uid == before.status.pod_uid
        assert sibling.pod is not None, "the last serving instance"
    if step.status.phase.finished:
        assert step.status.finished_at == T0
    assert step.status.message
