"""Decode's machine: opening, several writers, ends, and when pages may be given back."""

from dataclasses import replace

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    Connect,
    Drain,
    Fenced,
    Ignored,
    Linked,
    OpenAttempt,
    PeerLost,
    PeerReady,
    Report,
    Shutdown,
    Unlinked,
    Unreachable,
    Writer,
)
from pdpool_connector.protocol.machine import MAX_FENCED
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.sides import PREFILL, PREFILL_2, TIMING, Decode, DecodeRead, about, ids, names, sent


def said(kind: type[f.Frame], number: int = 1, *, sender: str = PREFILL, **fields: object) -> f.Frame:
    defaults: dict[type[f.Frame], dict[str, object]] = {
        f.Done: {"bytes_moved": 10},
        f.Failed: {"cause": "transfer_failed", "message": "link down"},
        f.Drained: {"cause": "transfer_failed", "message": "link down"},
    }
    return kind(**about(number, sender=sender), **(defaults.get(kind, {}) | fields))


def test_a_hand_off_costs_decode_two_frames() -> None:
    side = Decode()
    side.open()
    side.hear(said(f.Accepted))
    assert side.status[1].phase is Phase.WAITING
    side.hear(said(f.Done))
    assert (side.status[1].phase, side.status[1].bytes_moved) == (Phase.DONE, 10)
    assert side.status[1].releasable
    side.wait(100)
    assert names(side.effects) == ["Open", "Ack"]
    assert side.machine.rows == 0


def test_pages_are_offered_once_prefill_is_paired() -> None:
    side = Decode(linked=False)
    assert side.open()[-1] == Connect("p:1")
    (frame,) = sent(side.link(), f.Open)
    assert (frame.pages, frame.aux_slot, frame.room, frame.request_id) == (ids(8, 9), 3, 7, "r")


def test_state_items_are_offered_with_the_pages() -> None:
    side = Decode()
    (frame,) = sent(side.open(state=(50, 51)), f.Open)
    assert frame.state == ids(50, 51)


def test_open_is_repeated_with_what_is_left_of_its_life() -> None:
    side = Decode()
    side.open()
    repeated = sent(side.wait(4), f.Open)
    assert 4 < len(repeated) < 9
    assert repeated[-1].deadline_s == pytest.approx(30 - side.now, abs=2.1)


def test_a_waiting_attempt_is_asked_after() -> None:
    side = Decode()
    side.open()
    side.hear(said(f.Accepted))
    assert names(side.wait(10)) == ["Query", "Query", "Query"]


def test_sending_shows_as_transferring() -> None:
    side = Decode()
    side.open()
    side.hear(said(f.Sending))
    assert side.status[1].phase is Phase.TRANSFERRING


def test_done_is_acknowledged_each_time_and_counted_once() -> None:
    side = Decode()
    side.open()
    assert names(side.hear(said(f.Done))) == ["Ack"]
    assert names(side.hear(said(f.Done))) == ["Ack"]
    assert side.status[1].bytes_moved == 10


def test_all_writers_must_be_done() -> None:
    side = Decode(TIMING, (PREFILL, PREFILL_2))
    side.open()
    side.hear(said(f.Done))
    side.hear(said(f.Done))
    assert side.status[1].phase is Phase.WAITING
    side.hear(said(f.Done, sender=PREFILL_2))
    assert (side.status[1].phase, side.status[1].bytes_moved) == (Phase.DONE, 20)


def test_pages_are_held_back_until_every_writer_is_quiet() -> None:
    side = Decode(TIMING, (PREFILL, PREFILL_2))
    side.open()
    assert names(side.abort()) == ["Abort", "Abort"]
    side.hear(said(f.Drained))
    side.hear(said(f.Drained))
    assert not side.status[1].releasable
    side.hear(said(f.Done, sender=PREFILL_2))
    assert side.status[1].releasable
    assert side.status[1].cause is Cause.ABORTED


def test_one_writer_failing_ends_the_attempt_and_stops_the_other() -> None:
    side = Decode(TIMING, (PREFILL, PREFILL_2))
    side.open()
    effects = side.hear(said(f.Drained))
    assert [e.peer for e in effects if getattr(e, "frame", None) and isinstance(e.frame, f.Abort)] == [PREFILL_2]
    assert (side.status[1].cause, side.status[1].message) == (Cause.TRANSFER_FAILED, "link down")
    side.hear(said(f.Drained, sender=PREFILL_2, cause="peer_aborted"))
    assert side.status[1].cause is Cause.TRANSFER_FAILED


@pytest.mark.parametrize("stage", ["connecting", "opening", "accepted", "receiving"])
def test_every_stage_has_a_deadline(stage: str) -> None:
    side = Decode(linked=stage != "connecting")
    side.open()
    if stage in ("accepted", "receiving"):
        side.hear(said(f.Accepted))
    if stage == "receiving":
        side.hear(said(f.Sending))
    side.wait(31)
    assert side.status[1].cause is Cause.TIMED_OUT
    assert side.status[1].releasable == (stage == "connecting")


def test_abort_is_repeated_until_the_writer_is_quiet() -> None:
    side = Decode()
    side.open()
    side.abort()
    assert len(sent(side.wait(60), f.Abort)) > 25
    assert not side.status[1].releasable
    side.hear(said(f.Drained))
    assert names(side.wait(60)) == []


def test_time_alone_never_releases_pages() -> None:
    side = Decode()
    side.open()
    side.abort()
    side.wait(10_000)
    assert not side.status[1].releasable
    assert len(side.machine.held()) == 1


def test_a_failure_that_has_not_drained_releases_nothing() -> None:
    side = Decode()
    side.open()
    side.hear(said(f.Failed))
    assert side.status[1].cause is Cause.TRANSFER_FAILED
    assert not side.status[1].releasable
    side.hear(said(f.Drained))
    assert side.status[1].releasable


def test_an_attempt_that_was_never_offered_is_free_at_once_and_still_told_of() -> None:
    side = Decode(linked=False)
    side.open()
    side.abort()
    assert side.status[1].releasable
    (abort,) = sent(side.link(), f.Abort)
    assert (abort.room, abort.request_id) == (7, "r")
    side.hear(said(f.Drained))
    assert side.machine.rows == 0


def test_an_attempt_that_nobody_can_be_told_of_is_forgotten_by_its_deadline() -> None:
    side = Decode(linked=False)
    side.open()
    side.abort()
    side.wait(30.0)
    assert side.machine.rows == 0


def test_an_unreachable_prefill_fails_what_waits_for_it() -> None:
    side = Decode(linked=False)
    side.open()
    side.do(Unreachable("p:1", Cause.PEER_LOST, "connection refused"))
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, True)


def test_what_is_opened_while_a_connection_is_down_meets_whoever_answers_next() -> None:
    side = Decode()
    side.do(Unlinked("p:1"))
    side.open()
    side.do(PeerLost(PREFILL, "it was restarted"))
    assert side.status[1].phase is Phase.WAITING
    side.do(PeerReady(PREFILL_2, f.VERSION_MAX))
    side.do(Linked("p:1", (Writer(PREFILL_2),)))
    assert list(side.machine.under_way(PREFILL_2)), "offered to the process that came after"


def test_a_lost_writer_fails_its_attempts_only_and_holds_their_pages() -> None:
    side = Decode()
    side.do(PeerReady(PREFILL_2, f.VERSION_MAX))
    side.do(Linked("q:1", (Writer(PREFILL_2),)))
    side.open(1)
    side.do(OpenAttempt(2, "q:1", 7, 0, "r", ids(1), 0, 0, 30.0))
    side.do(PeerLost(PREFILL, "connection ended"))
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, False)
    assert side.status[2].phase is Phase.WAITING


def test_a_hold_ends_by_a_fence_of_that_very_process() -> None:
    side = Decode()
    side.open()
    side.do(PeerLost(PREFILL, "connection ended"))
    side.do(Fenced(PREFILL_2, "kubelet"))
    assert not side.status[1].releasable
    side.do(Fenced(PREFILL, "kubelet"))
    assert side.status[1].releasable
    assert side.machine.rows == 0


def test_a_fence_of_a_live_writer_fails_the_attempt_and_frees_it() -> None:
    side = Decode()
    side.open()
    side.do(Fenced(PREFILL, "kubelet"))
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, True)


@pytest.mark.parametrize("kind", [Decode, DecodeRead])
def test_a_fence_before_the_loss_was_noticed_covers_what_is_opened_after_it(kind) -> None:
    side = kind()
    side.do(Fenced(PREFILL, "kubelet"))
    effects = side.open()
    assert (names(effects), [type(e) for e in effects]) == ([], [Report, Connect]), "the fenced are offered nothing"
    side.do(PeerLost(PREFILL, "connection ended"))
    assert side.status[1].phase is Phase.WAITING, "another process may come up at that address"
    side.do(PeerReady(PREFILL_2, f.VERSION_MAX))
    side.do(Linked("p:1", (Writer(PREFILL_2),)))
    assert sent(side.effects, f.Open)[0].attempt.number == 1


@pytest.mark.parametrize("kind", [Decode, DecodeRead])
def test_an_attempt_toward_a_fenced_process_is_refused_at_once(kind) -> None:
    side = kind(linked=False)
    side.do(Fenced(PREFILL, "kubelet"))
    side.open()
    side.link()
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, True)
    assert "was fenced" in side.status[1].message
    assert (side.machine.rows, sent(side.effects, f.Open)) == (0, [])


def test_only_so_many_fences_are_remembered() -> None:
    side = Decode(linked=False)
    for number in range(MAX_FENCED + 10):
        side.do(Fenced(f"{number:032x}", "kubelet"))
    assert not side.machine.fenced(f"{9:032x}")
    assert side.machine.fenced(f"{10:032x}")
    assert side.machine.fenced(f"{MAX_FENCED + 9:032x}")


def test_a_hold_ends_when_the_same_process_is_heard_again() -> None:
    side = Decode()
    side.open()
    side.do(PeerLost(PREFILL, "connection ended"))
    assert side.machine.holds_for("p:1")
    assert names(side.link()) == ["Abort"]
    side.hear(said(f.Drained))
    assert side.status[1].releasable


def test_a_restarted_prefill_does_not_end_the_holds_of_its_former_life() -> None:
    side = Decode()
    side.open()
    side.do(PeerLost(PREFILL, "connection ended"))
    side.do(PeerReady(PREFILL_2, f.VERSION_MAX))
    side.do(Linked("p:1", (Writer(PREFILL_2),)))
    stranger = side.hear(said(f.Drained, sender=PREFILL_2))
    assert [effect.reason for effect in stranger if isinstance(effect, Ignored)] == ["stranger"]
    assert not side.status[1].releasable
    side.open(2)
    side.hear(said(f.Done, 2, sender=PREFILL_2))
    assert side.status[2].phase is Phase.DONE


def test_frames_of_another_life_of_this_decode_are_dropped() -> None:
    side = Decode()
    side.open()
    foreign = f.Done(**(about(1) | {"sender": PREFILL, "attempt": f.AttemptId("9" * 32, 1)}), bytes_moved=1)
    effects = side.hear(foreign)
    assert names(effects) == []
    assert side.status[1].phase is Phase.WAITING


def test_a_late_done_turns_no_failure_into_success() -> None:
    side = Decode()
    side.open()
    side.abort()
    side.hear(said(f.Done))
    assert (side.status[1].phase, side.status[1].cause) == (Phase.FAILED, Cause.ABORTED)
    assert side.status[1].releasable


def test_draining_refuses_new_attempts_and_finishes_the_others() -> None:
    side = Decode()
    side.open(1)
    side.do(Drain())
    side.open(2)
    assert (side.status[2].cause, side.status[2].releasable) == (Cause.REFUSED, True)
    side.hear(said(f.Done))
    assert side.status[1].phase is Phase.DONE


def test_shutdown_tells_every_writer() -> None:
    side = Decode()
    side.open()
    assert names(side.do(Shutdown())) == ["Abort"]
    assert side.status[1].cause is Cause.SHUTDOWN


def test_no_more_attempts_than_the_limit() -> None:
    side = Decode(replace(TIMING, max_attempts=2))
    for handle in (1, 2, 3):
        side.open(handle, room=handle)
    assert side.status[3].cause is Cause.REFUSED
    assert "2 hand-offs" in side.status[3].message


def test_a_cause_that_only_a_newer_peer_knows_still_fails_the_attempt() -> None:
    side = Decode()
    side.open()
    side.hear(said(f.Drained, cause="solar_flare", message="x"))
    assert side.status[1].cause is Cause.TRANSFER_FAILED


@pytest.mark.parametrize("make", [Decode, DecodeRead])
def test_what_a_peer_says_of_a_failure_is_one_line_in_status_and_logs(make) -> None:
    side = make()
    side.open()
    side.hear(said(f.Drained, message="\x1b[2J\nfake line"))
    assert side.status[1].message == "\\x1b[2J\\nfake line"
