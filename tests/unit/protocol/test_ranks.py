"""Instances of several ranks: one request, many attempts, and one outcome on each rank."""

import gc
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import AbortTransfer, Drain, Fenced, PeerLost, PeerReady, WriteResult
from pdpool_connector.protocol.exchange import ENDED, FAILING, Exchange, HandOff, aggregate
from pdpool_connector.protocol.states import PREFILL_PHASES, PrefillState
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.instances import Instances
from tests.unit.protocol.sides import (
    DECODE,
    DECODE_2,
    TIMING,
    Prefill,
    abort_frame,
    about,
    ids,
    names,
    open_frame,
    sent,
    writes,
)

SHAPES = {
    "1x1": (1, [[(0, True)]]),
    "1x2": (1, [[(0, True)], [(0, True)]]),
    "2x1": (2, [[(0, False), (1, True)]]),
    "2x2": (2, [[(0, False), (1, True)], [(0, False), (1, True)]]),
    "4x2": (4, [[(0, True), (1, False)], [(2, True), (3, False)]]),
}
S = PrefillState


@pytest.fixture(params=SHAPES)
def both(request) -> Instances:
    return Instances(*SHAPES[request.param])


def settle(both: Instances) -> None:
    both.wait(2 * TIMING.verdict_s)
    assert [side.machine.rows for side in [*both.prefill, *both.decode]] == [0] * len(both.by_name)


@pytest.mark.parametrize("first", ["request", "open"])
def test_every_rank_ends_well(both: Instances, first: str) -> None:
    steps = [both.request, both.open]
    for step in steps if first == "request" else reversed(steps):
        step()
    assert {side.status[1].phase for side in both.prefill} == {Phase.READY}
    both.send()
    both.land()
    assert {status.phase for status in both.statuses} == {Phase.DONE}
    assert all(status.releasable for status in both.statuses)
    settle(both)


def test_each_decode_rank_gets_the_aux_row_once(both: Instances) -> None:
    both.request()
    both.open()
    both.send()
    got = [write.attempt.decode for _, write in both.flights if write.aux is not None]
    assert sorted(got) == [side.machine.incarnation for side in both.decode]


@pytest.mark.parametrize("aux_slot", [None, 2])
def test_with_nothing_to_send_every_rank_ends_the_same_way(both: Instances, aux_slot: int | None) -> None:
    both.request()
    both.open(pages=(), prefix=2)
    both.send(aux_slot=aux_slot)
    both.land()
    assert {status.phase for status in both.statuses} == {Phase.DONE}
    settle(both)


def test_an_abort_on_one_decode_rank_ends_every_rank_that_it_shares_a_prefill_rank_with(both: Instances) -> None:
    both.request()
    both.open()
    both.send()
    both.do(both.decode[0], AbortTransfer(1, "client left"))
    both.land(WriteResult.STOPPED)
    for side in both.decode[1:]:
        both.do(side, AbortTransfer(1, "client left"))
    both.land()
    assert {status.phase for status in both.statuses} <= {Phase.FAILED, Phase.DONE}
    assert {side.status[1].phase for side in both.decode} == {Phase.FAILED}
    assert all(status.releasable for status in both.statuses)
    settle(both)


def test_a_prefill_rank_that_fails_tells_each_of_its_decode_ranks_and_they_tell_the_other_ranks(both) -> None:
    both.request()
    both.open()
    both.send()
    both.do(both.prefill[0], AbortTransfer(1, "out of memory"))
    both.land()
    touched = [side for side in both.decode if side.status[1].phase is Phase.FAILED]
    assert touched
    assert {side.status[1].cause for side in touched} == {Cause.PEER_ABORTED}
    assert both.prefill[0].status[1].cause is Cause.ABORTED
    assert all(status.releasable for status in both.statuses)
    settle(both)


def test_every_order_of_meeting_and_failing_leaves_nothing_behind() -> None:
    for order in itertools.permutations(["request0", "request1", "open0", "open1", "abort"]):
        both = Instances(*SHAPES["2x2"])
        for step in order:
            if step == "abort":
                for side in [*both.decode, *both.prefill]:
                    if 1 in side.status:
                        both.do(side, AbortTransfer(1, "client left"))
                        break
            elif step.startswith("request"):
                both.request(int(step[-1]))
            else:
                both.open(int(step[-1]))
        both.wait(31)
        both.land()
        assert all(status.ended and status.releasable for status in both.statuses), order
        if order.index("abort"):
            assert {status.phase for status in both.statuses} == {Phase.FAILED}, order
        settle(both)


# --- One prefill rank, several parts ---


def two_parts(**changes) -> Prefill:
    side = Prefill(TIMING, DECODE, DECODE_2)
    side.request()
    side.opened(1, part=0, parts=2, **changes)
    return side


def test_a_request_is_ready_when_its_last_part_has_opened() -> None:
    side = two_parts()
    assert side.status[1].phase is Phase.WAITING
    assert side.machine.census.count("waiting") == 1
    side.opened(1, peer=DECODE_2, part=1, parts=2)
    assert side.status[1].phase is Phase.READY
    assert side.machine.census.count("prefill_bootstrap") == 1


def test_pages_go_to_the_parts_that_are_there_and_later_to_the_ones_that_come() -> None:
    side = two_parts()
    (first,) = writes(side.send(pages=(4,), last=False))
    assert first.attempt.decode == DECODE
    assert side.status[1].phase is Phase.WAITING
    early, late = (
        writes(side.send(pages=(5,), start=1)),
        writes(side.opened(1, peer=DECODE_2, part=1, parts=2, pages=ids(20, 21), aux_slot=-1)),
    )
    assert [(w.source, w.target, w.aux) for w in early] == [(ids(5), ids(9), (2, 3))]
    assert [(w.source, w.target, w.aux) for w in late] == [(ids(4), ids(20), None), (ids(5), ids(21), None)]
    for write in [first, *early]:
        side.landed(write)
    assert side.status[1].phase is Phase.TRANSFERRING
    for write in late:
        side.landed(write)
    assert (side.status[1].phase, side.status[1].bytes_moved) == (Phase.DONE, 16)


def test_one_part_that_fails_fails_the_others_with_its_cause_and_pages_wait_for_all_of_them() -> None:
    side = two_parts()
    side.opened(1, peer=DECODE_2, part=1, parts=2)
    mine, theirs = writes(side.send())
    effects = side.landed(mine, WriteResult.FAILED, "no route")
    assert {(frame.attempt.decode, type(frame), frame.cause) for frame in sent(effects)} == {
        (DECODE, f.Drained, "transfer_failed"),
        (DECODE_2, f.Failed, "transfer_failed"),
    }
    assert (side.status[1].cause, side.status[1].message) == (Cause.TRANSFER_FAILED, "no route")
    assert not side.status[1].releasable
    side.landed(theirs, WriteResult.STOPPED)
    assert side.status[1].releasable


def test_a_part_that_is_done_does_not_make_a_failed_request_done() -> None:
    side = two_parts()
    side.opened(1, peer=DECODE_2, part=1, parts=2)
    mine, theirs = writes(side.send())
    assert names(side.landed(mine)) == ["Done"]
    assert side.status[1].phase is Phase.TRANSFERRING
    side.landed(theirs, WriteResult.FAILED)
    assert (side.status[1].phase, side.status[1].cause) == (Phase.FAILED, Cause.TRANSFER_FAILED)


def test_an_abort_by_one_decode_rank_is_told_to_the_others_and_the_room_is_free_at_once() -> None:
    side = two_parts()
    side.opened(1, peer=DECODE_2, part=1, parts=2)
    effects = side.hear(abort_frame(part=0, parts=2))
    assert {(frame.attempt.decode, frame.cause) for frame in sent(effects, f.Drained)} == {
        (DECODE, "peer_aborted"),
        (DECODE_2, "peer_aborted"),
    }
    side.request(2)
    side.opened(2, part=0, parts=2)
    side.opened(2, peer=DECODE_2, part=1, parts=2)
    assert side.status[2].phase is Phase.READY


@pytest.mark.parametrize("requested", [True, False])
def test_a_part_that_comes_after_the_others_have_failed_is_told_why(requested: bool) -> None:
    side = Prefill(TIMING, DECODE, DECODE_2)
    if requested:
        side.request()
    side.opened(1, part=0, parts=2)
    side.hear(abort_frame(part=0, parts=2))
    (drained,) = sent(side.opened(1, peer=DECODE_2, part=1, parts=2), f.Drained)
    assert drained.cause == Cause.PEER_ABORTED
    if not requested:
        side.request()
    assert side.status[1].cause is Cause.PEER_ABORTED
    side.request(2)
    side.opened(2, part=0, parts=2)
    side.opened(2, peer=DECODE_2, part=1, parts=2)
    assert side.status[2].phase is Phase.READY


@pytest.mark.parametrize("order", list(itertools.permutations(["abort", "request", "open"])))
def test_an_abort_that_overtakes_its_attempt_ends_the_request_and_the_other_part(order: tuple[str, ...]) -> None:
    side = Prefill(TIMING, DECODE, DECODE_2)
    steps = {
        "abort": lambda: side.hear(abort_frame(part=0, parts=2)),
        "request": side.request,
        "open": lambda: side.opened(1, peer=DECODE_2, part=1, parts=2),
    }
    for step in order:
        steps[step]()
    assert side.status[1].cause is Cause.PEER_ABORTED
    ends = {frame.attempt.decode: frame.cause for frame in sent(side.effects, f.Drained)}
    assert ends == {DECODE: "peer_aborted", DECODE_2: "peer_aborted"}
    assert names(side.opened(1, part=0, parts=2)) == ["Drained"]
    assert len(side.machine._missed) == 0


def test_a_request_aborted_before_any_part_came_fails_each_of_them_and_no_later_one() -> None:
    side = Prefill(TIMING, DECODE, DECODE_2)
    side.request()
    side.abort()
    for peer, part in ((DECODE, 0), (DECODE_2, 1)):
        (drained,) = sent(side.opened(1, peer=peer, part=part, parts=2), f.Drained)
        assert drained.cause == Cause.ABORTED
    assert len(side.machine._missed) == 0
    side.request(2)
    side.opened(2, part=0, parts=2)
    side.opened(2, peer=DECODE_2, part=1, parts=2)
    assert side.status[2].phase is Phase.READY


def test_a_decode_rank_that_opens_its_part_again_supersedes_all_parts() -> None:
    side = two_parts()
    side.opened(1, peer=DECODE_2, part=1, parts=2)
    effects = side.opened(2, part=0, parts=2)
    assert side.status[1].cause is Cause.SUPERSEDED
    assert {frame.attempt.decode for frame in sent(effects, f.Drained)} == {DECODE, DECODE_2}
    side.opened(2, peer=DECODE_2, part=1, parts=2)
    side.request(2)
    assert side.status[2].phase is Phase.READY


def test_an_older_attempt_of_a_superseded_request_does_not_join_its_successor() -> None:
    side = two_parts()
    side.opened(2, part=0, parts=2)
    (drained,) = sent(side.opened(1, peer=DECODE_2, part=1, parts=2), f.Drained)
    assert drained.cause == Cause.SUPERSEDED
    side.opened(2, peer=DECODE_2, part=1, parts=2)
    side.request(2)
    assert side.status[2].phase is Phase.READY


@pytest.mark.parametrize(
    ("changes", "cause", "why"),
    [
        ({"part": 2, "parts": 2}, Cause.INVALID, "part is 2 of parts 2"),
        ({"part": 1, "parts": 3}, Cause.INVALID, "parts is 3 in this attempt and 2 in"),
        ({"part": 0, "parts": 2}, Cause.CONFLICT, "in use by attempt"),
        ({"part": 1, "parts": 2, "request_id": "other"}, Cause.CONFLICT, "in use by attempt"),
    ],
)
def test_parts_that_do_not_fit_are_refused_and_harm_nobody(changes: dict, cause: Cause, why: str) -> None:
    side = two_parts()
    (drained,) = sent(side.opened(1, peer=DECODE_2, **changes), f.Drained)
    assert (drained.cause, why in drained.message) == (cause, True)
    assert side.status[1].cause is None
    side.opened(2, peer=DECODE_2, part=1, parts=2)
    assert side.status[1].phase is Phase.READY


def test_the_deadline_names_how_many_parts_came_and_is_told_to_them() -> None:
    side = two_parts()
    side.wait(31)
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.TIMED_OUT, True)
    assert "1 of 2 decode ranks" in side.status[1].message
    assert sent(side.effects, f.Drained)[0].cause == "timed_out"


def test_parked_parts_wait_for_one_request_and_end_together() -> None:
    side = Prefill(TIMING, DECODE, DECODE_2)
    side.opened(1, part=0, parts=2)
    side.opened(1, peer=DECODE_2, part=1, parts=2)
    assert side.machine.census.count("parked") == 1
    side.wait(TIMING.meet_s + 1)
    assert {frame.attempt.decode for frame in sent(side.effects, f.Drained)} == {DECODE, DECODE_2}


def test_draining_finishes_a_request_of_which_a_part_is_there_and_ends_parked_parts() -> None:
    side = two_parts()
    side.opened(5, room=8, part=0, parts=2)
    assert [frame.room for frame in sent(side.do(Drain()), f.Drained)] == [8]
    side.opened(1, peer=DECODE_2, part=1, parts=2)
    assert side.status[1].phase is Phase.READY


def test_losing_one_decode_rank_fails_the_request_and_holds_only_what_goes_there() -> None:
    side = two_parts()
    side.opened(1, peer=DECODE_2, part=1, parts=2)
    mine, theirs = writes(side.send())
    effects = side.do(PeerLost(DECODE_2, "connection ended"))
    assert [frame.attempt.decode for frame in sent(effects, f.Failed)] == [DECODE]
    assert side.status[1].cause is Cause.PEER_LOST
    side.landed(mine, WriteResult.STOPPED)
    side.wait(TIMING.drain_s + 1)
    assert [exchange.attempt.decode for exchange in side.machine.held()] == [DECODE_2]
    assert not side.status[1].releasable
    side.do(Fenced(DECODE, "kubelet"))
    assert not side.status[1].releasable
    side.do(Fenced(DECODE_2, "kubelet"))
    assert side.status[1].releasable
    assert theirs.attempt.decode == DECODE_2


def test_a_request_with_many_parts_leaves_nothing_behind() -> None:
    peers = [f"{index:032x}" for index in range(64)]
    side = Prefill(replace(TIMING, max_attempts=64), *peers)
    side.request()
    for part, peer in enumerate(peers):
        side.hear(open_frame(1, peer=peer, part=part, parts=64, attempt=f.AttemptId(peer, 1)))
    for write in writes(side.send()):
        side.landed(write)
    assert side.status[1].phase is Phase.DONE
    side.wait(2 * TIMING.verdict_s)
    assert side.machine.rows == 0


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_an_ended_request_is_freed_without_the_garbage_collector(ends: str) -> None:
    def alive() -> list[object]:
        return [one for one in gc.get_objects() if issubclass(type(one), HandOff | Exchange)]

    gc.collect()
    gc.disable()
    try:
        of_others = alive()  # the traceback of a test that failed keeps what that test made
        side = two_parts()
        side.opened(1, peer=DECODE_2, part=1, parts=2)
        for write in writes(side.send()):
            side.landed(write, WriteResult.LANDED if ends == "well" else WriteResult.FAILED)
        assert side.status[1].releasable
        assert not {id(one) for one in alive()} - {id(one) for one in of_others}
    finally:
        gc.enable()


def test_a_huge_number_of_parts_is_no_frame_at_all() -> None:
    with pytest.raises(f.MalformedFrameError):
        f.decode(f.encode(open_frame(part=0, parts=2**31 - 1)))


# --- The aggregate ---


@given(st.lists(st.sampled_from(PrefillState), min_size=1))
def test_the_whole_is_done_only_when_all_are_and_releasable_only_when_nobody_touches_pages(states) -> None:
    whole = aggregate(states)
    assert (whole is S.DONE) == all(state is S.DONE for state in states)
    assert (whole in FAILING) == any(state in FAILING for state in states)
    if whole in ENDED:
        assert set(states) <= ENDED
    if S.HELD in states:
        assert whole is S.HELD


@given(st.lists(st.sampled_from(PrefillState), min_size=1))
def test_the_order_of_parts_does_not_matter(states) -> None:
    assert aggregate(states) is aggregate(reversed(states))


@given(st.lists(st.sampled_from([S.WAITING, S.READY, S.SENDING, S.DONE]), min_size=1))
def test_the_whole_is_no_further_than_its_last_part(states) -> None:
    order = [Phase.WAITING, Phase.READY, Phase.TRANSFERRING, Phase.DONE]
    if S.WAITING in states:
        assert aggregate(states) is S.WAITING
    elif {S.SENDING, S.DONE} & set(states):
        assert PREFILL_PHASES[aggregate(states)] in order[2:]
    else:
        assert aggregate(states) is S.READY


def test_peers_that_come_back_hear_the_end_of_their_own_part() -> None:
    side = two_parts()
    side.opened(1, peer=DECODE_2, part=1, parts=2)
    side.do(PeerLost(DECODE, "connection ended"))
    side.do(PeerReady(DECODE, f.VERSION_MAX))
    assert names(side.hear(f.Query(**about(1)))) == ["Drained"]
