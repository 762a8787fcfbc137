"""A half that comes after its other half has ended gets the cause, once."""

from dataclasses import replace

import pytest
from pdpool_connector.protocol.events import PeerLost
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.sides import (
    DECODE,
    DECODE_2,
    TIMEOUTS,
    Prefill,
    abort_frame,
    names,
)


def ended_halves(side: Prefill) -> int:
    return side.machine.rows - side.machine.tombstones


class TestRequestEndedFirst:
    def test_prefill_aborts_before_open_and_decode_gets_cause(self) -> None:
        side = Prefill()
        side.request()
        side.abort()
        assert side.status[1].releasable
        assert names(side.opened()) == ["Ended(aborted)"]
        assert ended_halves(side) == 0

    def test_request_timed_out_and_late_attempt_gets_cause(self) -> None:
        side = Prefill()
        side.request()
        side.wait(TIMEOUTS.match_s + 1)
        assert "no decode opened" in side.status[1].message
        assert names(side.opened()) == ["Ended(timed_out)"]

    def test_next_pair_in_room_matches(self) -> None:
        side = Prefill()
        side.request(1)
        side.abort(1)
        side.opened(1)
        side.request(2)
        side.attempt(2)
        assert side.status[2].phase is Phase.READY

    def test_live_request_of_equal_id_goes_first(self) -> None:
        side = Prefill()
        side.request(1, rid="first")
        side.abort(1)
        side.request(2, rid="second")
        assert names(side.opened(1, rid="second")) == []
        assert names(side.opened(2, rid="first")) == ["Ended(aborted)"]


class TestAttemptEndedFirst:
    def test_abort_before_request_fails_that_request_only(self) -> None:
        side = Prefill()
        side.opened(1, rid="d1")
        side.receive(abort_frame(1, rid="d1"))
        side.request(1, rid="p1")
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_ABORTED, True)
        side.request(2, rid="p2")
        side.attempt(2, rid="d2")
        assert side.status[2].phase is Phase.READY

    def test_parked_attempt_of_equal_id_goes_first(self) -> None:
        side = Prefill()
        side.opened(1, rid="first")
        side.receive(abort_frame(1, rid="first"))
        side.attempt(2, rid="second")
        side.request(1, rid="second")
        assert side.status[1].phase is Phase.READY

    def test_lost_decode_fails_request_that_comes_later(self) -> None:
        side = Prefill()
        side.opened()
        side.do(PeerLost(DECODE, "connection ended"))
        side.request()
        assert side.status[1].cause is Cause.PEER_LOST

    def test_request_is_refused_whose_attempt_timed_out(self) -> None:
        side = Prefill()
        side.opened()
        side.wait(TIMEOUTS.match_s + 1)
        side.request()
        assert "the engine of prefill never sent the request" in side.status[1].message


class TestRanks:
    @pytest.mark.parametrize("requested", [True, False])
    def test_rank_of_another_request_is_not_affected(self, requested: bool) -> None:
        side = Prefill(TIMEOUTS, DECODE, DECODE_2)
        if requested:
            side.request(1, rid="old")
        side.opened(1, rid="old", rank_index=0, rank_count=2)
        side.receive(abort_frame(1, rid="old", rank_index=0, rank_count=2))
        if not requested:
            side.request(1, rid="old")
        assert side.status[1].cause is Cause.PEER_ABORTED
        assert names(side.opened(1, peer=DECODE_2, rid="new", rank_index=1, rank_count=2)) == []
        late = side.opened(2, peer=DECODE_2, rid="old", rank_index=1, rank_count=2)
        assert names(late) == ["Ended(peer_aborted)"]

    def test_each_missing_rank_gets_cause_once(self) -> None:
        side = Prefill(TIMEOUTS, DECODE, DECODE_2)
        side.request()
        side.abort()
        for index, peer in enumerate((DECODE, DECODE_2)):
            assert names(side.opened(1, peer=peer, rank_index=index, rank_count=2)) == ["Ended(aborted)"]
        assert ended_halves(side) == 0


class TestBounds:
    def test_ended_halves_expire_one_by_one(self) -> None:
        side = Prefill(replace(TIMEOUTS, result_s=10.0, acked_s=1.0))
        for handle in (1, 2, 3):
            side.request(handle, room=handle)
            side.abort(handle)
            side.wait(1.0)
        assert names(side.opened(1, room=1)) == ["Ended(aborted)"]
        assert ended_halves(side) == 2
        side.wait(8.5)
        assert ended_halves(side) == 1
        side.wait(1.0)
        assert ended_halves(side) == 0

    def test_one_decode_has_half_of_the_table(self) -> None:
        side = Prefill(replace(TIMEOUTS, max_attempts=8), DECODE, DECODE_2)
        for number in range(1, 20):
            side.receive(abort_frame(number, room=number))
        assert ended_halves(side) == 4
        side.receive(abort_frame(1, peer=DECODE_2, room=30))
        side.request(1, room=30)
        assert side.status[1].cause is Cause.PEER_ABORTED
