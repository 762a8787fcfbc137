"""Instances of several ranks: one request, many attempts, and one result on each rank."""

import gc
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import AbortTransfer, Drain, Fenced, PeerLost, WriteResult
from pdpool_connector.protocol.handoff import HandOff, RankExchange, aggregate
from pdpool_connector.protocol.states import PREFILL_ENDED, PREFILL_PHASES, PrefillState
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.instances import Instances
from tests.unit.protocol.sides import (
    DECODE,
    DECODE_2,
    TIMEOUTS,
    Prefill,
    abort_frame,
    ids,
    names,
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
FAILING = {S.QUIESCING, S.HELD, S.FAILED}
FIRST, SECOND = {"rank_index": 0, "rank_count": 2}, {"rank_index": 1, "rank_count": 2}


@pytest.fixture(params=SHAPES)
def both(request) -> Instances:
    return Instances(*SHAPES[request.param])


def settle(both: Instances) -> None:
    both.wait(2 * TIMEOUTS.result_s)
    assert [side.machine.rows for side in [*both.prefill, *both.decode]] == [0] * len(both.by_name)


class TestInstances:
    @pytest.mark.parametrize("order", list(itertools.permutations(["request", "open", "offer"])))
    def test_every_rank_is_done(self, both: Instances, order: tuple[str, ...]) -> None:
        for step in order:
            getattr(both, step)()
        if order.index("offer") < order.index("open"):
            both.offer()  # memory for an attempt that was not opened is not taken
        assert {side.status[1].phase for side in both.prefill} == {Phase.READY}
        both.send()
        both.land()
        assert {status.phase for status in both.statuses} == {Phase.DONE}
        assert all(status.releasable for status in both.statuses)
        settle(both)

    def test_each_decode_rank_gets_aux_row_once(self, both: Instances) -> None:
        both.request()
        both.open()
        both.offer()
        both.send()
        got = [write.attempt.decode for _, write in both.flights if write.aux is not None]
        assert sorted(got) == [side.machine.incarnation for side in both.decode]

    @pytest.mark.parametrize("aux_slot", [None, 2])
    def test_nothing_to_send_ends_every_rank(self, both: Instances, aux_slot: int | None) -> None:
        both.request()
        both.open()
        both.offer(pages=(), prefix=2)
        both.send(aux_slot=aux_slot)
        both.land()
        assert {status.phase for status in both.statuses} == {Phase.DONE}
        settle(both)

    @pytest.mark.parametrize("offered", [True, False])
    def test_abort_on_one_decode_rank_ends_ranks_it_shares(self, both: Instances, offered: bool) -> None:
        both.request()
        both.open()
        if offered:
            both.offer()
            both.send()
        both.do(both.decode[0], AbortTransfer(1, "client left"))
        both.land(WriteResult.STOPPED)
        for side in both.decode[1:]:
            both.do(side, AbortTransfer(1, "client left"))
        both.land()
        assert {side.status[1].phase for side in both.decode} == {Phase.FAILED}
        assert all(status.ended and status.releasable for status in both.statuses)
        settle(both)

    def test_failed_prefill_rank_informs_its_decode_ranks(self, both: Instances) -> None:
        both.request()
        both.open()
        both.offer()
        both.send()
        both.do(both.prefill[0], AbortTransfer(1, "out of memory"))
        both.land()
        touched = [side for side in both.decode if side.status[1].phase is Phase.FAILED]
        assert touched
        assert {side.status[1].cause for side in touched} == {Cause.PEER_ABORTED}
        assert both.prefill[0].status[1].cause is Cause.ABORTED
        assert all(status.releasable for status in both.statuses)
        settle(both)

    def test_every_order_of_matching_and_abort_leaves_nothing(self) -> None:
        for order in itertools.permutations(["request 0", "request 1", "open 0", "open 1", "offer 0", "abort"]):
            both = Instances(*SHAPES["2x2"])
            for step in order:
                if step == "abort":
                    for side in [*both.decode, *both.prefill]:
                        if 1 in side.status:
                            both.do(side, AbortTransfer(1, "client left"))
                            break
                else:
                    name, rank = step.split()
                    getattr(both, name)(int(rank))
            both.wait(31)
            both.land()
            assert all(status.ended and status.releasable for status in both.statuses), order
            settle(both)


def two_ranks() -> Prefill:
    """A request that one of two decode ranks has opened."""
    side = Prefill(TIMEOUTS, DECODE, DECODE_2)
    side.request()
    side.opened(1, **FIRST)
    return side


def complete() -> Prefill:
    """A request that both decode ranks have opened and offered memory for."""
    side = two_ranks()
    side.offered(1)
    side.attempt(1, peer=DECODE_2, **SECOND)
    return side


class TestMatching:
    def test_request_is_ready_when_all_ranks_have_offered(self) -> None:
        side = two_ranks()
        side.offered(1)
        assert (side.status[1].phase, side.machine.queues.count("waiting")) == (Phase.WAITING, 1)
        side.opened(1, peer=DECODE_2, **SECOND)
        assert (side.status[1].phase, side.machine.queues.count("matched")) == (Phase.WAITING, 1)
        side.offered(1, peer=DECODE_2)
        assert side.status[1].phase is Phase.READY
        assert side.machine.queues.count("prefill_bootstrap") == 1

    def test_ranks_of_one_request_join_before_the_request(self) -> None:
        side = Prefill(TIMEOUTS, DECODE, DECODE_2)
        side.opened(1, rid="d", **FIRST)
        side.opened(1, peer=DECODE_2, rid="d", **SECOND)
        assert side.machine.queues.count("parked") == 1
        side.request(1, rid="p")
        side.offered(1)
        side.offered(1, peer=DECODE_2)
        assert side.status[1].phase is Phase.READY

    @pytest.mark.parametrize(
        "fields",
        [
            {"rank_index": 1, "rank_count": 3},
            {"rank_index": 0, "rank_count": 2},
            {"rank_index": 1, "rank_count": 2, "rid": "other"},
            {"rank_index": 1, "rank_count": 2, "prompt": b"other"},
        ],
    )
    def test_other_rank_waits_for_its_own_request(self, fields: dict) -> None:
        side = Prefill(TIMEOUTS, DECODE, DECODE_2)
        side.request(prompt=b"p")
        side.opened(1, **FIRST)
        assert names(side.opened(1, peer=DECODE_2, **fields)) == []
        assert side.machine.queues.count("parked") == 1
        side.opened(2, peer=DECODE_2, **SECOND)
        assert side.machine.queues.count("matched") == 1

    def test_samples_of_one_prompt_keep_their_ranks_together(self) -> None:
        side = Prefill(TIMEOUTS, DECODE, DECODE_2)
        side.request(1, rid="p1")
        side.request(2, rid="p2")
        side.opened(1, rid="a", **FIRST)
        side.opened(2, rid="b", **FIRST)
        side.opened(1, peer=DECODE_2, rid="b", **SECOND)
        side.opened(2, peer=DECODE_2, rid="a", **SECOND)
        first, second = ([x.attempt.number for x in side.machine._by_handle[h].exchanges.values()] for h in (1, 2))
        assert (first, second) == ([1, 2], [2, 1])

    def test_missing_rank_ends_request_after_match_s(self) -> None:
        side = two_ranks()
        side.wait(TIMEOUTS.match_s + 1)
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.TIMED_OUT, True)
        assert "only 1 of 2 decode ranks" in side.status[1].message
        assert names(side.effects)[:1] == ["Ended(timed_out)"]

    def test_parked_ranks_end_together(self) -> None:
        side = Prefill(TIMEOUTS, DECODE, DECODE_2)
        side.opened(1, **FIRST)
        side.opened(1, peer=DECODE_2, **SECOND)
        side.wait(TIMEOUTS.match_s + 0.05)
        assert {frame.attempt.decode for frame in sent(side.effects, f.Ended)} == {DECODE, DECODE_2}

    def test_drain_keeps_request_that_one_rank_has_opened(self) -> None:
        side = two_ranks()
        side.opened(5, room=8, **FIRST)
        assert [frame.room for frame in sent(side.do(Drain()), f.Ended)] == [8]
        assert names(side.opened(1, peer=DECODE_2, **SECOND)) == []


class TestWriting:
    def test_each_rank_gets_all_pages_in_its_own_time(self) -> None:
        side = two_ranks()
        side.offered(1)
        (first,) = writes(side.send(pages=(4,), last=False))
        assert first.attempt.decode == DECODE
        assert side.status[1].phase is Phase.WAITING
        early = writes(side.send(pages=(5,), start=1))
        side.opened(1, peer=DECODE_2, **SECOND)
        late = writes(side.offered(1, peer=DECODE_2, pages=(20, 21), aux_slot=f.NO_AUX))
        assert [(w.source, w.target, w.aux) for w in early] == [(ids(5), ids(9), (2, 3))]
        assert [(w.source, w.target, w.aux) for w in late] == [(ids(4), ids(20), None), (ids(5), ids(21), None)]
        for write in [first, *early]:
            side.landed(write)
        assert side.status[1].phase is Phase.TRANSFERRING
        for write in late:
            side.landed(write)
        assert (side.status[1].phase, side.status[1].bytes_moved) == (Phase.DONE, 16)

    def test_many_ranks_leave_nothing(self) -> None:
        peers = [f"{index:032x}" for index in range(64)]
        side = Prefill(replace(TIMEOUTS, max_attempts=64), *peers)
        side.request()
        for index, peer in enumerate(peers):
            own = {"peer": peer, "attempt": f.AttemptId(peer, 1)}
            side.opened(1, **own, rank_index=index, rank_count=64)
            side.offered(1, **own)
        for write in writes(side.send()):
            side.landed(write)
        assert side.status[1].phase is Phase.DONE
        side.wait(2 * TIMEOUTS.result_s)
        assert side.machine.rows == 0


class TestFailing:
    def test_failed_rank_fails_others_and_pages_wait_for_all(self) -> None:
        side = complete()
        mine, theirs = writes(side.send())
        effects = side.landed(mine, WriteResult.FAILED, "no route")
        assert {(frame.attempt.decode, frame.settled, frame.cause) for frame in sent(effects)} == {
            (DECODE, True, "transfer_failed"),
            (DECODE_2, False, "transfer_failed"),
        }
        assert (side.status[1].message, side.status[1].releasable) == ("no route", False)
        side.landed(theirs, WriteResult.STOPPED)
        assert side.status[1].releasable

    def test_rank_that_is_done_does_not_make_request_done(self) -> None:
        side = complete()
        mine, theirs = writes(side.send())
        assert names(side.landed(mine)) == ["Ended(done)"]
        assert side.status[1].phase is Phase.TRANSFERRING
        side.landed(theirs, WriteResult.FAILED)
        assert (side.status[1].phase, side.status[1].cause) == (Phase.FAILED, Cause.TRANSFER_FAILED)

    def test_abort_of_one_rank_is_sent_to_the_others(self) -> None:
        side = complete()
        effects = side.receive(abort_frame(**FIRST))
        assert {frame.attempt.decode for frame in sent(effects, f.Ended)} == {DECODE, DECODE_2}
        assert set(names(effects)) == {"Ended(peer_aborted)"}
        side.request(2)
        side.attempt(2, **FIRST)
        side.attempt(2, peer=DECODE_2, **SECOND)
        assert side.status[2].phase is Phase.READY

    def test_abort_of_one_rank_before_offer_ends_the_other(self) -> None:
        side = two_ranks()
        side.opened(1, peer=DECODE_2, **SECOND)
        assert names(side.receive(abort_frame(**FIRST))) == ["Ended(peer_aborted)"] * 2
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_ABORTED, True)

    @pytest.mark.parametrize("order", list(itertools.permutations(["abort", "request", "open"])))
    def test_abort_without_open_ends_request_and_other_rank(self, order: tuple[str, ...]) -> None:
        side = Prefill(TIMEOUTS, DECODE, DECODE_2)
        steps = {
            "abort": lambda: side.receive(abort_frame(**FIRST)),
            "request": side.request,
            "open": lambda: side.opened(1, peer=DECODE_2, **SECOND),
        }
        for step in order:
            steps[step]()
        assert side.status[1].cause is Cause.PEER_ABORTED
        ends = {frame.attempt.decode: frame.cause for frame in sent(side.effects, f.Ended)}
        assert ends == {DECODE: "peer_aborted", DECODE_2: "peer_aborted"}
        assert names(side.opened(1, **FIRST)) == ["Ended(peer_aborted)"]
        assert side.machine.rows == side.machine.tombstones

    def test_lost_rank_fails_request_and_holds_its_pages_only(self) -> None:
        side = complete()
        mine, theirs = writes(side.send())
        effects = side.do(PeerLost(DECODE_2, "connection ended"))
        assert [(frame.attempt.decode, frame.settled) for frame in sent(effects)] == [(DECODE, False)]
        side.landed(mine, WriteResult.STOPPED)
        side.wait(TIMEOUTS.quiesce_s + 1)
        assert [exchange.attempt.decode for exchange in side.machine.held()] == [DECODE_2]
        assert theirs.attempt.decode == DECODE_2
        side.do(Fenced(DECODE, "kubelet"))
        assert not side.status[1].releasable
        side.do(Fenced(DECODE_2, "kubelet"))
        assert side.status[1].releasable

    @pytest.mark.parametrize("result", [WriteResult.LANDED, WriteResult.FAILED])
    def test_ended_request_needs_no_garbage_collector(self, result: WriteResult) -> None:
        def alive() -> list[object]:
            return [one for one in gc.get_objects() if issubclass(type(one), HandOff | RankExchange)]

        gc.collect()
        gc.disable()
        try:
            of_others = alive()  # the traceback of a failed test keeps what that test made
            side = complete()
            for write in writes(side.send()):
                side.landed(write, result)
            assert side.status[1].releasable
            assert not {id(one) for one in alive()} - {id(one) for one in of_others}
        finally:
            gc.enable()


class TestAggregate:
    @given(st.lists(st.sampled_from(PrefillState), min_size=1))
    def test_done_needs_all_and_one_failure_suffices(self, states: list[PrefillState]) -> None:
        whole = aggregate(states)
        assert (whole is S.DONE) == all(state is S.DONE for state in states)
        assert (whole in FAILING) == any(state in FAILING for state in states)
        if whole in PREFILL_ENDED:
            assert set(states) <= PREFILL_ENDED
        if S.HELD in states:
            assert whole is S.HELD

    @given(st.lists(st.sampled_from(PrefillState), min_size=1))
    def test_order_of_ranks_does_not_matter(self, states: list[PrefillState]) -> None:
        assert aggregate(states) is aggregate(reversed(states))

    @given(st.lists(st.sampled_from([S.WAITING, S.MATCHED, S.READY, S.SENDING, S.DONE]), min_size=1))
    def test_whole_is_no_further_than_its_last_rank(self, states: list[PrefillState]) -> None:
        whole = PREFILL_PHASES[aggregate(states)]
        if {S.WAITING, S.MATCHED} & set(states):
            assert whole is Phase.WAITING
        elif {S.SENDING, S.DONE} & set(states):
            assert whole in (Phase.TRANSFERRING, Phase.DONE)
        else:
            assert whole is Phase.READY
