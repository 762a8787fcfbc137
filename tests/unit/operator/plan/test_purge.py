"""A purge goes to every rank, with a cut-off that stays. It ends when all have done it, or says which has not."""

from dataclasses import replace
from typing import Any

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.api.operations import OperationPhase, PoolOperation
from pdpool_operator.api.pools import Pool
from pdpool_operator.api.reasons import Reason
from pdpool_operator.observe.model import ObservedInstance
from pdpool_operator.observe.samples import RankSample
from pdpool_operator.plan.model import Purge, Purged
from pdpool_operator.plan.operation import OperationPlan, plan_operations
from pdpool_operator.plan.operation_gates import PoolSide
from pdpool_operator.plan.operation_step import Step

from .makers import T0, make_instance, make_observed, make_pod, make_pool, make_sample, seconds

POOL = make_pool(Role.DECODE, replicas=1)
UID = "uid-of-chat-decode-0-0"
PENDING, PURGING = OperationPhase.PENDING, OperationPhase.PURGING
SUCCEEDED, FAILED = OperationPhase.SUCCEEDED, OperationPhase.FAILED


def operation(type_: str = "Purge", name: str = "one", *, age_s: float = 10, **status: Any) -> PoolOperation:
    created = (T0 - seconds(age_s)).isoformat()
    meta = {"name": name, "namespace": "llm", "uid": f"uid-{name}", "creationTimestamp": created}
    spec: dict[str, Any] = {"type": type_, "instance": "chat-decode-0", "deadlineSeconds": 600}
    if type_ == "Purge":
        spec["olderThanSeconds"] = 90
    return PoolOperation.parse({"metadata": meta, "spec": spec, "status": status})


def begun(*, started_s: float = 5, **changes: Any) -> PoolOperation:
    started = (T0 - seconds(started_s)).isoformat()
    return operation(**{"phase": PURGING, "startedAt": started, "instanceUID": "uid-of-chat-decode-0", **changes})


def sample(rank: int = 0, *, ranks: int = 1, uid: str = UID, error: str = "") -> RankSample:
    found = make_sample(T0, pod_uid=UID, rank=rank, connector_error=error)
    if found.connector is None:
        return found
    return replace(found, connector=replace(found.connector, ranks=ranks, pod_uid=uid))


def instance(*samples: RankSample, **changes: Any) -> ObservedInstance:
    ranks = {one.rank: one for one in samples or (sample(),)}
    return replace(make_instance(POOL, 0), ranks=ranks, listed_by=("chat-router-x",), **changes)


def answer(rank: int = 0, outcome: str = "given", count: int = 0, words: str = "", uid: str = UID) -> Purged:
    return Purged(Purge(uid, "10.0.2.1", rank, 90, "x", 1), outcome, count, words)


def look(
    *operations: PoolOperation, at: ObservedInstance | None = None, answers: tuple[Purged, ...] = (), pool: Pool = POOL
) -> OperationPlan:
    observed = make_observed(pool, at or instance())
    return plan_operations(operations, PoolSide(observed, frozenset({0})), T0, purged={"uid-one": answers})


def one(plan: OperationPlan) -> Step:
    (step,) = plan.steps
    return step


def test_cut_off_is_written_before_any_rank_is_asked() -> None:
    plan = look(operation())
    step = one(plan)
    assert (step.status.phase, step.status.started_at, step.purges) == (PURGING, T0, ())
    assert step.status.instance_uid == "uid-of-chat-decode-0"
    assert step.status.message == "chat-decode-0 ends its hand-offs that are older than 90 s"
    assert (plan.acts, plan.again_s) == (True, 1.0)


def test_each_rank_is_asked_with_the_age_of_the_cut_off() -> None:
    plan = look(begun(started_s=7), at=instance(sample(0, ranks=2), sample(1, ranks=2)))
    assert plan.acts
    assert [(p.pod_uid, p.ip, p.rank, p.older_than_s) for p in one(plan).purges] == [
        (UID, "10.0.2.1", 0, 97),
        (UID, "10.0.2.1", 1, 97),
    ]
    assert {p.reason for p in one(plan).purges} == {"PoolOperation one"}


def test_clock_that_is_behind_asks_for_no_younger_hand_off() -> None:
    (purge,) = one(look(begun(started_s=-30))).purges
    assert purge.older_than_s == 90


def test_purge_without_an_age_means_a_minute() -> None:
    created = T0.isoformat()
    meta = {"name": "one", "namespace": "llm", "uid": "uid-one", "creationTimestamp": created}
    plain = PoolOperation.parse({"metadata": meta, "spec": {"type": "Purge", "instance": "chat-decode-0"}})
    assert plain.older_than_s == 60


def test_age_is_refused_for_other_types() -> None:
    body = operation().to_dict()
    body["spec"]["type"] = "Restart"
    with pytest.raises(ValueError, match="olderThanSeconds is only for type Purge"):
        PoolOperation.parse(body)


def test_purge_succeeds_with_the_sum_of_all_ranks() -> None:
    at = instance(sample(0, ranks=2), sample(1, ranks=2))
    step = one(look(begun(), at=at, answers=(answer(0, count=2), answer(1, count=1))))
    assert (step.status.phase, step.status.purged, step.purges) == (SUCCEEDED, 3, ())
    assert step.status.message == "chat-decode-0 has ended 3 hand-offs older than 90 s"
    assert step.event is not None


def test_one_hand_off_is_not_plural() -> None:
    step = one(look(begun(), answers=(answer(count=1),)))
    assert step.status.message == "chat-decode-0 has ended 1 hand-off older than 90 s"


def test_done_is_done_also_after_the_deadline() -> None:
    assert one(look(begun(age_s=700), answers=(answer(),))).status.phase is SUCCEEDED


WAITS: dict[str, tuple[ObservedInstance, tuple[Purged, ...], tuple[int, ...], str]] = {
    "not asked yet": (instance(), (), (0,), "rank 0 has not answered yet"),
    "silent at the purge": (instance(), (answer(0, "unanswered", words="timeout"),), (0,), "rank 0 did not answer"),
    "silent at the sample": (
        instance(sample(0, ranks=2), sample(1, error="timeout")),
        (answer(0),),
        (),
        "rank 1 does not answer (timeout)",
    ),
    "second rank not sampled": (instance(sample(0, ranks=2)), (answer(0),), (), "rank 1 has not been sampled"),
    "nothing sampled": (replace(instance(), ranks={}), (), (), "rank 0 has not been sampled"),
    "only silence": (instance(sample(error="refused")), (), (), "rank 0 does not answer (refused)"),
    "address of another": (instance(sample(uid="b")), (), (), "rank 0 does not answer (another pod has its address)"),
    "no pod": (instance(pod=None), (answer(0),), (), "it has no pod"),
    "new pod": (
        instance(sample(uid="b"), pod=make_pod("chat-decode-0-0", uid="b")),
        (answer(0),),
        (0,),
        "rank 0 has not answered yet",
    ),
}


@pytest.mark.parametrize("case", WAITS)
def test_rank_that_has_not_done_it_is_waited_for(case: str) -> None:
    at, answers, asked, words = WAITS[case]
    plan = look(begun(), at=at, answers=answers)
    step = one(plan)
    assert step.status.phase is PURGING
    assert words in step.status.message
    assert tuple(purge.rank for purge in step.purges) == asked
    assert plan.again_s == 1.0


@pytest.mark.parametrize("case", WAITS)
def test_deadline_fails_the_purge_and_names_the_rank(case: str) -> None:
    at, answers, _, words = WAITS[case]
    step = one(look(begun(age_s=600), at=at, answers=answers))
    assert (step.status.phase, step.purges) == (FAILED, ())
    assert {condition.reason for condition in step.status.conditions} == {Reason.DEADLINE_PASSED}
    assert f"chat-decode-0: {words}" in step.status.message


def test_refusal_of_a_rank_fails_the_purge() -> None:
    at = instance(sample(0, ranks=2), sample(1, ranks=2))
    step = one(look(begun(), at=at, answers=(answer(0, count=4), answer(1, "refused", words="http 404: "))))
    assert (step.status.phase, step.status.purged, step.purges) == (FAILED, 4, ())
    assert {condition.reason for condition in step.status.conditions} == {Reason.PURGE_REFUSED}
    assert "rank 1 of chat-decode-0 refused it: http 404" in step.status.message


def test_many_silent_ranks_are_shortened() -> None:
    step = one(look(begun(), at=instance(sample(0, ranks=64))))
    assert step.status.message.endswith("rank 4 has not been sampled, and 59 more")


def test_engine_without_the_connector_is_refused() -> None:
    body = POOL.model_dump(by_alias=True, mode="json", exclude_none=True)
    body["spec"] |= {"engine": {"type": "SGLang"}, "model": {"path": "org/model"}}
    body["spec"]["transfer"] = {"connector": "Native", "backend": "NIXL"}
    step = one(look(operation(), pool=type(POOL).model_validate(body)))
    assert step.status.phase is FAILED
    assert {condition.reason for condition in step.status.conditions} == {Reason.PURGE_REFUSED}
    assert "transfer.connector is Native" in step.status.message


def test_operator_that_did_not_run_until_the_deadline_purges_nothing() -> None:
    step = one(look(operation(age_s=600)))
    assert (step.status.phase, step.status.message) == (FAILED, "Not done within 600 s: the operator did not run")


def test_purge_and_drain_of_one_instance_do_not_wait_for_each_other() -> None:
    drain = operation("Drain", "drain", age_s=5, phase="Draining", instanceUID="uid-of-chat-decode-0")
    assert next(s for s in look(operation(), drain).steps if s.operation.spec.type == "Purge").status.phase is PURGING
    restart = operation("Restart", "restart", age_s=5)
    step = next(s for s in look(operation(), restart).steps if s.operation.spec.type == "Restart")
    assert {condition.reason for condition in step.status.conditions} != {Reason.INSTANCE_TAKEN}


def test_ended_purge_does_nothing_more() -> None:
    assert look(begun(phase=SUCCEEDED)).steps == ()
