"""Prefill's machine: how hand-offs end there, and what is remembered of them."""

from dataclasses import replace

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    Drain,
    Fenced,
    PeerLost,
    PeerReady,
    SendPages,
    Shutdown,
    WriteResult,
)
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


def sending(*, pages=(4, 5), last: bool = True) -> Prefill:
    side = Prefill()
    side.request()
    side.attempt()
    side.send(pages=pages, last=last)
    return side


class TestAbortByDecode:
    def test_abort_before_offer_ends_request_at_once(self) -> None:
        side = Prefill()
        side.request()
        side.opened()
        assert names(side.receive(abort_frame())) == ["Ended(peer_aborted)"]
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_ABORTED, True)

    def test_abort_without_open_ends_waiting_request(self) -> None:
        side = Prefill()
        side.request()
        assert names(side.receive(abort_frame())) == ["Ended(peer_aborted)"]
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_ABORTED, True)

    def test_open_after_its_abort_is_not_taken(self) -> None:
        side = Prefill()
        side.receive(abort_frame())
        assert names(side.opened()) == ["Ended(peer_aborted)"]
        side.request()
        assert side.status[1].cause is Cause.PEER_ABORTED

    def test_repeated_abort_is_answered_each_time(self) -> None:
        side = Prefill()
        side.request()
        side.opened()
        assert names(side.receive(abort_frame())) == ["Ended(peer_aborted)"]
        assert names(side.receive(abort_frame())) == ["Ended(peer_aborted)"]
        side.receive(ack())
        assert names(side.receive(abort_frame())) == ["Ended(peer_aborted)"]

    def test_repeated_abort_while_quiescing_is_answered_unsettled(self) -> None:
        side = sending()
        side.receive(abort_frame())
        assert names(side.receive(abort_frame())) == ["Ended(peer_aborted, unsettled)"]

    def test_refusal_of_decode_keeps_its_cause(self) -> None:
        side = Prefill()
        side.request()
        side.opened()
        side.receive(abort_frame(cause="too_long", message="9000 tokens, 8192 fit"))
        assert (side.status[1].cause, side.status[1].message) == (Cause.TOO_LONG, "9000 tokens, 8192 fit")

    def test_abort_of_forgotten_attempt_ends_no_other_request(self) -> None:
        side = Prefill()
        side.request()
        assert names(side.receive(abort_frame(cause="forgotten", rid=""))) == ["Ended(forgotten)"]
        assert side.status[1].phase is Phase.WAITING


class TestAbortByPrefill:
    def test_abort_after_offer_informs_decode_at_once(self) -> None:
        side = Prefill()
        side.request()
        side.attempt()
        assert names(side.abort(message="client left")) == ["Ended(aborted)"]
        assert (side.status[1].message, side.status[1].releasable) == ("client left", True)

    def test_abort_while_writing_waits_for_write(self) -> None:
        side = sending()
        assert names(side.abort()) == ["Ended(aborted, unsettled)"]
        assert set(names(side.wait(3))) == {"Ended(aborted, unsettled)"}
        (write,) = writes(side.effects)
        assert names(side.landed(write)) == ["Ended(aborted)"]
        assert (side.status[1].phase, side.status[1].releasable) == (Phase.FAILED, True)

    def test_late_send_for_ended_handoff_is_dropped(self) -> None:
        side = Prefill()
        side.request()
        side.abort()
        assert side.do(SendPages(1, ids(4), 0, True, None)) == []

    def test_abort_of_unknown_handle_is_no_error(self) -> None:
        assert Prefill().abort(99) == []


class TestFailedWrites:
    @pytest.mark.parametrize(
        ("result", "cause"),
        [(WriteResult.FAILED, Cause.TRANSFER_FAILED), (WriteResult.INVALID, Cause.INVALID)],
    )
    def test_failed_write_ends_handoff_once_others_end(self, result: WriteResult, cause: Cause) -> None:
        side = sending(pages=(4,), last=False)
        side.send(pages=(5,), start=1)
        one, two = writes(side.effects)
        assert names(side.landed(one, result, "no route")) == [f"Ended({cause}, unsettled)"]
        assert (side.status[1].cause, side.status[1].message) == (cause, "no route")
        assert not side.status[1].releasable
        assert names(side.landed(two)) == [f"Ended({cause})"]
        assert side.status[1].releasable

    def test_unsettled_write_holds_until_fence(self) -> None:
        side = sending()
        effects = side.landed(writes(side.effects)[0], WriteResult.UNSETTLED)
        assert names(effects) == ["Ended(transfer_failed, unsettled)"]
        assert "Ended(transfer_failed)" not in names(side.wait(10_000))
        (held,) = side.machine.held()
        assert (held.unsettled_peers, side.status[1].releasable) == ((DECODE,), False)
        assert names(side.do(Fenced(DECODE, "kubelet"))) == []
        assert side.status[1].releasable
        assert side.status[1].cause is Cause.TRANSFER_FAILED

    def test_write_that_does_not_end_holds_until_it_does(self) -> None:
        side = sending()
        side.abort()
        side.wait(TIMEOUTS.quiesce_s + 1)
        assert len(side.machine.held()) == 1
        side.wait(10_000)
        assert not side.status[1].releasable
        assert names(side.landed(writes(side.effects)[0])) == ["Ended(aborted)"]
        assert side.status[1].releasable

    def test_first_cause_stays(self) -> None:
        side = sending()
        side.landed(writes(side.effects)[0], WriteResult.FAILED, "link down")
        side.abort()
        side.receive(abort_frame())
        side.do(PeerLost(DECODE, "gone"))
        side.wait(100)
        assert (side.status[1].cause, side.status[1].message) == (Cause.TRANSFER_FAILED, "link down")

    def test_end_of_unknown_write_changes_nothing(self) -> None:
        side = sending()
        (write,) = writes(side.effects)
        side.landed(write)
        assert side.landed(write) == []


class TestPeers:
    def test_lost_decode_ends_parked_attempt(self) -> None:
        side = Prefill()
        side.opened()
        side.do(PeerLost(DECODE, "gone"))
        assert side.machine.under_way(DECODE) == []

    def test_lost_decode_ends_its_handoffs_only(self) -> None:
        side = Prefill(TIMEOUTS, DECODE, DECODE_2)
        side.request(1, room=1)
        side.request(2, room=2)
        side.opened(1, room=1)
        side.opened(1, room=2, peer=DECODE_2)
        side.do(PeerLost(DECODE, "connection ended"))
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, True)
        assert side.status[2].phase is Phase.WAITING

    def test_lost_decode_while_writing_waits_for_write(self) -> None:
        side = sending()
        side.do(PeerLost(DECODE, "connection ended"))
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, False)
        side.landed(writes(side.effects)[0], WriteResult.FAILED)
        assert side.status[1].releasable

    def test_decode_that_is_back_gets_result(self) -> None:
        side = Prefill()
        side.request()
        side.opened()
        side.do(PeerLost(DECODE, "connection ended"))
        assert sent(side.receive(query())) == []
        side.do(PeerReady(DECODE, f.VERSION_MAX))
        assert names(side.receive(query())) == ["Ended(peer_lost)"]
        assert names(side.wait(3))[:1] == ["Ended(peer_lost)"], "repeated without a question as well"

    def test_fenced_decode_opens_nothing(self) -> None:
        side = Prefill()
        side.request()
        side.do(Fenced(DECODE, "kubelet"))
        assert ignored(side.opened()) == ["unpaired"]
        assert ignored(side.do(PeerReady(DECODE, f.VERSION_MAX))) == ["fenced"]
        side.opened()
        assert side.status[1].phase is Phase.WAITING

    def test_fence_settles_write_in_flight(self) -> None:
        side = sending()
        side.do(Fenced(DECODE, "kubelet"))
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, True)

    @pytest.mark.parametrize(
        "after", [[], [PeerLost(DECODE, "gone")], [PeerLost(DECODE, "gone"), PeerReady(DECODE, 1)]]
    )
    def test_nothing_of_fenced_decode_stays(self, after: list) -> None:
        side = Prefill()
        side.opened(1)
        side.do(Fenced(DECODE, "pod deleted"))
        for event in after:
            side.do(event)
        side.wait(3 * TIMEOUTS.result_s)
        assert not side.machine._tombstones.forgotten(f.AttemptId(DECODE, 1)), "no floor is left either"
        assert (side.machine.rows, side.machine.next_deadline) == (0, None)


class TestDrainAndShutdown:
    def test_drain_finishes_known_requests_and_refuses_new(self) -> None:
        side = Prefill()
        side.request(1, room=1)
        side.do(Drain())
        side.attempt(1, room=1)
        assert side.status[1].phase is Phase.READY
        side.request(2, room=2)
        assert side.status[2].cause is Cause.REFUSED
        assert names(side.opened(2, room=2)) == ["Ended(refused)"]
        assert names(side.opened(3, room=3)) == ["Ended(refused)"]

    def test_drain_refuses_parked_attempts(self) -> None:
        side = Prefill()
        side.opened(1, room=7)
        (ended,) = sent(side.do(Drain()), f.Ended)
        assert (ended.room, ended.cause) == (7, Cause.REFUSED)

    def test_shutdown_fails_all_and_informs_decode(self) -> None:
        side = Prefill()
        side.request(1, room=1)
        side.request(2, room=2)
        side.opened(1, room=1)
        side.opened(3, room=3)
        assert names(side.do(Shutdown())) == ["Ended(shutdown)", "Ended(shutdown)"]
        assert {status.cause for status in side.status.values()} == {Cause.SHUTDOWN}

    def test_unsettled_counts_what_a_drain_waits_for(self) -> None:
        side = sending()
        side.abort()
        assert side.machine.unsettled == 1
        side.landed(writes(side.effects)[0])
        assert side.machine.unsettled == 1, "decode has not acknowledged the result"
        side.receive(ack())
        assert side.machine.unsettled == 0

    def test_results_for_lost_decode_do_not_delay_drain(self) -> None:
        side = Prefill()
        side.request()
        side.opened()
        side.abort()
        assert side.machine.unsettled == 1
        side.do(PeerLost(DECODE, "gone"))
        assert side.machine.unsettled == 0


class TestQueues:
    def test_expired_requests_are_no_progress(self) -> None:
        side = Prefill()
        side.request(1, room=7, deadline_s=5)
        side.request(2, room=8, rid="b")
        side.attempt(2, room=8, rid="b")
        side.wait(6)
        queues = side.machine.queues
        assert (queues.moved_total("prefill_bootstrap"), queues.count("prefill_bootstrap")) == (0, 1)
        side.send(2)
        assert (queues.moved_total("prefill_bootstrap"), queues.count("prefill_inflight")) == (1, 1)


class TestTombstones:
    def done(self) -> Prefill:
        side = sending()
        side.landed(writes(side.effects)[0])
        return side

    def test_result_is_repeated_until_acknowledged(self) -> None:
        side = self.done()
        repeated = names(side.wait(10))
        assert 5 < len(repeated) < 12
        assert set(repeated) == {"Ended(done)"}
        side.receive(ack())
        assert names(side.wait(30)) == []

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [({"attempt": f.AttemptId(DECODE, 2)}, "stale"), ({"room": 8}, "mismatch"), ({"sender": DECODE_2}, "stranger")],
    )
    def test_ack_that_does_not_fit_stops_nothing(self, changes: dict, reason: str) -> None:
        side = Prefill(TIMEOUTS, DECODE, DECODE_2)
        side.request()
        side.opened()
        side.abort()
        assert ignored(side.receive(f.Ack(**(about(1) | changes)))) == [reason]
        assert names(side.wait(1)) != []
        assert side.machine.tombstones == 1

    def test_ack_of_unsettled_end_stops_nothing(self) -> None:
        side = sending()
        side.abort()
        assert ignored(side.receive(ack())) == ["stale"]
        assert names(side.wait(1)) != []

    def test_late_open_of_ended_attempt_takes_no_request(self) -> None:
        side = self.done()
        side.receive(ack())
        side.request(2)
        assert names(side.opened()) == ["Ended(done)"]
        assert side.status[2].phase is Phase.WAITING

    @pytest.mark.parametrize(
        ("late", "answer"),
        [("opened", "Ended(refused)"), ("offered", "Ended(forgotten)")],
    )
    def test_late_frame_of_forgotten_attempt_does_not_resurrect(self, late: str, answer: str) -> None:
        side = self.done()
        side.receive(ack())
        side.wait(TIMEOUTS.acked_s + 1)
        assert side.machine.tombstones == 0
        side.request(2)
        assert names(getattr(side, late)()) == [answer]
        assert side.status[2].phase is Phase.WAITING

    def test_late_abort_of_forgotten_attempt_spares_next_request(self) -> None:
        side = self.done()
        side.receive(ack())
        side.wait(TIMEOUTS.acked_s + 1)
        side.request(2)
        assert names(side.receive(abort_frame())) == ["Ended(forgotten)"]
        assert side.status[2].phase is Phase.WAITING

    def test_early_attempt_outlives_tombstones_of_later_ones(self) -> None:
        side = Prefill(replace(TIMEOUTS, result_s=10.0, acked_s=2.0))
        side.request(1, deadline_s=300.0)
        side.opened(1, deadline_s=300.0)
        for number in (2, 3):
            side.request(number, room=number)
            side.opened(number, room=number)
            side.abort(number)
            side.receive(ack(number) if number == 2 else query(number, room=number))
        side.wait(100)
        assert side.machine.tombstones == 0
        assert names(side.opened(1)) == ["Accepted"]
        side.offered(1)
        assert side.status[1].phase is Phase.READY
        assert len(writes(side.send())) == 1

    def test_full_table_refuses_attempts_and_resurrects_none(self) -> None:
        side = Prefill(replace(TIMEOUTS, max_tombstones=8))
        for number in range(4):
            side.request(number, room=number)
            side.opened(number, room=number)
            side.abort(number)
        side.request(9, room=9)
        (refused,) = sent(side.opened(9, room=9), f.Ended)
        assert "remembers as many" in refused.message
        assert side.status[9].cause is Cause.REFUSED
        side.wait(TIMEOUTS.result_s + 1)
        side.request(10, room=9)
        (stale,) = sent(side.opened(9, room=9), f.Ended)
        assert "already forgotten" in stale.message
        assert side.status[10].phase is Phase.WAITING
        side.attempt(10, room=9)
        assert side.status[10].phase is Phase.READY

    def test_request_of_refused_attempt_ends_with_it(self) -> None:
        side = Prefill(replace(TIMEOUTS, max_tombstones=2))
        side.receive(abort_frame(1, room=1))
        side.opened(3, room=3)
        side.request(2, room=3)
        assert side.status[2].cause is Cause.REFUSED

    def test_refusals_leave_room_for_ends_of_live_attempts(self) -> None:
        side = Prefill(replace(TIMEOUTS, max_tombstones=8))
        for number in range(1, 40):
            side.opened(number, room=number)
        side.request(1, room=1)
        side.abort(1)
        repeated = [frame for frame in sent(side.wait(10.0), f.Ended) if frame.attempt.number == 1]
        assert len(repeated) > 3
        assert names(side.receive(query(1, room=1))) == ["Ended(aborted)"]
