"""Fences are sent only for ends that are proved, never for peers that are merely silent or gone."""

from dataclasses import replace
from datetime import datetime

from pdpool_operator.observe.model import ObservedPod, PodLife
from pdpool_operator.observe.samples import ConnectorSample, HoldSample, RankSample
from pdpool_operator.plan.fences import Fencing, plan_fences
from pdpool_operator.plan.model import ContainerEnded

from tests.unit.operator.plan.makers import T0, make_pod, make_sample, seconds

DEAD = "d" * 32
HOLDER = make_pod("chat-decode-0-0", ip="10.0.2.1")
PEER = make_pod("chat-prefill-0-0")
HOLD = HoldSample(DEAD, pod_uid=PEER.uid, container="boot pid:[1] 100")


def look(pod: ObservedPod, *, asked_at: datetime = T0, container: str = "", holds: tuple[HoldSample, ...] = ()):
    sample = make_sample(asked_at + seconds(0.1), pod_uid=pod.uid)
    assert isinstance(sample.connector, ConnectorSample)
    connector = replace(sample.connector, pod_uid=pod.uid, container=container, held_for=holds)
    return replace(sample, asked_at=asked_at, connector=connector)


def fencing(
    hold: HoldSample = HOLD, *, peer: RankSample | None = None, life: PodLife | None = None, gone: bool = False
) -> Fencing:
    looks = {HOLDER.uid: {0: look(HOLDER, holds=(hold,))}}
    if not gone:
        looks[PEER.uid] = {} if peer is None else {0: peer}
    return plan_fences([HOLDER], looks, {PEER.uid: life}.get, {PEER.uid: "gpu-17"}.get)


OVER = PodLife(PEER.name, "containerd://c1", over=True)
RESTARTED = PodLife(PEER.name, "containerd://c1", over=False)
SUCCESSOR = look(PEER, asked_at=T0 + seconds(1), container="boot pid:[1] 200")


def test_a_pod_whose_engine_container_has_ended_for_good_is_fenced_whether_it_is_still_there_or_gone():
    for gone in (False, True):
        (fence,) = fencing(life=OVER, gone=gone).fences
        assert (fence.pod_uid, fence.rank, fence.incarnation) == (HOLDER.uid, 0, DEAD)
        assert fence.proof == ContainerEnded(PEER.uid, "containerd://c1")


def test_a_container_that_was_started_again_is_fenced_once_the_next_run_was_met():
    assert fencing(peer=SUCCESSOR, life=RESTARTED).fences[0].proof == ContainerEnded(PEER.uid, "containerd://c1")


def test_a_run_that_is_met_is_no_proof_without_the_kubelets_word():
    assert fencing(peer=SUCCESSOR) == Fencing()


def test_the_kubelets_word_alone_is_no_proof_for_the_held_one_may_be_the_next_run():
    assert fencing(life=RESTARTED) == Fencing()
    silent = replace(SUCCESSOR, connector=None, connector_error="timeout")
    assert fencing(life=RESTARTED, peer=silent) == Fencing()


def test_a_look_that_began_before_the_hold_was_told_may_have_met_the_run_before():
    earlier = look(PEER, asked_at=T0 - seconds(1), container="boot pid:[1] 50")
    assert fencing(life=RESTARTED, peer=earlier) == Fencing()


def test_the_same_run_that_is_met_again_lives():
    assert fencing(life=RESTARTED, peer=look(PEER, asked_at=T0 + seconds(1), container=HOLD.container)) == Fencing()


def test_runs_that_do_not_tell_themselves_apart_are_no_proof():
    assert fencing(life=RESTARTED, peer=look(PEER, asked_at=T0 + seconds(1))) == Fencing()
    assert fencing(replace(HOLD, container=""), life=RESTARTED, peer=SUCCESSOR) == Fencing()


def test_another_pod_that_has_taken_over_the_address_is_not_the_next_run():
    assert SUCCESSOR.connector is not None
    other = replace(SUCCESSOR, connector=replace(SUCCESSOR.connector, pod_uid="another"))
    assert fencing(life=RESTARTED, peer=other) == Fencing()


def test_a_pod_that_is_gone_without_a_word_of_the_kubelet_is_no_proof_and_is_told():
    for life in (None, RESTARTED):
        result = fencing(gone=True, life=life)
        assert result.fences == ()
        assert [(one.holder, one.hold.incarnation) for one in result.unproven] == [(HOLDER.name, DEAD)]
        assert "no kubelet reported the end of its container" in result.unproven[0].why


def test_a_peer_that_did_not_say_where_it_runs_cannot_be_looked_for():
    result = fencing(replace(HOLD, pod_uid=""), life=OVER)
    assert result.fences == ()
    assert "did not report its pod" in result.unproven[0].why


def test_a_holder_whose_address_another_pod_has_is_not_told():
    sample = look(HOLDER, holds=(HOLD,))
    assert sample.connector is not None
    stranger = replace(sample, connector=replace(sample.connector, pod_uid="another"))
    assert plan_fences([HOLDER], {HOLDER.uid: {0: stranger}}, {PEER.uid: OVER}.get, {}.get) == Fencing()


def test_each_rank_that_holds_is_told_by_itself_and_of_the_process_that_it_holds_for():
    other = HoldSample("e" * 32, pod_uid=PEER.uid, container=HOLD.container)
    ranks = {0: look(HOLDER), 1: look(HOLDER, holds=(HOLD,)), 2: look(HOLDER, holds=(HOLD, other))}
    result = plan_fences([HOLDER], {HOLDER.uid: ranks}, {PEER.uid: OVER}.get, {}.get)
    told = [(fence.rank, fence.incarnation) for fence in result.fences]
    assert told == [(1, DEAD), (2, DEAD), (2, other.incarnation)]
    gone = plan_fences([HOLDER], {HOLDER.uid: ranks}, {}.get, {}.get)
    assert [(one.rank, one.hold.incarnation) for one in gone.unproven] == told


def test_hold_without_proof_names_the_node_of_a_pod_that_is_gone():
    (one,) = fencing(gone=True).unproven
    assert (
        one.why == "its pod on the node gpu-17 is gone from all pools, and no kubelet reported the end of its container"
    )
