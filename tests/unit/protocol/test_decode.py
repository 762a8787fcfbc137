"""Decode's machine: it opens, offers, repeats, and says when memory may be given back."""

from dataclasses import replace
from itertools import accumulate

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Connect,
    Drain,
    Fenced,
    Linked,
    OpenAttempt,
    PeerLost,
    PeerReady,
    Shutdown,
    Tick,
    Unlinked,
    Unreachable,
    Writer,
)
from pdpool_connector.protocol.machine import MAX_FENCED
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.sides import (
    PREFILL,
    PREFILL_2,
    TIMEOUTS,
    Decode,
    about,
    accepted,
    ended,
    ids,
    ignored,
    names,
    sent,
)


def restarted(side: Decode) -> None:
    """Another process comes up behind the same bootstrap address."""
    side.do(PeerLost(PREFILL, "it was restarted"))
    side.do(PeerReady(PREFILL_2, f.VERSION_MAX))
    side.do(Linked("p:1", (Writer(PREFILL_2),)))


class TestOpenAndOffer:
    def test_handoff_costs_decode_three_frames(self) -> None:
        side = Decode()
        side.offered()
        side.receive(ended(moved=10))
        side.wait(100)
        assert names(side.effects) == ["Open", "Offer", "Ack"]
        assert side.machine.rows == 0

    def test_open_connects_and_is_sent_when_linked(self) -> None:
        side = Decode(linked=False)
        assert side.open()[-1] == Connect("p:1")
        assert side.machine.waits_for("p:1")
        (frame,) = sent(side.link(), f.Open)
        assert (frame.room, frame.request_id, frame.deadline_s) == (7, "r", 30.0)
        assert not side.machine.waits_for("p:1")

    def test_memory_offered_before_link_follows_open(self) -> None:
        side = Decode(linked=False)
        side.open()
        side.offer()
        assert side.status[1].phase is Phase.WAITING
        opened, offer = sent(side.link())
        assert (type(opened), type(offer)) == (f.Open, f.Offer)
        assert (offer.pages, offer.prefix_pages, offer.aux_slot) == (ids(8, 9), 0, 3)
        assert side.status[1].phase is Phase.TRANSFERRING

    def test_offer_carries_prefix_and_state_pools(self) -> None:
        side = Decode()
        side.open()
        (offer,) = sent(side.offer(prefix=2, aux_slot=None, state=((50, 51), ())))
        assert (offer.prefix_pages, offer.aux_slot, offer.state) == (2, f.NO_AUX, (ids(50, 51), b""))
        assert side.status[1].prefix_pages == 2
        (row,) = side.machine.under_way(PREFILL)
        assert (row.pages, row.state_items) == (2, (2, 0))

    def test_second_offer_is_ignored(self) -> None:
        side = Decode()
        side.open()
        side.offer()
        assert (names(effects := side.offer(pages=(1, 2))), ignored(effects)) == ([], ["offer"])

    def test_offer_for_ended_attempt_is_ignored(self) -> None:
        side = Decode()
        side.open()
        side.receive(ended(1, "timed_out"))
        assert (names(effects := side.offer()), ignored(effects)) == ([], ["offer"])

    def test_offer_while_unlinked_waits_for_link(self) -> None:
        side = Decode()
        side.open()
        side.do(Unlinked("p:1"))
        assert names(side.offer()) == []
        assert side.status[1].phase is Phase.WAITING
        assert names(side.link()) == ["Open", "Offer"]
        assert side.status[1].phase is Phase.TRANSFERRING

    def test_result_without_memory_fails_attempt(self) -> None:
        side = Decode()
        side.open()
        side.receive(ended())
        assert (side.status[1].phase, side.status[1].cause) == (Phase.FAILED, Cause.TRANSFER_FAILED)


class TestRepetition:
    def test_open_is_repeated_with_time_that_is_left(self) -> None:
        side = Decode()
        side.open()
        repeated = sent(side.wait(4), f.Open)
        assert 4 < len(repeated) < 9
        assert repeated[-1].deadline_s == pytest.approx(30 - side.now, abs=2.1)

    def test_unanswered_open_is_repeated_before_offer(self) -> None:
        side = Decode()
        side.open()
        side.offer()
        assert names(side.wait(0.1)) == ["Open"]
        assert names(side.receive(accepted())) == ["Offer"]
        assert names(side.wait(0.5))[:1] == ["Offer"]

    def test_answer_to_open_accepts_offer_too(self) -> None:
        side = Decode()
        side.open()
        side.offer()
        assert names(side.wait(0.1)) == ["Open"]
        assert names(side.receive(accepted(offered=True))) == []
        assert names(side.wait(4)) == ["Query"]

    def test_accepted_attempt_is_queried(self) -> None:
        side = Decode()
        side.open()
        side.receive(accepted())
        assert names(side.wait(10)) == ["Query", "Query", "Query"]

    def test_accepted_offer_is_queried(self) -> None:
        side = Decode()
        side.offered()
        assert names(side.wait(10)) == ["Query", "Query", "Query"]

    def test_accepted_open_does_not_stop_repeated_offer(self) -> None:
        side = Decode()
        side.open()
        side.offer()
        side.receive(accepted())
        assert set(names(side.wait(5))) == {"Offer"}

    @pytest.mark.parametrize("kind", ["Open", "Offer", "Abort"])
    def test_pauses_double_up_to_retry_max(self, kind: str) -> None:
        side = Decode(replace(TIMEOUTS, quiesce_s=300.0))
        side.open(deadline_s=300.0)
        if kind == "Offer":
            side.receive(accepted())
            side.offer()
        elif kind == "Abort":
            side.abort()
        begun, times = side.now, [0.0]
        while (due := side.machine.next_deadline) is not None and due <= begun + 30.0:
            side.now = max(side.now, due)
            times += [side.now - begun] * names(side.do(Tick())).count(kind)
        pauses = [min(TIMEOUTS.retry_first_s * 2**step, TIMEOUTS.retry_max_s) for step in range(30)]
        assert times == pytest.approx([at for at in accumulate(pauses, initial=0.0) if at <= 30.0])

    def test_rebuilt_connection_repeats_all_at_once(self) -> None:
        side = Decode()
        side.open(1)
        side.offered(2)
        side.open(3)
        side.abort(3)
        side.wait(1)
        assert names(side.link()) == ["Open", "Query", "Abort"]


class TestEnds:
    def test_result_is_acknowledged_each_time_and_counted_once(self) -> None:
        side = Decode()
        side.offered()
        assert names(side.receive(ended(moved=10))) == ["Ack"]
        assert names(side.receive(ended(moved=10))) == ["Ack"]
        assert side.status[1].bytes_moved == 10

    def test_unsettled_end_is_not_acknowledged(self) -> None:
        side = Decode()
        side.offered()
        assert names(side.receive(ended(1, "transfer_failed", settled=False))) == ["Abort"]
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.TRANSFER_FAILED, False)
        side.receive(ended(1, "transfer_failed"))
        assert side.status[1].releasable

    def test_prefill_ends_attempt_before_offer(self) -> None:
        side = Decode()
        side.open()
        assert names(side.receive(ended(1, "aborted"))) == ["Ack"]
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_ABORTED, True)
        assert side.machine.rows == 0

    @pytest.mark.parametrize(
        ("stage", "message"),
        [("connecting", "could not be connected"), ("opened", "offered no memory"), ("offered", "not written")],
    )
    def test_every_stage_has_a_deadline(self, stage: str, message: str) -> None:
        side = Decode(linked=stage != "connecting")
        side.open()
        if stage == "offered":
            side.offer()
        side.wait(30.05)
        assert side.status[1].cause is Cause.TIMED_OUT
        assert message in side.status[1].message
        assert side.status[1].releasable == (stage != "offered")

    def test_abort_is_repeated_until_settled(self) -> None:
        side = Decode()
        side.offered()
        side.abort()
        assert len(sent(side.wait(60), f.Abort)) > 25
        assert not side.status[1].releasable
        side.receive(ended(1, "peer_aborted"))
        assert names(side.wait(60)) == []
        assert side.status[1].releasable

    def test_time_alone_releases_no_memory(self) -> None:
        side = Decode()
        side.offered()
        side.abort()
        side.wait(10_000)
        assert not side.status[1].releasable
        assert [row.unsettled_peers for row in side.machine.held()] == [(PREFILL,)]

    def test_late_result_turns_no_failure_into_success(self) -> None:
        side = Decode()
        side.offered()
        side.abort()
        side.receive(ended())
        assert (side.status[1].phase, side.status[1].cause) == (Phase.FAILED, Cause.ABORTED)
        assert side.status[1].releasable

    def test_refusal_gives_its_cause_to_prefill(self) -> None:
        side = Decode()
        side.open()
        (abort,) = sent(side.do(AbortTransfer(1, "9000 tokens, 8192 fit", Cause.TOO_LONG)), f.Abort)
        assert (abort.cause, abort.message) == ("too_long", "9000 tokens, 8192 fit")
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.TOO_LONG, True)

    def test_unknown_cause_of_peer_fails_attempt(self) -> None:
        side = Decode()
        side.open()
        side.receive(ended(1, "solar_flare"))
        assert side.status[1].cause is Cause.TRANSFER_FAILED

    def test_message_of_peer_becomes_one_line(self) -> None:
        side = Decode()
        side.open()
        side.receive(f.Ended(**about(sender=PREFILL), cause="timed_out", settled=True, message="\x1b[2J\nfake line"))
        assert side.status[1].message == "\\x1b[2J\\nfake line"


class TestAbortBeforeOffer:
    def test_unanswered_abort_ends_after_quiesce_s(self) -> None:
        side = Decode()
        side.open()
        side.abort()
        assert (side.status[1].releasable, side.machine.rows) == (True, 1)
        side.wait(TIMEOUTS.quiesce_s + 0.1)
        assert (side.machine.rows, side.machine.next_deadline) == (0, None)

    def test_abort_before_link_is_sent_when_linked(self) -> None:
        side = Decode(linked=False)
        side.open()
        side.abort()
        assert side.status[1].releasable
        (abort,) = sent(side.link())
        assert (type(abort), abort.room, abort.request_id) == (f.Abort, 7, "r")
        side.receive(ended(1, "peer_aborted"))
        assert side.machine.rows == 0

    def test_abort_before_link_waits_until_deadline(self) -> None:
        side = Decode(linked=False)
        side.open()
        side.abort()
        side.wait(29.0)
        assert side.machine.rows == 1
        side.wait(1.1)
        assert side.machine.rows == 0

    def test_prefill_that_still_knows_ended_attempt_gets_abort(self) -> None:
        side = Decode()
        side.open()
        side.do(PeerLost(PREFILL, "connection ended"))
        assert side.machine.rows == 0
        side.link()
        (abort,) = sent(side.receive(accepted()))
        assert (type(abort), abort.cause, abort.attempt.number) == (f.Abort, "forgotten", 1)


class TestLinks:
    def test_unreachable_prefill_fails_attempts_that_wait(self) -> None:
        side = Decode(linked=False)
        side.open()
        side.do(Unreachable("p:1", Cause.PEER_LOST, "connection refused"))
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, True)
        assert side.machine.rows == 0

    def test_attempt_opened_while_unlinked_goes_to_next_process(self) -> None:
        side = Decode()
        side.do(Unlinked("p:1"))
        side.open()
        restarted(side)
        assert side.status[1].phase is Phase.WAITING
        assert [row.attempt.number for row in side.machine.under_way(PREFILL_2)] == [1]

    def test_restart_of_prefill_before_offer_frees_memory(self) -> None:
        side = Decode()
        side.open()
        side.receive(accepted())
        restarted(side)
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, True)
        assert names(side.offer()) == []
        assert names(side.open(2)) == ["Open"]

    def test_lost_prefill_holds_memory_until_it_answers(self) -> None:
        side = Decode()
        side.offered()
        side.do(PeerLost(PREFILL, "connection ended"))
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, False)
        assert side.machine.holds_for("p:1")
        assert names(side.link()) == ["Abort"]
        side.receive(ended(1, "peer_lost"))
        assert side.status[1].releasable
        assert not side.machine.holds_for("p:1")

    def test_restarted_prefill_does_not_end_old_hold(self) -> None:
        side = Decode()
        side.offered()
        restarted(side)
        assert ignored(side.receive(ended(1, "forgotten", sender=PREFILL_2))) == ["stranger"]
        assert not side.status[1].releasable
        side.open(2)
        side.offer(2)
        side.receive(ended(2, sender=PREFILL_2))
        assert side.status[2].phase is Phase.DONE

    def test_lost_prefill_fails_its_attempts_only(self) -> None:
        side = Decode()
        side.do(PeerReady(PREFILL_2, f.VERSION_MAX))
        side.do(Linked("q:1", (Writer(PREFILL_2),)))
        side.open(1)
        side.do(OpenAttempt(2, "q:1", 7, "r", 30.0))
        side.do(PeerLost(PREFILL, "connection ended"))
        assert (side.status[1].cause, side.status[2].phase) == (Cause.PEER_LOST, Phase.WAITING)


class TestFences:
    def test_hold_ends_by_fence_of_that_process(self) -> None:
        side = Decode()
        side.offered()
        side.do(PeerLost(PREFILL, "connection ended"))
        side.do(Fenced(PREFILL_2, "kubelet"))
        assert not side.status[1].releasable
        side.do(Fenced(PREFILL, "kubelet"))
        assert (side.status[1].releasable, side.machine.rows) == (True, 0)

    def test_fence_of_live_writer_fails_and_frees(self) -> None:
        side = Decode()
        side.offered()
        side.do(Fenced(PREFILL, "kubelet"))
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, True)

    def test_fenced_prefill_is_sent_no_attempt(self) -> None:
        side = Decode()
        side.do(Fenced(PREFILL, "kubelet"))
        effects = side.open()
        assert [type(effect) for effect in effects] == [Connect]
        restarted(side)
        assert sent(side.effects, f.Open)[0].attempt.number == 1

    def test_link_to_fenced_process_fails_attempts(self) -> None:
        side = Decode(linked=False)
        side.do(Fenced(PREFILL, "kubelet"))
        side.open()
        side.link()
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, True)
        assert "was fenced" in side.status[1].message
        assert (side.machine.rows, sent(side.effects)) == (0, [])

    def test_remembered_fences_are_bounded(self) -> None:
        side = Decode(linked=False)
        for number in range(MAX_FENCED + 10):
            side.do(Fenced(f"{number:032x}", "kubelet"))
        assert not side.machine.fenced(f"{9:032x}")
        assert side.machine.fenced(f"{10:032x}")


class TestRefusals:
    def test_drain_refuses_attempt_and_informs_prefill(self) -> None:
        side = Decode()
        side.offered(1)
        side.do(Drain())
        assert names(side.open(2)) == ["Abort"]
        assert (side.status[2].cause, side.status[2].releasable) == (Cause.REFUSED, True)
        side.receive(ended(1))
        assert side.status[1].phase is Phase.DONE

    def test_refusal_before_link_is_sent_when_linked(self) -> None:
        side = Decode(linked=False)
        side.do(Drain())
        assert side.open()[-1] == Connect("p:1")
        assert names(side.link()) == ["Abort"]

    def test_attempts_are_bounded_and_refusals_too(self) -> None:
        side = Decode(replace(TIMEOUTS, max_attempts=2))
        for handle in range(1, 6):
            side.open(handle, room=handle)
        assert [side.status[handle].phase for handle in (1, 2)] == [Phase.WAITING] * 2
        assert {side.status[handle].cause for handle in (3, 4, 5)} == {Cause.REFUSED}
        assert [frame.attempt.number for frame in sent(side.effects, f.Abort)] == [3, 4]
        assert "prefill is not informed" in side.status[5].message

    def test_shutdown_aborts_everything(self) -> None:
        side = Decode()
        side.open(1)
        side.offered(2)
        assert names(side.do(Shutdown())) == ["Abort", "Abort"]
        assert [side.status[handle].releasable for handle in (1, 2)] == [True, False]
        assert {status.cause for status in side.status.values()} == {Cause.SHUTDOWN}
        assert (side.machine.rows, side.machine.unsettled) == (1, 1)

    def test_shutdown_before_link_leaves_nothing(self) -> None:
        side = Decode(linked=False)
        side.open()
        side.do(Shutdown())
        assert (side.status[1].cause, side.machine.rows) == (Cause.SHUTDOWN, 0)


class TestFramesThatDoNotFit:
    def test_frame_for_other_room_is_dropped(self) -> None:
        side = Decode()
        side.offered()
        assert ignored(side.receive(ended(1, room=8))) == ["mismatch"]
        assert side.status[1].phase is Phase.TRANSFERRING

    def test_frame_for_other_life_of_decode_is_dropped(self) -> None:
        side = Decode()
        side.offered()
        foreign = f.Ended(**(about(sender=PREFILL) | {"attempt": f.AttemptId("9" * 32, 1)}), cause="", settled=True)
        assert names(side.receive(foreign)) == []
        assert side.status[1].phase is Phase.TRANSFERRING

    def test_result_of_ended_attempt_is_acknowledged(self) -> None:
        side = Decode()
        effects = side.receive(ended(5))
        assert (names(effects), ignored(effects)) == (["Ack"], ["stale"])


class TestQueues:
    def test_opened_attempt_is_in_no_public_queue(self) -> None:
        side = Decode(linked=False)
        queues = side.machine.queues
        side.open()
        assert queues.count("decode_transfer") == 1
        side.link()
        assert (queues.count("decode_transfer"), queues.count("opened")) == (0, 1)
        side.offer()
        assert (queues.count("decode_transfer"), queues.count("offered")) == (1, 1)
