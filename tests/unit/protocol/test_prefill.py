"""Prefill's machine: what it accepts of decode, and what it writes."""

from dataclasses import replace
from itertools import count

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import EngineRan, PeerLost, PeerReady, WriteEnded, WriteResult
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.sides import (
    DECODE,
    DECODE_2,
    TIMEOUTS,
    Prefill,
    abort_frame,
    about,
    ack,
    ids,
    ignored,
    names,
    query,
    sent,
    writes,
)


class TestOpenAndOffer:
    def test_first_open_and_offer_are_not_answered(self) -> None:
        side = Prefill()
        assert names(side.opened()) == []
        assert names(side.offered()) == []
        assert side.status == {}
        side.request()
        assert side.status[1].phase is Phase.READY
        assert names(side.effects) == []

    def test_prefill_sends_one_frame_for_a_handoff(self) -> None:
        side = Prefill()
        side.request()
        side.send()
        side.opened()
        (write,) = writes(side.offered())
        side.landed(write)
        side.receive(ack())
        side.wait(200)
        assert names(side.effects) == ["Ended(done)"]
        assert side.machine.rows == 0

    def test_repeated_open_says_whether_memory_is_known(self) -> None:
        side = Prefill()
        side.request()
        side.opened()
        assert names(side.opened()) == ["Accepted"]
        side.offered()
        assert names(side.opened()) == ["Accepted+"]

    def test_repeated_offer_is_always_answered(self) -> None:
        side = Prefill()
        side.opened()
        side.offered()
        assert names(side.offered()) == ["Accepted+"]
        side.request()
        assert names(side.offered()) == ["Accepted+"]
        (write,) = writes(side.send())
        assert names(side.offered()) == ["Accepted+"]
        side.landed(write)
        assert names(side.offered()) == ["Ended(done)"]

    def test_offer_that_overtakes_open_is_ignored(self) -> None:
        side = Prefill()
        side.request()
        assert ignored(side.offered()) == ["unknown"]
        assert side.status[1].phase is Phase.WAITING
        side.opened()
        assert names(side.offered()) == []
        assert side.status[1].phase is Phase.READY

    @pytest.mark.parametrize(
        "changes", [{"pages": (8, 10)}, {"prefix_pages": 1}, {"aux_slot": 4}, {"state": (b"1234",)}]
    )
    def test_other_memory_for_same_attempt_is_ignored(self, changes: dict) -> None:
        side = Prefill()
        side.request()
        side.attempt()
        assert ignored(side.offered(**changes)) == ["mismatch"]
        assert writes(side.send())[0].target == ids(8, 9)

    def test_lost_offer_leaves_request_waiting(self) -> None:
        side = Prefill()
        side.request()
        side.opened()
        assert writes(side.send()) == []
        side.wait(20)
        assert side.status[1].phase is Phase.WAITING
        assert len(writes(side.offered())) == 1


class TestWrites:
    @pytest.fixture
    def side(self) -> Prefill:
        side = Prefill()
        side.request()
        side.opened()
        return side

    def test_pages_sent_before_offer_are_written_after_it(self, side: Prefill) -> None:
        assert writes(side.send(last=False)) == []
        assert writes(side.send(pages=(6,), start=2)) == []
        effects = side.offered(pages=(8, 9, 10))
        assert [(w.source, w.target, w.aux) for w in writes(effects)] == [
            (ids(4, 5), ids(8, 9), None),
            (ids(6), ids(10), (2, 3)),
        ]
        assert names(effects) == [], "the result is the answer"

    def test_result_waits_for_every_write(self, side: Prefill) -> None:
        side.offered()
        one = writes(side.send(pages=(4,), last=False))[0]
        two = writes(side.send(pages=(5,), start=1))[0]
        assert names(side.landed(two)) == []
        assert names(side.landed(one)) == ["Ended(done)"]

    def test_pages_that_decode_holds_are_not_written(self, side: Prefill) -> None:
        side.offered(prefix_pages=2)
        assert side.status[1].prefix_pages == 2
        assert writes(side.send(pages=(1,), last=False)) == []
        (write,) = writes(side.send(pages=(2, 3, 4), start=1))
        assert (write.source, write.target) == (ids(3, 4), ids(8, 9))

    def test_handoff_with_nothing_to_write_is_done_at_once(self, side: Prefill) -> None:
        side.offered(prefix_pages=2, pages=())
        assert names(side.send(aux_slot=None)) == ["Ended(done)"]
        assert (side.status[1].phase, side.status[1].releasable) == (Phase.DONE, True)

    @pytest.mark.parametrize(("ours", "theirs", "written"), [(2, 3, (2, 3)), (None, 3, None), (2, f.NO_AUX, None)])
    def test_aux_row_is_written_where_both_name_it(self, side: Prefill, ours, theirs, written) -> None:
        side.offered(aux_slot=theirs)
        assert [write.aux for write in writes(side.send(aux_slot=ours))] == [written]

    def test_sums_of_checksums_go_with_result(self, side: Prefill) -> None:
        side.offered()
        one = writes(side.send(pages=(4,), last=False))[0]
        two = writes(side.send(pages=(5,), start=1))[0]
        side.do(WriteEnded(one.attempt, one.write, WriteResult.LANDED, 8, "", 2**63 - 1))
        (ended,) = sent(side.do(WriteEnded(two.attempt, two.write, WriteResult.LANDED, 8, "", 5)))
        assert (ended.checksum, ended.bytes_moved) == (4, 16)

    @pytest.mark.parametrize(
        ("sends", "why"),
        [
            ([{"pages": (1, 2, 3)}], "the last send of prefill has pages 0 to 2 (inclusive)"),
            (
                [{"pages": (1,)}],
                "the last send of prefill has pages 0 to 0 (inclusive), decode offered pages 0 to 1 (inclusive)",
            ),
            ([{"pages": (1,), "start": 1}], "the first send of prefill has pages 1 to 1 (inclusive)"),
            ([{"pages": (1,), "last": False}, {"pages": (2,), "start": 2}], "starts at page 2"),
            ([{}, {"pages": ()}], "after the last"),
            ([{"pages": (1,), "last": False, "state": ((60,),)}], "before the last"),
        ],
    )
    def test_send_that_does_not_fit_fails_handoff(self, side: Prefill, sends: list[dict], why: str) -> None:
        side.offered()
        for send in sends:
            side.send(**send)
        assert side.status[1].cause is Cause.INVALID
        assert why in side.status[1].message

    def test_send_that_does_not_fit_late_offer_fails_handoff(self, side: Prefill) -> None:
        side.send(pages=(1, 2, 3))
        assert names(side.offered()) == ["Ended(invalid)"]
        assert side.status[1].cause is Cause.INVALID


class TestStatePools:
    def side(self, *pools: bytes, pages=(8, 9)) -> Prefill:
        side = Prefill()
        side.request()
        side.opened()
        side.offered(pages=pages, state=pools)
        return side

    def test_items_of_each_pool_go_with_last_pages(self) -> None:
        side = self.side(ids(50, 51), ids(70))
        (first,) = writes(side.send(pages=(4,), last=False))
        (second,) = writes(side.send(pages=(5,), start=1, state=((60, 61), (80,))))
        assert (first.state, second.state) == ((), ((ids(60, 61), ids(50, 51)), (ids(80), ids(70))))

    def test_items_alone_are_written(self) -> None:
        side = self.side(b"", ids(50), pages=())
        (write,) = writes(side.send(pages=(), aux_slot=None, state=((), (60,))))
        assert names(side.landed(write)) == ["Ended(done)"]

    @pytest.mark.parametrize(
        ("ours", "theirs"), [(((60,),), (ids(50, 51),)), ((), (ids(50),)), (((60,),), (ids(50), b""))]
    )
    def test_other_number_of_items_fails_handoff(self, ours: tuple, theirs: tuple) -> None:
        side = self.side(*theirs)
        assert writes(side.send(state=ours)) == []
        assert side.status[1].cause is Cause.INVALID
        assert "one number for each pool" in side.status[1].message

    def test_row_shows_pages_and_items_of_each_pool(self) -> None:
        side = self.side(ids(50, 51), b"")
        (exchange,) = side.machine.under_way(DECODE)
        assert (exchange.pages, exchange.state_items) == (2, (2, 0))
        assert exchange.handoff.request.handle == 1


class TestDeadlines:
    def test_parked_attempt_ends_after_match_s(self) -> None:
        side = Prefill()
        side.opened(deadline_s=300.0)
        side.offered()
        assert not sent(side.wait(TIMEOUTS.match_s - 1), f.Ended)
        (ended, *_) = sent(side.wait(2), f.Ended)
        assert (ended.cause, ended.settled) == (Cause.TIMED_OUT, True)
        assert "the engine of prefill never sent the request" in ended.message

    def test_attempt_ends_when_engine_runs_without_its_request(self) -> None:
        side = Prefill()
        side.do(EngineRan(100.0))
        side.opened()
        assert [names(side.do(EngineRan(total))) for total in (200.0, 202.9)] == [[], []]
        (ended,) = sent(side.do(EngineRan(203.0)), f.Ended)
        assert (ended.cause, ended.settled) == (Cause.TIMED_OUT, True)
        assert "has not received the request" in ended.message
        side.request()
        assert side.status[1].cause is Cause.TIMED_OUT

    def test_running_engine_spares_requests_and_later_attempts(self) -> None:
        side = Prefill()
        side.request()
        side.opened(1)
        side.do(EngineRan(1.0))
        side.opened(2, room=8)
        side.do(EngineRan(3.0))
        assert not sent(side.do(EngineRan(5.9)), f.Ended)
        (ended,) = sent(side.do(EngineRan(6.0)), f.Ended)
        assert ended.attempt.number == 2

    def test_parked_attempt_ends_at_its_deadline_if_sooner(self) -> None:
        side = Prefill()
        side.opened(deadline_s=5.0)
        assert names(side.wait(5.05)) == ["Ended(timed_out)"]

    def test_waiting_request_ends_after_match_s(self) -> None:
        side = Prefill()
        side.request(deadline_s=300.0)
        side.wait(TIMEOUTS.match_s - 1)
        assert side.status[1].phase is Phase.WAITING
        side.wait(2)
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.TIMED_OUT, True)
        assert "no decode opened an attempt" in side.status[1].message

    def test_matched_request_has_its_own_deadline(self) -> None:
        side = Prefill()
        side.opened(deadline_s=300.0)
        side.request(deadline_s=200.0)
        side.wait(199)
        assert side.status[1].phase is Phase.WAITING
        side.wait(2)
        assert side.status[1].cause is Cause.TIMED_OUT

    def test_frozen_decode_ends_request_at_deadline_only(self) -> None:
        side = Prefill()
        side.request(deadline_s=30.0)
        side.opened()
        side.wait(29)
        assert (side.status[1].phase, side.status[1].releasable) == (Phase.WAITING, False)
        side.wait(2)
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.TIMED_OUT, True)

    def test_deadline_while_writing_waits_for_writes(self) -> None:
        side = Prefill()
        side.request()
        side.attempt()
        (write,) = writes(side.send(pages=(4,), last=False))
        side.wait(31)
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.TIMED_OUT, False)
        side.landed(write)
        assert side.status[1].releasable


class TestQuery:
    def test_query_is_answered_in_every_state(self) -> None:
        side = Prefill()
        side.opened()
        assert names(side.receive(query())) == ["Accepted"]
        side.request()
        assert names(side.receive(query())) == ["Accepted"]
        side.offered()
        assert names(side.receive(query())) == ["Accepted+"]
        (write,) = writes(side.send())
        assert names(side.receive(query())) == ["Accepted+"]
        side.landed(write)
        assert names(side.receive(query())) == ["Ended(done)"]

    def test_query_for_unknown_attempt_is_answered_forgotten(self) -> None:
        side = Prefill()
        assert names(side.receive(query(99))) == ["Ended(forgotten)"]

    def test_decode_paired_again_gets_state_of_attempts(self) -> None:
        side = Prefill()
        side.request()
        side.opened()
        assert names(side.do(PeerReady(DECODE, f.VERSION_MAX))) == ["Accepted"]


class TestFramesThatDoNotFit:
    def test_frame_for_other_room_is_dropped(self) -> None:
        side = Prefill()
        side.request()
        side.opened()
        assert ignored(side.receive(abort_frame(room=8))) == ["mismatch"]
        assert side.status[1].phase is Phase.WAITING

    def test_frame_of_unpaired_process_is_dropped(self) -> None:
        side = Prefill()
        assert ignored(side.receive(abort_frame(peer=DECODE_2))) == ["unpaired"]

    def test_frame_for_attempt_of_other_decode_is_dropped(self) -> None:
        side = Prefill(TIMEOUTS, DECODE, DECODE_2)
        side.request()
        side.opened()
        stranger = f.Abort(**(about(1) | {"sender": DECODE_2}), request_id="r", cause="aborted", message="")
        assert ignored(side.receive(stranger)) == ["stranger"]
        assert side.status[1].phase is Phase.WAITING

    def test_frame_of_prefill_is_dropped(self) -> None:
        side = Prefill()
        assert ignored(side.receive(f.Accepted(**about()))) == ["direction"]


class TestBounds:
    def test_one_decode_has_half_of_the_attempts(self) -> None:
        side = Prefill(replace(TIMEOUTS, max_attempts=4), DECODE, DECODE_2)
        for number in range(3):
            side.opened(number, room=number)
        assert names(side.effects) == ["Ended(refused)"]
        assert names(side.opened(1, room=9, peer=DECODE_2)) == []

    def test_requests_are_bounded(self) -> None:
        side = Prefill(replace(TIMEOUTS, max_attempts=2))
        for handle in (1, 2, 3):
            side.request(handle, room=handle)
        assert side.status[3].cause is Cause.REFUSED
        assert names(side.opened(3, room=3)) == ["Ended(refused)"]

    def test_offered_ids_are_bounded_for_all_and_each(self) -> None:
        third = "f" * 32
        side = Prefill(replace(TIMEOUTS, max_offered_bytes=4000), DECODE, DECODE_2, third)
        numbers = count(1)

        def offer(peer: str) -> str:
            number = next(numbers)
            whose = {"peer": peer, "room": number, "attempt": f.AttemptId(peer, number)}
            side.opened(**whose)
            offered = side.offered(**whose, pages=range(100), state=(bytes(400),))
            return names(offered)[-1] if names(offered) else "taken"

        assert [offer(DECODE) for _ in range(3)] == ["taken", "taken", "Ended(refused)"]
        assert "as many ids" in sent(side.effects, f.Ended)[-1].message
        assert [offer(DECODE_2) for _ in range(3)] == ["taken", "taken", "Ended(refused)"]
        assert [offer(third) for _ in range(2)] == ["taken", "Ended(refused)"], "five of 800 in 4000"
        side.do(PeerLost(DECODE, "gone"))
        assert [offer(third) for _ in range(2)] == ["taken", "Ended(refused)"], "two of 800 in its half"
        side.wait(TIMEOUTS.match_s + 1)
        assert [offer(DECODE_2) for _ in range(3)] == ["taken", "taken", "Ended(refused)"]
