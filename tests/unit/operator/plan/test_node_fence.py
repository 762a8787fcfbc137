"""A fence of a node releases memory only of processes that have ended for sure. It says what it does not release."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from pdpool_operator.api.operations import OperationPhase, PoolOperation
from pdpool_operator.api.reasons import Reason
from pdpool_operator.engines.answers import MAX_HOLDS
from pdpool_operator.observe.model import ObservedNode, ObservedPod
from pdpool_operator.observe.samples import HoldSample, RankSample
from pdpool_operator.plan.model import NodeOff
from pdpool_operator.plan.node_fence import FenceFacts, HoldKey, plan_fence
from pdpool_operator.plan.operation_step import Step

from .makers import T0, make_pod, make_sample, seconds

NODE, OTHER_NODE = "gpu-17", "gpu-18"
DEAD, LATER, ELSEWHERE, UNKNOWN = "d" * 32, "e" * 32, "b" * 32, "c" * 32
NODES = {"pod-dead": NODE, "pod-elsewhere": OTHER_NODE}
PROCESSES = {
    DEAD: HoldSample(DEAD, "pod-dead", "run 1"),
    LATER: HoldSample(LATER, "pod-dead", "run 2"),
    ELSEWHERE: HoldSample(ELSEWHERE, "pod-elsewhere", "run 1"),
    UNKNOWN: HoldSample(UNKNOWN, "pod-unknown", "run 1"),
    "f" * 32: HoldSample("f" * 32, "", ""),
}
HOLDER = make_pod("chat-decode-0-0", ip="10.0.2.1", node="gpu-3")
OFF = ObservedNode(NODE, T0, ready="Unknown", out_of_service=True)
ABSENT = ObservedNode(NODE, T0, exists=False)
BACK = ObservedNode(NODE, T0, ready="True", out_of_service=True)
IN_SERVICE = {
    "kubelet reports": (BACK, "The kubelet of the Node gpu-17 reports (Ready is True)"),
    "kubelet reports and is not ready": (replace(BACK, ready="False"), "reports (Ready is False)"),
    "not tainted": (replace(OFF, out_of_service=False), "lacks the taint node.kubernetes.io/out-of-service"),
    "no condition": (replace(OFF, ready=""), "(Ready is absent)"),
}
PENDING, FENCING = OperationPhase.PENDING, OperationPhase.FENCING
SUCCEEDED, FAILED = OperationPhase.SUCCEEDED, OperationPhase.FAILED


def operation(*, age_s: float = 10, **status: Any) -> PoolOperation:
    created = (T0 - seconds(age_s)).isoformat()
    meta = {"name": "one", "namespace": "llm", "uid": "uid-one", "creationTimestamp": created}
    spec = {"type": "Fence", "node": NODE, "deadlineSeconds": 600}
    return PoolOperation.parse({"metadata": meta, "spec": spec, "status": status})


def begun(*processes: str, age_s: float = 10) -> PoolOperation:
    started = (T0 - seconds(5)).isoformat()
    return operation(age_s=age_s, phase=FENCING, startedAt=started, processes=processes)


def sample(*held: str, pod: ObservedPod = HOLDER, rank: int = 0, ranks: int = 1, at: datetime = T0) -> RankSample:
    found = make_sample(at, pod_uid=pod.uid, rank=rank)
    assert found.connector is not None
    holds = tuple(PROCESSES[one] for one in held)
    return replace(found, connector=replace(found.connector, ranks=ranks, pod_uid=pod.uid, held_for=holds))


def look(
    one: PoolOperation,
    *samples: RankSample,
    node: ObservedNode = OFF,
    holders: tuple[ObservedPod, ...] = (HOLDER,),
    followed_s: float = 5,
    refused: Mapping[HoldKey, str] | None = None,
) -> Step:
    looks: dict[str, dict[int, RankSample]] = {}
    for found in samples:
        looks.setdefault(found.pod_uid, {})[found.rank] = found
    return plan_fence(one, FenceFacts(holders, looks, NODES.get, T0 - seconds(followed_s), refused or {}), node, T0)


def whom(step: Step) -> list[HoldKey]:
    return [fence.hold_key for fence in step.fences]


def reason(step: Step) -> str:
    (found,) = {condition.reason for condition in step.status.conditions}
    return found


@pytest.mark.parametrize("node", [OFF, ABSENT])
def test_processes_are_written_before_a_fence_is_sent(node: ObservedNode) -> None:
    step = look(operation(), sample(DEAD, LATER), node=node)
    assert (step.status.phase, step.status.started_at, step.fences) == (FENCING, T0, ())
    assert step.status.processes == (DEAD, LATER)
    assert node.off in step.status.message
    assert step.must_be_stored


@pytest.mark.parametrize("node", [OFF, ABSENT])
def test_written_process_is_fenced_with_the_declaration(node: ObservedNode) -> None:
    (fence,) = look(begun(DEAD), sample(DEAD), node=node).fences
    assert fence.hold_key == (HOLDER.uid, 0, DEAD)
    assert (fence.ip, fence.pod, fence.key_epoch) == ("10.0.2.1", HOLDER.name, 1)
    assert fence.proof == NodeOff(NODE, "PoolOperation llm/one")


@pytest.mark.parametrize("case", IN_SERVICE)
def test_node_that_may_run_is_refused(case: str) -> None:
    node, words = IN_SERVICE[case]
    step = look(operation(), sample(DEAD), node=node)
    assert (step.status.phase, step.status.processes, step.fences) == (FAILED, (), ())
    assert reason(step) == Reason.NODE_IN_SERVICE
    assert words in step.status.message


def test_node_that_may_not_be_read_is_refused() -> None:
    step = look(operation(), sample(DEAD), node=ObservedNode(NODE, T0, forbidden=True))
    assert (step.status.phase, reason(step)) == (FAILED, Reason.NODE_UNREADABLE)
    assert step.status.processes == ()


@pytest.mark.parametrize("process", [ELSEWHERE, UNKNOWN, "f" * 32])
@pytest.mark.parametrize("node", [OFF, ABSENT])
def test_process_that_is_not_known_to_be_of_the_node_is_neither_written_nor_fenced(
    process: str, node: ObservedNode
) -> None:
    for one in (operation(), begun(), begun(process)):
        step = look(one, sample(process), node=node)
        assert set(step.status.processes) <= set(one.status.processes)
        assert step.fences == ()


def test_hold_for_another_node_does_not_hinder_success() -> None:
    step = look(begun(DEAD), sample(ELSEWHERE))
    assert (step.status.phase, step.status.released, reason(step)) == (SUCCEEDED, 1, Reason.SUCCEEDED)
    words = "No engine in llm holds memory for a process of gpu-17"
    assert step.status.message == f"{words}; it was released for 1 process"
    assert look(begun(DEAD, LATER), sample()).status.message == f"{words}; it was released for 2 processes"
    assert look(begun(), sample()).status.message == words


def full(count: int, *held: str) -> RankSample:
    """A sample of so many processes on another node, and then these."""
    found = sample(*held)
    assert found.connector is not None
    others = tuple(HoldSample(f"{number:032x}", "pod-elsewhere", "run 1") for number in range(count))
    return replace(found, connector=replace(found.connector, held_for=(others + found.connector.held_for)[:MAX_HOLDS]))


def test_rank_with_more_processes_than_are_read_is_waited_for() -> None:
    """Those of the node may come after those of other nodes, which this operation does not release."""
    words = "chat-decode-0-0 rank 0, which may hold memory for more than the 256 processes that are read"
    hidden = full(MAX_HOLDS, DEAD)
    for followed_s in (5, 60):
        step = look(begun(), hidden, followed_s=followed_s)
        assert (step.status.phase, step.status.message, step.fences) == (FENCING, f"Waits for {words}", ())
    late = look(begun(age_s=600), hidden)
    assert (late.status.phase, late.status.message) == (FAILED, f"Not done within 600 s: {words}")
    shown = look(begun(), full(MAX_HOLDS - 2, DEAD))
    assert (shown.status.phase, shown.status.processes) == (FENCING, (DEAD,))
    assert look(begun(DEAD), full(MAX_HOLDS - 1)).status.phase is SUCCEEDED


def test_unknown_pod_is_named_and_fails_after_a_while() -> None:
    waits = look(begun(), sample(UNKNOWN), followed_s=29)
    assert waits.status.phase is FENCING
    assert "chat-decode-0-0 rank 0 for process cccccccc, of which the node is not known" in waits.status.message
    step = look(begun(), sample(UNKNOWN), followed_s=30)
    assert (step.status.phase, reason(step)) == (FAILED, Reason.PEERS_UNKNOWN)
    assert "chat-decode-0-0 rank 0 for process cccccccc" in step.status.message


def test_known_process_is_fenced_beside_an_unknown_one() -> None:
    step = look(begun(DEAD), sample(DEAD, UNKNOWN), followed_s=60)
    assert step.status.phase is FENCING
    assert whom(step) == [(HOLDER.uid, 0, DEAD)]


def test_process_seen_after_the_node_was_asked_for_is_not_written() -> None:
    step = look(begun(DEAD), sample(DEAD, LATER, at=T0 + seconds(0.1)))
    assert step.status.processes == (DEAD,)
    assert whom(step) == [(HOLDER.uid, 0, DEAD)]


def test_process_that_shows_while_the_node_is_off_is_written_first() -> None:
    step = look(begun(DEAD), sample(DEAD, LATER))
    assert step.status.processes == (DEAD, LATER)
    assert whom(step) == [(HOLDER.uid, 0, DEAD)]
    assert step.must_be_stored


@pytest.mark.parametrize("case", IN_SERVICE)
def test_only_written_processes_are_fenced_when_the_node_is_back(case: str) -> None:
    node, _ = IN_SERVICE[case]
    step = look(begun(DEAD), sample(DEAD, LATER), node=node)
    assert (step.status.phase, step.status.processes) == (FENCING, (DEAD,))
    assert whom(step) == [(HOLDER.uid, 0, DEAD)]
    last = look(begun(DEAD), sample(LATER), node=node)
    assert (last.status.phase, reason(last), last.fences) == (FAILED, Reason.NODE_IN_SERVICE, ())
    assert last.status.released == 1
    assert "These processes may run: chat-decode-0-0 rank 0 for process eeeeeeee" in last.status.message


def test_each_rank_that_holds_memory_gets_the_fence() -> None:
    step = look(begun(DEAD), sample(DEAD, ranks=3), sample(ranks=3, rank=1), sample(DEAD, ranks=3, rank=2))
    assert whom(step) == [(HOLDER.uid, 0, DEAD), (HOLDER.uid, 2, DEAD)]
    assert step.status.released == 0


def test_address_that_another_pod_has_now_gets_no_fence() -> None:
    found = sample(DEAD)
    assert found.connector is not None
    stranger = replace(found, connector=replace(found.connector, pod_uid="other"))
    step = look(begun(DEAD), stranger)
    assert step.fences == ()
    assert "does not answer (another pod has its address)" in step.status.message


def test_sample_of_a_pod_that_is_no_holder_of_the_namespace_gets_no_fence() -> None:
    foreign = make_pod("chat-decode-0-0", uid="of-another-namespace", ip="10.0.9.9", node="gpu-3")
    step = look(begun(DEAD), sample(), sample(DEAD, pod=foreign))
    assert (step.status.phase, step.fences) == (SUCCEEDED, ())


SILENT = make_sample(T0, pod_uid=HOLDER.uid, connector_error="timeout")
WAITS: dict[str, tuple[tuple[RankSample, ...], str]] = {
    "still held": ((sample(DEAD),), "chat-decode-0-0 rank 0 for process dddddddd"),
    "silent": ((SILENT,), "chat-decode-0-0 rank 0, which does not answer (timeout)"),
    "not sampled": ((), "chat-decode-0-0 rank 0, which has not been sampled"),
    "second rank": ((sample(ranks=2),), "chat-decode-0-0 rank 1, which has not been sampled"),
    "old sample": ((sample(at=T0 - seconds(7)),), "chat-decode-0-0 rank 0, which has not answered yet"),
    "sample within the first second": (
        (replace(sample(), asked_at=T0 - seconds(4.1)),),
        "chat-decode-0-0 rank 0, which has not answered yet",
    ),
}


@pytest.mark.parametrize("case", WAITS)
def test_holder_that_may_hold_memory_is_waited_for_until_the_deadline(case: str) -> None:
    samples, words = WAITS[case]
    step = look(begun(DEAD), *samples)
    assert (step.status.phase, step.status.message) == (FENCING, f"Waits for {words}")
    ended = look(begun(DEAD, age_s=600), *samples)
    assert (ended.status.phase, reason(ended), ended.fences) == (FAILED, Reason.DEADLINE_PASSED, ())
    assert ended.status.message == f"Not done within 600 s: {words}"


@pytest.mark.parametrize(
    "pod",
    [
        replace(HOLDER, node=NODE),
        replace(HOLDER, ready=False),
        replace(HOLDER, ready=False, was_ready=True, waiting_reason="CrashLoopBackOff"),
        replace(HOLDER, phase="Pending", ip=None, ready=False),
    ],
    ids=["on the node", "never Ready", "crash loop", "not running"],
)
def test_silent_pod_that_cannot_hold_memory_is_not_waited_for(pod: ObservedPod) -> None:
    assert look(begun(DEAD), holders=(pod,)).status.phase is SUCCEEDED


def test_silent_pod_that_was_ready_is_waited_for() -> None:
    assert look(begun(DEAD), holders=(replace(HOLDER, ready=False, was_ready=True),)).status.phase is FENCING


def test_refusal_fails_the_operation_once_nothing_else_is_left() -> None:
    refused = {(HOLDER.uid, 0, DEAD): "http 422: no row"}
    both = look(begun(DEAD), sample(DEAD, ranks=2), sample(DEAD, ranks=2, rank=1), refused=refused)
    assert (both.status.phase, whom(both)) == (FENCING, [(HOLDER.uid, 1, DEAD)])
    step = look(begun(DEAD), sample(DEAD), refused=refused)
    assert (step.status.phase, reason(step), step.fences) == (FAILED, Reason.FENCE_REFUSED, ())
    assert "http 422: no row" in step.status.message


def test_operator_that_did_not_run_until_the_deadline_writes_nothing() -> None:
    step = look(operation(age_s=600), sample(DEAD))
    assert (step.status.phase, step.status.processes, step.status.started_at) == (FAILED, (), None)


def test_release_is_counted_by_process() -> None:
    assert look(begun(DEAD, LATER), sample(LATER)).status.released == 1
