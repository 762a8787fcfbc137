"""READ: how hand-offs fail on either side, and whose word gives pages back."""

from dataclasses import replace

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    Drain,
    Fenced,
    Ignored,
    Linked,
    PeerLost,
    PeerReady,
    Shutdown,
    StopReading,
    Unreachable,
    WriteResult,
)
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.read import computed, receiving, said, sending
from tests.unit.protocol.sides import (
    DECODE,
    DECODE_2,
    PREFILL,
    PREFILL_2,
    TIMING,
    DecodeRead,
    PrefillRead,
    about,
    ids,
    names,
    reads,
    sent,
)

# --- Failures ---


@pytest.mark.parametrize("stage", ["waiting", "ready", "sending"])
def test_prefill_ends_what_decode_has_not_been_told_of_and_asks_about_the_rest(stage: str) -> None:
    side = PrefillRead()
    side.request()
    if stage != "waiting":
        side.opened()
    if stage == "sending":
        side.send()
    effects = side.abort()
    assert names(effects) == {"waiting": [], "ready": ["Drained"], "sending": ["Abort"]}[stage]
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.ABORTED, stage != "sending")


def test_time_alone_never_releases_pages_that_decode_was_told_of() -> None:
    side = sending()
    side.abort()
    repeated = side.wait(10_000)
    assert set(names(repeated)) == {"Abort"}
    assert not side.status[1].releasable
    assert len(side.machine.held()) == 1
    assert names(side.hear(said(f.Drained))) == ["Ack"]
    assert side.status[1].releasable
    side.wait(100)
    assert side.machine.rows == 0


def test_a_failure_of_decode_with_reads_in_flight_releases_nothing_until_it_has_drained() -> None:
    side = sending()
    side.hear(said(f.Failed))
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_ABORTED, False)
    side.hear(said(f.Drained))
    assert side.status[1].releasable


def test_a_late_done_turns_no_failure_into_success() -> None:
    side = sending()
    side.abort()
    assert names(side.hear(said(f.Done))) == ["Ack"]
    assert (side.status[1].phase, side.status[1].cause, side.status[1].releasable) == (
        Phase.FAILED,
        Cause.ABORTED,
        True,
    )


def test_done_before_the_last_pages_is_no_success() -> None:
    side = PrefillRead()
    side.request()
    side.opened()
    side.send(pages=(4,), last=False)
    side.hear(said(f.Done))
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.INVALID, True)


def test_an_abort_of_decode_stops_its_reads_drains_and_only_then_says_drained() -> None:
    side, read = receiving()
    effects = side.abort()
    assert StopReading(read.attempt, PREFILL) in effects
    assert names(effects) == ["Failed"]
    assert not side.status[1].releasable
    (drained,) = sent(side.landed(read, WriteResult.STOPPED))
    assert (type(drained), drained.request_id, drained.part, drained.parts) == (f.Drained, "r", 0, 1)
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.ABORTED, True)
    assert set(names(side.wait(10))) == {"Drained"}


@pytest.mark.parametrize("stage", ["opening", "accepted", "receiving"])
def test_an_abort_of_prefill_is_answered_by_drained_once_nothing_is_read(stage: str) -> None:
    side = DecodeRead()
    side.open()
    if stage != "opening":
        side.hear(said(f.Accepted, sender=PREFILL))
    read = reads(side.hear(computed()))[0] if stage == "receiving" else None
    effects = side.hear(said(f.Abort, sender=PREFILL))
    if read is not None:
        assert names(effects) == ["Failed"]
        effects = side.landed(read)
    assert names(effects) == ["Drained"]
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_ABORTED, True)
    assert names(side.hear(said(f.Abort, sender=PREFILL))) == ["Drained"]


@pytest.mark.parametrize("result", [WriteResult.FAILED, WriteResult.INVALID])
def test_a_failed_read_ends_the_attempt_once_the_others_have_settled(result: WriteResult) -> None:
    side = DecodeRead()
    side.open()
    (one,) = reads(side.hear(computed(pages=(4,), last=False)))
    (two,) = reads(side.hear(computed(sequence=1, start=1, pages=(5,))))
    assert names(side.landed(one, result, "no route")) == ["Failed"]
    assert (side.status[1].message, side.status[1].releasable) == ("no route", False)
    assert names(side.landed(two)) == ["Drained"]
    assert side.status[1].releasable
    assert side.status[1].cause is (Cause.INVALID if result is WriteResult.INVALID else Cause.TRANSFER_FAILED)


def test_an_unsettled_read_holds_pages_of_both_sides_until_a_fence() -> None:
    side, read = receiving()
    assert names(side.landed(read, WriteResult.UNSETTLED)) == ["Failed"]
    assert "Drained" not in names(side.wait(10_000))
    assert names(side.hear(said(f.Abort, sender=PREFILL))) == ["Failed"]
    assert (len(side.machine.held()), side.status[1].releasable) == (1, False)
    assert names(side.do(Fenced(PREFILL, "kubelet"))) == [], "there is nobody left to tell"
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.TRANSFER_FAILED, True)


@pytest.mark.parametrize("result", [WriteResult.LANDED, WriteResult.UNSETTLED])
@pytest.mark.parametrize("held", [False, True])
def test_a_fence_of_prefill_does_not_free_pages_into_which_our_own_read_still_writes(held: bool, result) -> None:
    side, read = receiving()
    if held:
        side.abort()
        side.wait(TIMING.drain_s + 1)
    side.do(Fenced(PREFILL, "kubelet"))
    assert side.status[1].phase is Phase.FAILED
    assert not side.status[1].releasable
    side.wait(10_000)
    assert not side.status[1].releasable
    side.landed(read, result)
    assert side.status[1].releasable, "what comes from it is over: so it was proved"
    assert side.machine.held() == []


def test_a_read_that_does_not_end_becomes_a_hold_and_ends_it_when_it_does() -> None:
    side, read = receiving()
    side.abort()
    side.wait(TIMING.drain_s + 1)
    assert len(side.machine.held()) == 1
    assert names(side.landed(read)) == ["Drained"]
    assert side.status[1].releasable


def test_a_source_that_fails_stops_the_reads_from_the_others_and_each_hears_of_it_when_it_is_quiet() -> None:
    side = DecodeRead(TIMING, (PREFILL, PREFILL_2))
    side.open()
    (mine,) = reads(side.hear(computed()))
    (theirs,) = reads(side.hear(computed(sender=PREFILL_2, aux_slot=-1)))
    effects = side.landed(mine, WriteResult.FAILED)
    said_to = {effect.peer: type(effect.frame) for effect in effects if hasattr(effect, "frame")}
    assert said_to == {PREFILL: f.Drained, PREFILL_2: f.Failed}
    effects = side.landed(theirs, WriteResult.STOPPED)
    assert [(effect.peer, type(effect.frame)) for effect in effects if hasattr(effect, "frame")] == [
        (PREFILL_2, f.Drained)
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"start": 1, "pages": (4,)}, "from 1, the next is 0"),
        ({"pages": (4, 5, 6)}, "up to 3"),
        ({"pages": (4,)}, "up to 1, the last"),
        ({"pages": (4,), "last": False, "aux_slot": 2}, "aux row 2"),
        ({"state": ids(1)}, "1 state items; decode wants 0"),
        ({"pages": (4,), "last": False, "state": ids(1)}, "before the last pages"),
    ],
)
def test_announcements_that_do_not_fit_read_nothing_and_end_the_attempt(change: dict, why: str) -> None:
    side = DecodeRead()
    side.open()
    effects = side.hear(computed(**change))
    assert (reads(effects), names(effects)) == ([], ["Drained"])
    assert (side.status[1].cause, why in side.status[1].message) == (Cause.INVALID, True)


@pytest.mark.parametrize("change", [{"pages": (1, 2, 3)}, {"pages": (1,)}, {"state": (1,)}])
def test_sends_that_do_not_fit_what_decode_asked_for_are_never_announced(change: dict) -> None:
    side = PrefillRead()
    side.request()
    side.opened()
    assert names(side.send(**change)) == ["Drained"]
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.INVALID, True)


# --- Halves that never meet ---


def test_an_attempt_that_ended_before_prefill_saw_it_ends_the_waiting_request() -> None:
    side = PrefillRead()
    side.request()
    assert names(side.hear(said(f.Drained))) == ["Ack"]
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_ABORTED, True)
    assert names(side.opened()) == ["Ack"]
    side.request(2)
    side.opened(2)
    assert side.status[2].phase is Phase.READY


def test_an_attempt_that_ended_before_its_request_came_ends_that_request_and_no_later_one() -> None:
    side = PrefillRead()
    side.hear(said(f.Drained))
    side.request()
    assert side.status[1].cause is Cause.PEER_ABORTED
    side.request(2)
    side.opened(2)
    assert side.status[2].phase is Phase.READY


def test_an_attempt_that_failed_before_pairing_is_free_at_once_and_told_of_later() -> None:
    side = DecodeRead(linked=False)
    side.open()
    side.abort()
    assert side.status[1].releasable
    (drained,) = sent(side.link(), f.Drained)
    assert (drained.request_id, drained.cause) == ("r", "aborted")
    side.hear(said(f.Ack, sender=PREFILL))
    side.wait(TIMING.acked_s + 1)
    assert side.machine.rows == 0


def test_an_attempt_that_nobody_can_be_told_of_is_forgotten_by_its_deadline() -> None:
    side = DecodeRead(linked=False)
    side.open()
    side.abort()
    side.wait(30.0)
    assert side.machine.rows == 0


def test_an_unreachable_prefill_fails_what_waits_for_it() -> None:
    side = DecodeRead(linked=False)
    side.open()
    side.do(Unreachable("p:1", Cause.PEER_LOST, "connection refused"))
    assert (side.status[1].cause, side.status[1].releasable, side.machine.rows) == (Cause.PEER_LOST, True, 0)


def test_a_refusal_of_prefill_ends_the_attempt_which_need_not_be_said_back() -> None:
    side = DecodeRead()
    side.open()
    assert names(side.hear(said(f.Drained, sender=PREFILL, cause="refused", message="full"))) == ["Ack"]
    assert (side.status[1].cause, side.status[1].message) == (Cause.REFUSED, "full")
    assert side.machine.rows == 0


@pytest.mark.parametrize("stage", ["connecting", "opening", "accepted", "receiving"])
def test_every_stage_of_decode_has_a_deadline_and_prefill_is_told(stage: str) -> None:
    side = DecodeRead(linked=stage != "connecting")
    side.open()
    if stage in ("accepted", "receiving"):
        side.hear(said(f.Accepted, sender=PREFILL))
    if stage == "receiving":
        side.hear(computed())
    side.wait(31)
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.TIMED_OUT, stage != "receiving")
    told = sent(side.effects, f.Failed) if stage == "receiving" else sent(side.effects, f.Drained)
    assert bool(told) == (stage != "connecting")


@pytest.mark.parametrize("stage", ["waiting", "parked", "ready", "sending"])
def test_every_stage_of_prefill_has_a_deadline_and_decode_is_told(stage: str) -> None:
    side = PrefillRead()
    if stage != "parked":
        side.request()
    if stage != "waiting":
        side.opened()
    if stage == "sending":
        side.send()
    side.wait(61)
    told = {f.Drained: sent(side.effects, f.Drained), f.Abort: sent(side.effects, f.Abort)}
    assert bool(told[f.Abort]) == (stage == "sending")
    assert bool(told[f.Drained]) == (stage in ("parked", "ready"))
    if stage != "parked":
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.TIMED_OUT, stage != "sending")


# --- Peers ---


def test_a_lost_decode_may_still_read_until_it_is_fenced() -> None:
    side = sending()
    side.do(PeerLost(DECODE, "connection ended"))
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, False)
    assert len(side.machine.held()) == 1
    side.do(Fenced(DECODE_2, "kubelet"))
    assert not side.status[1].releasable
    side.do(Fenced(DECODE, "kubelet"))
    assert side.status[1].releasable


def test_a_decode_that_comes_back_is_asked_at_once_and_its_word_ends_the_hold() -> None:
    side = sending()
    side.do(PeerLost(DECODE, "connection ended"))
    assert names(side.do(PeerReady(DECODE, f.VERSION_MAX))) == ["Abort"]
    side.hear(said(f.Drained))
    assert side.status[1].releasable


def test_a_lost_prefill_holds_none_of_decodes_pages_once_its_own_reads_have_ended() -> None:
    side, read = receiving()
    side.do(PeerLost(PREFILL, "connection ended"))
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_LOST, False)
    side.landed(read, WriteResult.FAILED)
    assert side.status[1].releasable


def test_a_prefill_that_lost_the_connection_is_owed_decodes_word_until_it_has_it() -> None:
    side, read = receiving()
    side.do(PeerLost(PREFILL, "connection ended"))
    side.landed(read, WriteResult.FAILED)
    assert side.machine.holds_for("p:1")
    side.link()
    assert set(names(side.wait(2))) == {"Drained"}
    side.hear(said(f.Ack, sender=PREFILL))
    side.wait(TIMING.acked_s + 1)
    assert not side.machine.holds_for("p:1")
    assert side.machine.rows == 0


def test_addresses_of_lost_prefills_are_forgotten_with_the_last_word_owed_to_them() -> None:
    side, read = receiving()
    side.landed(read)
    side.do(PeerLost(PREFILL, "connection ended"))
    side.wait(TIMING.verdict_s + 1)
    assert side.machine._behind == {}


def test_a_source_that_has_been_read_may_be_lost() -> None:
    side = DecodeRead(TIMING, (PREFILL, PREFILL_2))
    side.open()
    (mine,) = reads(side.hear(computed()))
    side.landed(mine)
    side.do(PeerLost(PREFILL, "connection ended"))
    assert side.status[1].cause is None
    (theirs,) = reads(side.hear(computed(sender=PREFILL_2, aux_slot=-1)))
    side.landed(theirs)
    assert side.status[1].phase is Phase.DONE


def test_strangers_and_mix_ups_change_nothing() -> None:
    side, _ = receiving()
    side.do(PeerReady(PREFILL_2, f.VERSION_MAX))
    for frame, reason in [
        (said(f.Abort, sender=PREFILL_2), "stranger"),
        (f.Abort(**about(1, sender=PREFILL, room=8), cause="aborted", message="", request_id="r"), "mismatch"),
        (said(f.Done, sender=PREFILL), "direction"),
    ]:
        assert [effect.reason for effect in side.hear(frame) if isinstance(effect, Ignored)] == [reason]
    assert side.status[1].phase is Phase.TRANSFERRING
    other = sending()
    assert [e.reason for e in other.hear(said(f.Fetching, taken=7)) if isinstance(e, Ignored)] == ["stale"]
    assert names(other.wait(1))[0] == "Computed"


def test_draining_and_shutdown_tell_the_other_side() -> None:
    side = PrefillRead()
    side.opened()
    assert names(side.do(Drain())) == ["Drained"]
    busy = sending()
    assert names(busy.do(Shutdown())) == ["Abort"]
    decode, _ = receiving()
    assert names(decode.do(Shutdown())) == ["Failed"]


def test_a_full_table_of_ends_refuses_new_attempts() -> None:
    side = DecodeRead(replace(TIMING, max_tombstones=8))
    for number in range(1, 5):
        side.open(number, room=number)
        side.abort(number)
    side.open(5, room=5)
    assert (side.status[5].cause, "remembers as many" in side.status[5].message) == (Cause.REFUSED, True)
    side.wait(TIMING.verdict_s + 1)
    side.open(6, room=6)
    assert side.status[6].phase is Phase.WAITING


def test_a_request_opened_again_supersedes_and_waits_for_the_reads_of_the_first() -> None:
    side = sending()
    effects = side.opened(2)
    assert names(effects) == ["Abort", "Accepted"]
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.SUPERSEDED, False)
    side.hear(said(f.Drained))
    assert side.status[1].releasable
    side.request(2)
    assert side.status[2].phase is Phase.READY


def test_where_a_prefill_that_was_fenced_had_its_address_is_not_kept() -> None:
    side = DecodeRead()
    side.do(Fenced(PREFILL, "pod deleted"))
    side.do(Linked("p:1", side.writers))
    assert not side.machine._behind
