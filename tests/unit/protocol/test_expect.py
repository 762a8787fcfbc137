"""What decode says of requests that it has not opened, and what becomes of them: lost decodes, refusals, silence."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    Connect,
    Drain,
    ExpectAttempt,
    Fenced,
    Linked,
    OpenAttempt,
    OpenRequest,
    PeerLost,
    PeerReady,
    Shutdown,
    Unlinked,
    Writer,
)
from pdpool_connector.protocol.missed import PER_PLACE
from pdpool_connector.protocol.status import Cause, Phase
from pdpool_connector.protocol.timeouts import Timeouts

from tests.unit.protocol.sides import (
    DECODE,
    DECODE_2,
    PREFILL,
    PREFILL_2,
    Decode,
    DecodeRead,
    Prefill,
    PrefillRead,
    about,
    names,
    sent,
)

PREFILLS = pytest.mark.parametrize("make", [Prefill, PrefillRead])
DECODES = pytest.mark.parametrize("make", [Decode, DecodeRead])
WITHIN = Timeouts(expected_within_s=5.0, expect_s=2.0)
SMALL = Timeouts(max_attempts=4)
GONE = "decode is gone"


def expect_frame(number: int = 1, *, peer: str = DECODE, room: int = 7, rid: str = "r", **changes: object) -> f.Expect:
    fields = {"request_id": rid, "deadline_s": 30.0} | changes
    return f.Expect(**about(number, sender=peer, room=room), **fields)


def expect(handle: int = 1, *, room: int = 7, rid: str = "r", deadline_s: float = 30.0, prompt: bytes = b""):
    return ExpectAttempt(handle, "p:1", room, 0, rid, deadline_s, prompt)


def refusal(handle: int = 2, *, room: int = 7, rid: str = "r", prompt: bytes = b"") -> OpenAttempt:
    return OpenAttempt(handle, "p:1", room, 0, rid, b"", 0, 0, 30.0, prompt=prompt, refused="no memory")


def ended(side, handle: int = 1):
    status = side.status[handle]
    return (status.phase, status.cause, status.releasable) if handle in side.status else None


LOST = (Phase.FAILED, Cause.PEER_LOST, True)


# --- Prefill: a decode that is lost ---


@PREFILLS
@pytest.mark.parametrize("end", [PeerLost(DECODE, GONE), Fenced(DECODE, GONE)])
def test_a_request_ends_with_the_decode_that_had_it_and_died_before_it_opened_it(make, end) -> None:
    side = make()
    side.request()
    side.hear(expect_frame())
    side.do(end)
    assert ended(side) == LOST
    assert GONE in side.status[1].message


@PREFILLS
def test_one_that_comes_after_its_decode_has_died_ends_at_once(make) -> None:
    side = make()
    side.hear(expect_frame())
    side.do(PeerLost(DECODE, GONE))
    side.request()
    assert ended(side) == LOST


@PREFILLS
def test_only_what_the_lost_decode_alone_had_ends(make) -> None:
    side = make(Timeouts(), DECODE, DECODE_2)
    for handle, room in enumerate((7, 8, 9), start=1):
        side.request(handle, room=room)
    side.hear(expect_frame(1, room=7))
    side.hear(expect_frame(2, room=8))
    side.hear(expect_frame(1, room=8, peer=DECODE_2))
    side.do(PeerLost(DECODE, GONE))
    assert [side.status[handle].phase for handle in (1, 2, 3)] == [Phase.FAILED, Phase.WAITING, Phase.WAITING]
    side.do(PeerLost(DECODE_2, GONE))
    assert [side.status[handle].phase for handle in (2, 3)] == [Phase.FAILED, Phase.WAITING]


@PREFILLS
@pytest.mark.parametrize(("own", "why"), [("", (Cause.PEER_LOST, GONE)), ("enough", (Cause.ABORTED, "enough"))])
def test_a_decode_that_was_only_cut_off_is_told_at_once_why_what_it_had_announced_has_ended(make, own, why) -> None:
    side = make()
    side.request(prompt=b"x")
    side.hear(expect_frame(prompt=b"x"))
    if own:
        side.abort(message=own)
    side.do(PeerLost(DECODE, GONE))
    side.do(PeerReady(DECODE, f.VERSION_MAX))
    (told,) = sent(side.opened(2, prompt=b"x"))
    assert (told.cause, told.message) == why
    side.hear(f.Ack(**about(2)))
    side.wait(2 * side.machine.timing.verdict_s)
    assert side.machine.rows == 0


@PREFILLS
def test_only_the_decode_that_had_announced_it_and_only_that_request_is_told_so(make) -> None:
    side = make(Timeouts(), DECODE, DECODE_2)
    for handle, room in ((1, 7), (2, 8)):
        side.request(handle, room=room)
        side.hear(expect_frame(handle, room=room))
    side.do(PeerLost(DECODE, GONE))
    side.do(PeerReady(DECODE, f.VERSION_MAX))
    side.request(3, room=7)
    side.opened(1, room=7, peer=DECODE_2)
    side.opened(4, room=8, request_id="other")
    side.request(4, room=8, rid="other")
    assert [side.status[handle].phase for handle in (1, 2, 3, 4)] == [Phase.FAILED] * 2 + [Phase.READY] * 2


@PREFILLS
@pytest.mark.parametrize("back_first", [True, False])
@pytest.mark.parametrize("rid", ["r", "made up by prefill's engine"])
def test_both_are_told_at_once_where_the_cut_comes_before_prefill_has_its_half(make, rid, back_first) -> None:
    side = make()
    side.hear(expect_frame(prompt=b"x"))
    side.do(PeerLost(DECODE, GONE))
    if not back_first:
        side.request(rid=rid, prompt=b"x")
        assert ended(side) == LOST
    side.do(PeerReady(DECODE, f.VERSION_MAX))
    side.hear(expect_frame(prompt=b"x"))
    (told,) = sent(side.opened(2, prompt=b"x"))
    assert (told.cause, told.message) == (Cause.PEER_LOST, GONE)
    if back_first:
        side.request(rid=rid, prompt=b"x")
        assert ended(side) == LOST


def give_up(side, number: int, **fields: object) -> None:
    """What decode says of a request that it refuses, or has opened and aborted without prefill hearing of it."""
    kind = f.Drained if isinstance(side, PrefillRead) else f.Abort
    side.hear(kind(**about(number), cause="aborted", message="client left", request_id="r", **fields))


@PREFILLS
@pytest.mark.parametrize("back_first", [True, False])
@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("rid", ["r", "another"])
def test_what_a_decode_gives_up_after_a_cut_had_ended_and_does_not_end_the_next_in_its_room(
    make, back_first, cuts, rid
) -> None:
    side = make()
    if not back_first:
        side.request(prompt=b"x")
    for _ in range(cuts):
        side.hear(expect_frame(prompt=b"x"))
        side.do(PeerLost(DECODE, GONE))
        side.do(PeerReady(DECODE, f.VERSION_MAX))
    if back_first:
        side.request(prompt=b"x")
    assert ended(side) == LOST
    give_up(side, 2, prompt=b"x")
    side.hear(expect_frame(3, rid=rid, prompt=b"x"))
    side.request(2, rid=rid, prompt=b"x")
    side.opened(4, request_id=rid, prompt=b"x")
    assert side.status[2].phase is Phase.READY
    assert len(side.machine._missed) == len(side.machine._parted) == 0


def announced_by_two_of_which_one_is_lost(make):
    side = make(Timeouts(), DECODE, DECODE_2)
    side.request(prompt=b"x")
    for peer in (DECODE, DECODE_2):
        side.hear(expect_frame(1, peer=peer, prompt=b"x"))
    side.do(PeerLost(DECODE, GONE))
    return side


@PREFILLS
@pytest.mark.parametrize("other", ["cut", "killed", "refused"])
def test_a_decode_that_was_cut_off_is_told_also_what_another_had_announced_as_well(make, other) -> None:
    side = announced_by_two_of_which_one_is_lost(make)
    assert side.status[1].phase is Phase.WAITING
    if other == "refused":
        kind = f.Drained if make is PrefillRead else f.Abort
        header = about(2, sender=DECODE_2)
        side.hear(kind(**header, cause="refused", message="no memory", request_id="r", prompt=b"x"))
    else:
        side.do(PeerLost(DECODE_2, GONE) if other == "cut" else Fenced(DECODE_2, GONE))
    assert side.status[1].phase is Phase.FAILED
    side.do(PeerReady(DECODE, f.VERSION_MAX))
    (told,) = sent(side.opened(3, prompt=b"x"))
    assert told.cause is Cause.PEER_LOST


@PREFILLS
def test_a_decode_that_is_back_and_announces_again_what_goes_on_may_still_refuse_it(make) -> None:
    side = announced_by_two_of_which_one_is_lost(make)
    side.do(PeerReady(DECODE, f.VERSION_MAX))
    side.hear(expect_frame(1, prompt=b"x"))
    side.do(PeerLost(DECODE_2, GONE))
    assert side.status[1].phase is Phase.WAITING
    give_up(side, 2, prompt=b"x")
    assert ended(side) == (Phase.FAILED, Cause.PEER_ABORTED, True)


@PREFILLS
@pytest.mark.parametrize("decode_first", [True, False])
def test_a_request_that_is_announced_anew_after_a_cut_is_another_though_it_has_the_same_names(
    make, decode_first
) -> None:
    side = make()
    side.request(prompt=b"x")
    side.hear(expect_frame(1, prompt=b"x"))
    side.do(PeerLost(DECODE, GONE))
    side.do(PeerReady(DECODE, f.VERSION_MAX))
    side.hear(expect_frame(1, prompt=b"x"))
    if not decode_first:
        side.request(2, prompt=b"x")
    side.hear(expect_frame(3, prompt=b"x"))
    side.opened(4, prompt=b"x")
    if decode_first:
        side.request(2, prompt=b"x")
    assert side.status[2].phase is Phase.READY


@PREFILLS
def test_a_decode_that_is_back_in_time_gets_what_another_had_announced_as_well(make) -> None:
    side = announced_by_two_of_which_one_is_lost(make)
    side.do(PeerReady(DECODE, f.VERSION_MAX))
    side.opened(2, prompt=b"x")
    assert side.status[1].phase is Phase.READY


@PREFILLS
def test_one_rank_that_is_back_alone_does_not_bring_back_what_the_other_has_lost(make) -> None:
    side = make(Timeouts(), DECODE, DECODE_2)
    ranks = ((DECODE, 0), (DECODE_2, 1))
    for peer, part in ranks:
        side.hear(expect_frame(peer=peer, part=part, parts=2, prompt=b"x"))
    for peer, _ in ranks:
        side.do(PeerLost(peer, GONE))
    side.do(PeerReady(DECODE, f.VERSION_MAX))
    (told,) = sent(side.opened(2, part=0, parts=2, prompt=b"x"))
    assert told.cause is Cause.PEER_LOST
    side.request(rid="made up by prefill's engine", prompt=b"x")
    assert ended(side) == LOST
    side.do(PeerReady(DECODE_2, f.VERSION_MAX))
    (told,) = sent(side.opened(2, peer=DECODE_2, part=1, parts=2, prompt=b"x"))
    assert told.cause is Cause.PEER_LOST


@PREFILLS
def test_what_is_remembered_for_decodes_that_were_cut_off_is_bounded_half_of_it_for_one(make) -> None:
    side = make(SMALL)
    for number in range(1, 5 * SMALL.max_attempts):
        for peer in (DECODE, DECODE_2):
            side.do(PeerReady(peer, f.VERSION_MAX))
            side.request(number, room=number)
            side.hear(expect_frame(number, room=number, peer=peer))
            side.do(PeerLost(peer, GONE))
        assert len(side.machine._parted) == min(2 * number, SMALL.max_attempts)
    side.wait(2 * SMALL.verdict_s)
    assert side.machine.rows == 0


@PREFILLS
def test_halves_of_other_prompts_are_not_meant(make) -> None:
    side = make()
    side.request(prompt=b"mine")
    side.hear(expect_frame(prompt=b"other"))
    side.do(PeerLost(DECODE, GONE))
    assert side.status[1].phase is Phase.WAITING


@PREFILLS
def test_what_was_opened_is_no_more_expected_by_whoever_opened_it(make) -> None:
    side = make()
    side.hear(expect_frame(1))
    side.opened(2)
    side.request()
    side.send()
    assert len(side.machine._expected) == 0
    assert "stale" in [effect.reason for effect in side.hear(expect_frame(1)) if hasattr(effect, "reason")]
    assert len(side.machine._expected) == 0


@PREFILLS
def test_a_part_that_was_never_opened_is_missed_with_its_rank(make) -> None:
    side = make(Timeouts(), DECODE, DECODE_2)
    side.request()
    side.opened(2, part=0, parts=2)
    side.hear(expect_frame(1, peer=DECODE_2, part=1, parts=2))
    side.do(PeerLost(DECODE_2, GONE))
    assert ended(side) == LOST


@PREFILLS
def test_what_decodes_expect_is_bounded_and_leaves_by_its_deadline(make) -> None:
    side = make(SMALL, DECODE, DECODE_2)
    for number in range(10):
        side.hear(expect_frame(number, room=number, deadline_s=5.0))
        side.hear(expect_frame(number, room=number, deadline_s=9.0, peer=DECODE_2))
    assert len(side.machine._expected) == SMALL.max_attempts
    assert len(side.machine._expected.take(DECODE)) == SMALL.max_attempts // 2
    side.wait(9.0)
    assert side.machine.rows == 0


@PREFILLS
def test_one_decode_alone_gets_half_of_the_room_for_what_decodes_expect(make) -> None:
    side = make(SMALL, DECODE, DECODE_2)
    for number in range(10):
        side.hear(expect_frame(number, room=number))
    assert len(side.machine._expected) == SMALL.max_attempts // 2


@PREFILLS
def test_what_decodes_expect_in_one_room_is_bounded_so_that_its_loss_costs_no_more_than_elsewhere(make) -> None:
    side = make()
    for number in range(1, 3 * PER_PLACE):
        side.hear(expect_frame(number, rid=f"r{number}"))
    assert len(side.machine._expected) == PER_PLACE
    side.hear(expect_frame(3 * PER_PLACE, room=8))
    side.do(PeerLost(DECODE, GONE))
    side.request(1, room=8)
    assert ended(side) == LOST, "another room is none the worse"


@PREFILLS
def test_the_same_word_again_takes_no_more_room(make) -> None:
    side = make()
    side.hear(expect_frame())
    side.hear(expect_frame())
    assert len(side.machine._expected) == 1


@PREFILLS
def test_a_part_learns_of_a_long_proof_that_its_decode_s_other_rank_is_gone_as_much_as_a_frame_carries(make) -> None:
    side = make(Timeouts(), DECODE, DECODE_2)
    side.hear(expect_frame(part=1, parts=2))
    side.do(Fenced(DECODE, "node-1 " * 1000))
    (told,) = sent(side.opened(1, peer=DECODE_2, part=0, parts=2), f.Drained)
    assert f.decode(f.encode(told)).cause == Cause.PEER_LOST


# --- Prefill: silence ---


@PREFILLS
def test_a_request_of_which_no_decode_says_anything_ends_in_time(make) -> None:
    side = make(WITHIN)
    side.request()
    side.wait(4.9)
    assert side.status[1].phase is Phase.WAITING
    side.wait(0.1)
    assert ended(side) == (Phase.FAILED, Cause.TIMED_OUT, True)
    assert side.status[1].message == "no decode engine has announced the request for 5 s"


@PREFILLS
def test_without_that_time_a_request_waits_for_its_own_deadline(make) -> None:
    side = make()
    side.request(deadline_s=300.0)
    side.wait(299.0)
    assert side.status[1].phase is Phase.WAITING


@PREFILLS
@given(pauses=st.lists(st.floats(0.0, 4.9), min_size=1, max_size=8))
def test_a_request_that_decode_goes_on_announcing_waits_for_its_own_deadline(make, pauses) -> None:
    side = make(WITHIN)
    side.request(deadline_s=300.0)
    for pause in pauses:
        side.hear(expect_frame(deadline_s=1.0))  # its row may have gone meanwhile
        side.wait(pause)
        assert side.status[1].phase is Phase.WAITING
    side.wait(5.0)
    assert side.status[1].cause is Cause.TIMED_OUT


@PREFILLS
def test_one_that_was_opened_needs_no_announcing(make) -> None:
    side = make(WITHIN)
    side.request(deadline_s=300.0)
    side.opened()
    side.wait(30.0)
    assert side.status[1].phase is Phase.READY


@PREFILLS
def test_one_whose_decode_came_first_needs_no_announcing(make) -> None:
    side = make(WITHIN)
    side.opened()
    side.request(deadline_s=300.0)
    side.wait(30.0)
    assert side.status[1].phase is Phase.READY


@PREFILLS
def test_while_a_decode_is_paired_that_cannot_announce_silence_says_nothing(make) -> None:
    side = make(WITHIN)
    side.do(PeerReady(DECODE_2, f.EXPECT_VERSION - 1))
    side.request(deadline_s=300.0)
    side.wait(60.0)
    assert side.status[1].phase is Phase.WAITING
    side.do(PeerLost(DECODE_2, GONE))
    side.wait(5.0)
    assert side.status[1].cause is Cause.TIMED_OUT


# --- Decode: announcing ---


@DECODES
def test_a_request_is_announced_at_once_and_again_until_it_is_opened(make) -> None:
    side = make(WITHIN)
    (first,) = sent(side.do(expect()))
    assert (type(first), first.request_id, first.deadline_s) == (f.Expect, "r", 30.0)
    assert [frame.deadline_s for frame in sent(side.wait(5.0))] == [28.0, 26.0]
    side.open(2)
    assert "Expect" not in names(side.wait(20.0))


@DECODES
def test_every_rank_that_it_would_be_opened_at_is_told_as_what_part(make) -> None:
    side = make(WITHIN, (Writer(PREFILL, part=1, parts=2), Writer(PREFILL_2, part=0, parts=3)))
    assert [(frame.part, frame.parts) for frame in sent(side.do(expect()), f.Expect)] == [(1, 2), (0, 3)]


@DECODES
def test_a_prefill_that_is_not_linked_is_told_when_it_is_and_again_after_a_break(make) -> None:
    side = make(WITHIN, linked=False)
    effects = side.do(expect())
    assert Connect("p:1") in effects
    assert side.machine.waits_for("p:1")
    assert names(side.link()) == ["Expect"]
    side.do(Unlinked("p:1"))
    assert names(side.link()) == ["Expect"]


@DECODES
def test_while_a_prefill_cannot_be_reached_it_is_tried_again(make) -> None:
    side = make(WITHIN, linked=False)
    side.do(expect(deadline_s=5.0))
    assert side.wait(4.5).count(Connect("p:1")) == 2
    side.wait(2.0)
    assert not side.machine.waits_for("p:1")
    assert side.machine.rows == 0
    assert side.machine.next_deadline is None


@DECODES
def test_a_prefill_of_the_version_before_is_not_told(make) -> None:
    side = make(WITHIN, linked=False)
    side.do(PeerReady(PREFILL, f.EXPECT_VERSION - 1))
    side.do(Linked("p:1", side.writers))
    side.do(expect())
    assert names(side.wait(10.0)) == []
    assert names(side.open(2)) == ["Open"]


@DECODES
def test_what_is_announced_is_bounded(make) -> None:
    side = make(SMALL)
    told = [names(side.do(expect(number, room=number))) for number in range(6)]
    assert told == [["Expect"]] * 4 + [[]] * 2


@DECODES
@pytest.mark.parametrize("end", [Drain(), Shutdown()])
def test_a_decode_that_takes_nothing_new_announces_nothing_new(make, end) -> None:
    side = make(WITHIN)
    side.do(end)
    assert sent(side.do(expect())) == []


@DECODES
def test_a_decode_that_shuts_down_announces_no_more(make) -> None:
    side = make(WITHIN)
    side.do(expect())
    side.do(Shutdown())
    assert sent(side.wait(10.0)) == []
    assert side.machine.rows == 0


@DECODES
@given(now=st.floats(0.0, 1e9))
@example(now=255069.0257394217)
def test_a_deadline_that_is_as_long_as_can_be_is_carried_whatever_the_clock_says(make, now) -> None:
    side = make()
    side.now = now
    for frame in sent(side.do(expect(deadline_s=f.MAX_SECONDS))) + sent(side.open(2, deadline_s=f.MAX_SECONDS)):
        assert f.decode(f.encode(frame)).deadline_s == pytest.approx(f.MAX_SECONDS)


# --- A side that refuses ---


def deliver(effects, side) -> list:
    return [effect for frame in sent(effects) for effect in side.hear(frame)]


PAIRS = pytest.mark.parametrize(("decodes", "prefills"), [(Decode, Prefill), (DecodeRead, PrefillRead)])


@PAIRS
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("prefill_first", [True, False])
def test_what_decodes_engine_refuses_ends_at_prefill_too(decodes, prefills, announced, prefill_first) -> None:
    decode, prefill = decodes(), prefills()
    if prefill_first:
        prefill.request()
    if announced:
        deliver(decode.do(expect()), prefill)
    answers = deliver(decode.do(refusal()), prefill)
    if not prefill_first:
        prefill.request()
    assert ended(prefill) == (Phase.FAILED, Cause.REFUSED, True)
    assert prefill.status[1].message == "no memory"
    assert ended(decode, 2) == (Phase.FAILED, Cause.REFUSED, True)
    deliver(deliver(answers, decode), prefill)
    for side in (decode, prefill):
        side.wait(200.0)
        assert side.machine.rows == 0


@PAIRS
def test_a_refusal_waits_for_prefill_to_be_linked(decodes, prefills) -> None:
    decode, prefill = decodes(linked=False), prefills()
    prefill.request()
    effects = decode.do(refusal())
    assert Connect("p:1") in effects
    assert ended(decode, 2) == (Phase.FAILED, Cause.REFUSED, True)
    deliver(decode.link(), prefill)
    assert ended(prefill) == (Phase.FAILED, Cause.REFUSED, True)


@DECODES
def test_a_refusal_that_nobody_hears_is_forgotten_by_its_deadline(make) -> None:
    side = make(linked=False)
    side.do(refusal())
    side.wait(30.0)
    assert side.machine.rows == 0


@PAIRS
def test_prefill_hears_a_refusal_and_an_abort_however_late_it_is_reached_before_their_deadline(
    decodes, prefills
) -> None:
    decode, prefill = decodes(linked=False), prefills()
    prefill.request(1)
    prefill.request(2, room=8)
    decode.do(refusal())
    decode.open(3, room=8)
    decode.abort(3)
    decode.wait(decode.machine.timing.drain_s + 1)
    deliver(decode.link(), prefill)
    assert ended(prefill, 1) == (Phase.FAILED, Cause.REFUSED, True)
    assert ended(prefill, 2) == (Phase.FAILED, Cause.PEER_ABORTED, True)


@PAIRS
def test_a_decode_that_is_full_or_drains_tells_prefill(decodes, prefills) -> None:
    for timing, before in ((SMALL, None), (Timeouts(), Drain())):
        decode, prefill = decodes(timing), prefills(Timeouts())
        for number in range(4):
            decode.open(10 + number, room=number)
        if before is not None:
            decode.do(before)
        prefill.request()
        deliver(decode.open(20), prefill)
        assert ended(decode, 20) == (Phase.FAILED, Cause.REFUSED, True)
        assert ended(prefill) == (Phase.FAILED, Cause.REFUSED, True)


@DECODES
def test_refusals_that_wait_to_be_told_are_bounded(make) -> None:
    side = make(SMALL, linked=False)
    for number in range(20):
        side.do(refusal(number, room=number))
    assert side.machine.rows <= 2 * SMALL.max_attempts
    assert all(ended(side, number) == (Phase.FAILED, Cause.REFUSED, True) for number in range(20))


@PAIRS
@pytest.mark.parametrize("decode_first", [True, False])
@pytest.mark.parametrize("why", ["engine", "drain", "full"])
def test_what_prefill_refuses_ends_at_decode_too(decodes, prefills, decode_first, why) -> None:
    decode, prefill = decodes(), prefills(SMALL)
    if why == "full":
        for handle in range(10, 14):
            prefill.request(handle, room=handle)
    offers = decode.open()
    if decode_first:
        deliver(deliver(offers, prefill), decode)
    if why == "drain":
        prefill.do(Drain())
    effects = prefill.do(OpenRequest(1, 7, 0, "r", 30.0, refused="no memory" if why == "engine" else ""))
    assert ended(prefill) == (Phase.FAILED, Cause.REFUSED, True)
    deliver(effects if decode_first else deliver(offers, prefill), decode)
    deliver(prefill.wait(0.2), decode)
    assert decode.status[1].cause is Cause.REFUSED
    assert decode.status[1].releasable


@PAIRS
@pytest.mark.parametrize("prefill_refuses", [True, False])
def test_the_other_side_learns_that_a_request_is_too_long_also_of_one_whose_prompt_was_not_read(
    decodes, prefills, prefill_refuses
) -> None:
    decode, prefill = decodes(), prefills()
    too_long = {"refused": "no room", "refused_as": Cause.TOO_LONG}
    if prefill_refuses:
        prefill.do(OpenRequest(1, 7, 0, "s", 30.0, **too_long))
        deliver(deliver(decode.open(prompt=b"p"), prefill), decode)
    else:
        prefill.request(1, prompt=b"p")
        deliver(decode.do(OpenAttempt(1, "p:1", 7, 0, "s", b"", 0, 0, 30.0, **too_long)), prefill)
    assert ended(prefill) == (Phase.FAILED, Cause.TOO_LONG, True)
    assert decode.status[1].cause is Cause.TOO_LONG


@PREFILLS
def test_a_refusal_is_for_one_request_of_its_room(make) -> None:
    side = make()
    side.do(OpenRequest(1, 7, 0, "r", 30.0, refused="no memory"))
    side.opened(1)
    side.request(2, rid="s")
    side.opened(2, request_id="s")
    assert side.status[2].phase is Phase.READY
