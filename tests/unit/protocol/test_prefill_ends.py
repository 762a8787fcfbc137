"""Prefill's machine: ending, and remembering."""

from dataclasses import replace
from itertools import count

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    Drain,
    Fenced,
    Ignored,
    PeerLost,
    PeerReady,
    Shutdown,
    StopWriting,
    WriteResult,
)
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.sides import (
    DECODE,
    DECODE_2,
    TIMING,
    Prefill,
    PrefillRead,
    abort_frame,
    about,
    ack,
    names,
    query,
    sent,
    writes,
)


def test_an_abort_while_writing_stops_drains_and_only_then_says_drained() -> None:
    side = Prefill()
    side.request()
    side.opened()
    (write,) = writes(side.send())
    effects = side.hear(abort_frame())
    assert any(isinstance(effect, StopWriting) for effect in effects)
    assert names(effects) == ["Failed"]
    assert (side.status[1].phase, side.status[1].cause) == (Phase.FAILED, Cause.PEER_ABORTED)
    assert not side.status[1].releasable
    assert names(side.landed(write, WriteResult.STOPPED)) == ["Drained"]
    assert side.status[1].releasable


def test_an_abort_is_answered_again_whenever_it_is_repeated() -> None:
    side = Prefill()
    side.request()
    side.opened()
    assert names(side.hear(abort_frame())) == ["Drained"]
    assert names(side.hear(abort_frame())) == ["Drained"]
    side.hear(ack())
    assert names(side.hear(abort_frame())) == ["Drained"]


def test_an_abort_that_overtakes_its_attempt_is_remembered() -> None:
    side = Prefill()
    assert names(side.hear(abort_frame())) == ["Drained"]
    assert names(side.opened()) == ["Drained"]
    side.request()
    assert side.status[1].cause is Cause.PEER_ABORTED


def test_an_abort_that_overtakes_its_attempt_ends_the_waiting_request() -> None:
    side = Prefill()
    side.request()
    side.hear(abort_frame())
    assert side.status[1].cause is Cause.PEER_ABORTED


def test_an_abort_that_overtakes_its_attempt_ends_no_later_request_in_the_room() -> None:
    side = Prefill()
    side.request(1, rid="first")
    side.hear(abort_frame(1, rid="first"))
    side.opened(2, request_id="second")
    side.request(2, rid="second")
    assert side.status[2].phase is Phase.READY


def test_an_attempt_aborted_before_its_request_fails_that_request_and_no_later_one() -> None:
    side = Prefill()
    side.opened(1, request_id="d1")
    side.hear(abort_frame(1, rid="d1"))
    side.request(1, rid="p1")
    assert side.status[1].cause is Cause.PEER_ABORTED
    side.request(2, rid="p2")
    side.opened(2, request_id="d2")
    assert side.status[2].phase is Phase.READY


def test_equal_request_ids_are_better_evidence_than_order() -> None:
    side = Prefill()
    side.opened(1, request_id="first")
    side.hear(abort_frame(1, rid="first"))
    side.opened(2, request_id="second")
    side.request(1, rid="second")
    assert side.status[1].phase is Phase.READY


def test_a_request_aborted_before_its_attempt_fails_that_attempt() -> None:
    side = Prefill()
    side.request()
    side.abort()
    assert side.status[1].releasable
    (drained,) = sent(side.opened(), f.Drained)
    assert drained.cause == Cause.ABORTED
    side.request(2)
    side.opened(2)
    assert side.status[2].phase is Phase.READY


def test_an_attempt_whose_request_never_comes_is_told_so_long_before_its_own_deadline() -> None:
    side = Prefill()
    side.opened(deadline_s=300.0)
    assert not sent(side.wait(TIMING.meet_s - 1), f.Drained)
    (drained, *_) = sent(side.wait(2), f.Drained)
    assert (drained.cause, "never came" in drained.message) == (Cause.TIMED_OUT, True)


def test_a_request_that_came_in_time_has_its_own_deadline() -> None:
    side = Prefill()
    side.opened(deadline_s=300.0)
    side.request(deadline_s=200.0)
    side.wait(TIMING.meet_s + 1)
    assert side.status[1].phase is Phase.READY


def test_requests_that_only_expire_are_no_progress() -> None:
    side = Prefill()
    side.request(1, room=7, deadline_s=5)
    side.request(2, room=8, rid="b")
    side.opened(2, room=8, request_id="b")
    side.wait(6)
    assert side.machine.census.went_on("prefill_bootstrap") == 0
    side.send(2)
    assert side.machine.census.went_on("prefill_bootstrap") == 1


def test_draining_refuses_attempts_whose_request_can_come_no_more_and_finishes_the_others() -> None:
    side = Prefill()
    side.opened(1, room=7)
    side.request(2, room=8, rid="b")
    side.opened(2, room=8, request_id="b")
    (drained,) = sent(side.do(Drain()), f.Drained)
    assert (drained.room, drained.cause) == (7, Cause.REFUSED)
    assert names(side.landed(writes(side.send(2))[0])) == ["Done"]


def test_a_late_open_of_a_concluded_attempt_changes_nothing() -> None:
    side = Prefill()
    side.request()
    side.opened()
    side.landed(writes(side.send())[0])
    side.hear(ack())
    side.request(2)
    assert names(side.opened()) == ["Done"]
    assert side.status[2].phase is Phase.WAITING
    side.wait(TIMING.acked_s + 1)
    (drained,) = sent(side.opened(), f.Drained)
    assert drained.cause == Cause.REFUSED
    assert side.status[2].phase is Phase.WAITING


def test_a_late_abort_of_a_forgotten_attempt_spares_the_next_request_in_the_room() -> None:
    side = Prefill()
    side.request()
    side.opened()
    side.landed(writes(side.send())[0])
    side.hear(ack())
    side.wait(TIMING.acked_s + 1)
    side.request(2)
    assert names(side.hear(abort_frame())) == ["Drained"]
    assert side.status[2].phase is Phase.WAITING


def test_the_end_is_repeated_with_back_off_until_acknowledged() -> None:
    side = Prefill()
    side.request()
    side.opened()
    side.landed(writes(side.send())[0])
    repeated = names(side.wait(10))
    assert 5 < len(repeated) < 12
    assert set(repeated) == {"Done"}
    side.hear(ack())
    assert names(side.wait(30)) == []


def test_an_acknowledgement_for_another_attempt_or_from_another_decode_stops_nothing() -> None:
    side = Prefill(TIMING, DECODE, DECODE_2)
    side.request()
    side.opened()
    side.landed(writes(side.send())[0])
    side.hear(ack(2))
    stranger = f.Ack(**(about(1) | {"sender": DECODE_2}))
    assert isinstance(side.hear(stranger)[0], Ignored)
    assert names(side.wait(1)) != []


@pytest.mark.parametrize("result", [WriteResult.FAILED, WriteResult.INVALID])
def test_a_failed_write_ends_the_attempt_once_the_others_have_settled(result: WriteResult) -> None:
    side = Prefill()
    side.request()
    side.opened()
    one = writes(side.send(pages=(4,), last=False))[0]
    two = writes(side.send(pages=(5,), start=1))[0]
    assert names(side.landed(one, result, "no route")) == ["Failed"]
    assert side.status[1].message == "no route"
    assert not side.status[1].releasable
    assert names(side.landed(two)) == ["Drained"]
    assert side.status[1].releasable
    assert side.status[1].cause is (Cause.INVALID if result is WriteResult.INVALID else Cause.TRANSFER_FAILED)


def test_an_unsettled_write_is_never_called_drained_before_a_fence() -> None:
    side = Prefill()
    side.request()
    side.opened()
    effects = side.landed(writes(side.send())[0], WriteResult.UNSETTLED)
    assert names(effects) == ["Failed"]
    assert "Drained" not in names(side.wait(10_000))
    assert not side.status[1].releasable
    assert len(side.machine.held()) == 1
    assert names(side.do(Fenced(DECODE, "kubelet"))) == [], "there is nobody left to tell"
    assert side.status[1].releasable
    assert side.status[1].cause is Cause.TRANSFER_FAILED


@pytest.mark.parametrize("kind", [Prefill, PrefillRead])
def test_a_decode_that_was_fenced_opens_nothing_any_more(kind) -> None:
    side = kind()
    side.request()
    side.do(Fenced(DECODE, "kubelet"))
    (ignored,) = side.opened()
    assert ignored.reason == "unpaired"
    (ignored,) = side.do(PeerReady(DECODE, f.VERSION_MAX))
    assert ignored.reason == "fenced"
    side.opened()
    assert side.status[1].phase is Phase.WAITING


def test_a_write_that_does_not_end_becomes_a_hold_and_ends_it_when_it_does() -> None:
    side = Prefill()
    side.request()
    side.opened()
    (write,) = writes(side.send())
    side.abort()
    side.wait(TIMING.drain_s + 1)
    assert len(side.machine.held()) == 1
    side.wait(10_000)
    assert not side.status[1].releasable
    assert names(side.landed(write)) == ["Drained"]
    assert side.status[1].releasable


@pytest.mark.parametrize("stage", ["waiting", "ready", "sending"])
def test_every_stage_has_a_deadline_and_the_peer_is_told(stage: str) -> None:
    side = Prefill()
    side.request()
    if stage != "waiting":
        side.opened()
    if stage == "sending":
        side.send(pages=(4,), last=False)
    side.wait(31)
    assert side.status[1].cause is Cause.TIMED_OUT
    told = {"waiting": [], "ready": ["Drained"], "sending": ["Failed"]}[stage]
    assert names(side.effects)[-1:] == told[-1:] or told[0] in names(side.effects)


def test_an_attempt_whose_request_never_comes_ends_at_its_deadline() -> None:
    side = Prefill()
    side.opened(deadline_s=5.0)
    (drained, *_) = sent(side.wait(6), f.Drained)
    assert drained.cause == Cause.TIMED_OUT


def test_losing_a_peer_fails_its_attempts_only() -> None:
    side = Prefill(TIMING, DECODE, DECODE_2)
    side.request(1, room=1)
    side.request(2, room=2)
    side.opened(1, room=1)
    side.opened(1, room=2, peer=DECODE_2)
    side.do(PeerLost(DECODE, "connection ended"))
    assert side.status[1].cause is Cause.PEER_LOST
    assert side.status[1].releasable
    assert side.status[2].phase is Phase.READY


def test_a_peer_that_comes_back_learns_the_verdict_by_asking() -> None:
    side = Prefill()
    side.request()
    side.opened()
    side.do(PeerLost(DECODE, "connection ended"))
    assert sent(side.hear(query())) == []
    side.do(PeerReady(DECODE, f.VERSION_MAX))
    (drained,) = sent(side.hear(query()), f.Drained)
    assert drained.cause == Cause.PEER_LOST


def test_a_query_is_answered_in_every_state_and_for_the_unknown() -> None:
    side = Prefill()
    side.opened()
    assert names(side.hear(query())) == ["Accepted"]
    side.request()
    assert names(side.hear(query())) == ["Accepted"]
    (write,) = writes(side.send())
    assert names(side.hear(query())) == ["Sending"]
    side.landed(write)
    assert names(side.hear(query())) == ["Done"]
    (drained,) = sent(side.hear(query(99)), f.Drained)
    assert drained.cause == Cause.FORGOTTEN


def test_frames_that_mix_attempts_up_are_dropped() -> None:
    side = Prefill()
    side.request()
    side.opened()
    wrong_room = side.hear(abort_frame(room=8))
    assert [effect.reason for effect in wrong_room if isinstance(effect, Ignored)] == ["mismatch"]
    unpaired = side.hear(abort_frame(sender=DECODE_2))
    assert [effect.reason for effect in unpaired if isinstance(effect, Ignored)] == ["unpaired"]
    assert side.status[1].phase is Phase.READY


def test_draining_finishes_what_is_known_and_refuses_what_is_new() -> None:
    side = Prefill()
    side.request(1, room=1)
    side.do(Drain())
    side.opened(1, room=1)
    assert side.status[1].phase is Phase.READY
    side.request(2, room=2)
    assert side.status[2].cause is Cause.REFUSED
    (drained,) = sent(side.opened(2, room=2), f.Drained)
    assert drained.cause == Cause.REFUSED


def test_shutdown_fails_everything_and_tells_decode() -> None:
    side = Prefill()
    side.request(1, room=1)
    side.request(2, room=2)
    side.opened(1, room=1)
    assert names(side.do(Shutdown())) == ["Drained"]
    assert {status.cause for status in side.status.values()} == {Cause.SHUTDOWN}


def test_a_full_graveyard_refuses_new_attempts_and_resurrects_none() -> None:
    side = Prefill(replace(TIMING, max_tombstones=8))
    for number in range(4):
        side.request(number, room=number)
        side.opened(number, room=number)
        side.landed(writes(side.send(number))[0])
    side.request(9, room=9)
    (refused,) = sent(side.opened(9, room=9), f.Drained)
    assert "remembers as many" in refused.message
    side.wait(TIMING.verdict_s + 1)
    side.request(10, room=9)
    (stale,) = sent(side.opened(9, room=9), f.Drained)
    assert "already forgotten" in stale.message
    assert side.status[10].phase is Phase.WAITING
    side.opened(10, room=9)
    assert side.status[10].phase is Phase.READY


def test_a_request_whose_attempt_finds_no_room_ends_with_it() -> None:
    side = Prefill(replace(TIMING, max_tombstones=2))
    side.hear(abort_frame(1, room=1))
    before = side.machine.rows
    side.request(1, room=2)
    side.opened(2, room=2)
    assert side.status[1].cause is Cause.REFUSED
    assert side.machine.rows == before
    side.opened(3, room=3)
    side.request(2, room=3)
    assert side.status[2].cause is Cause.REFUSED


def test_one_peer_takes_no_more_than_half_of_the_attempts() -> None:
    side = Prefill(replace(TIMING, max_attempts=4), DECODE, DECODE_2)
    for number in range(3):
        side.opened(number, room=number)
    assert names(side.effects) == ["Accepted", "Accepted", "Drained"]
    assert names(side.opened(1, room=9, peer=DECODE_2)) == ["Accepted"]


def test_a_failure_is_reported_once_with_its_root_cause() -> None:
    side = Prefill()
    side.request()
    side.opened()
    (write,) = writes(side.send())
    side.landed(write, WriteResult.FAILED, "link down")
    side.abort()
    side.hear(abort_frame())
    side.do(PeerLost(DECODE, "gone"))
    side.wait(100)
    assert (side.status[1].cause, side.status[1].message) == (Cause.TRANSFER_FAILED, "link down")


@pytest.mark.parametrize("kind", [Prefill, PrefillRead])
def test_refusals_take_no_room_from_the_ends_of_what_is_under_way(kind) -> None:
    side = kind(replace(TIMING, max_tombstones=8))
    for number in range(1, 20):
        side.opened(number, room=number)
    for number in range(20, 40):
        side.opened(number, room=1, request_id="another")
    side.request(1, room=1)
    side.abort(1)
    assert "Drained" in names(side.effects), "said at once"
    told = [frame for frame in sent(side.wait(10.0), f.Drained) if frame.attempt.number == 1]
    assert len(told) > 3, "and again, for nobody has acknowledged it"
    assert {frame.cause for frame in sent(side.hear(f.Query(**about(1, room=1))), f.Drained)} == {Cause.ABORTED}


@pytest.mark.parametrize("kind", [Prefill, PrefillRead])
@pytest.mark.parametrize("after", [[], [PeerLost(DECODE, "gone")], [PeerLost(DECODE, "gone"), PeerReady(DECODE, 4)]])
def test_nothing_of_a_fenced_decode_is_kept_for_ever(kind, after) -> None:
    side = kind()
    side.opened(1)
    side.do(Fenced(DECODE, "pod deleted"))
    for event in after:
        side.do(event)
    side.wait(3 * TIMING.verdict_s)
    assert not side.machine._graves.stale(f.AttemptId(DECODE, 1)), "no floor is left either"
    assert side.machine.next_deadline is None


@pytest.mark.parametrize("kind", [Prefill, PrefillRead])
def test_the_ids_that_decodes_have_offered_are_bounded_in_all_and_for_each(kind) -> None:
    third = "f" * 32
    side = kind(replace(TIMING, max_offered_bytes=4000), DECODE, DECODE_2, third)

    def offer(peer: str) -> list[str]:
        number = next(numbers)
        whose = {"sender": peer, "attempt": f.AttemptId(peer, number), "room": number}
        return names(side.opened(**whose, pages=bytes(400), state=bytes(400)))

    numbers = count(1)
    assert [offer(DECODE) for _ in range(3)] == [["Accepted"], ["Accepted"], ["Drained"]]
    assert "as many ids" in sent(side.effects, f.Drained)[0].message
    assert [offer(DECODE_2) for _ in range(3)] == [["Accepted"], ["Accepted"], ["Drained"]]
    assert [offer(third) for _ in range(2)] == [["Accepted"], ["Drained"]], "five of 800 in 4000"
    side.do(PeerLost(DECODE, "gone"))
    assert [offer(third) for _ in range(2)] == [["Accepted"], ["Drained"]], "two of 800 in its half"
    side.wait(TIMING.meet_s + 1)
    assert [offer(DECODE_2) for _ in range(3)] == [["Accepted"], ["Accepted"], ["Drained"]]
