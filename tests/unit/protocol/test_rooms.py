"""A room that is used again at once: halves of different prompts never meet, whatever comes first and gets lost."""

import msgspec
import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import AbortTransfer
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.sides import (
    DECODE_2,
    TIMING,
    Decode,
    DecodeRead,
    Prefill,
    PrefillRead,
    abort_frame,
    open_frame,
    sent,
    writes,
)

OLD, NEW = b"old prompt", b"new prompt"
BOTH = pytest.mark.parametrize("kind", [Prefill, PrefillRead])


@BOTH
def test_an_attempt_does_not_meet_the_request_of_another_prompt_that_still_waits_in_its_room(kind) -> None:
    side = kind()
    side.request(1, rid="made up", prompt=OLD)
    side.opened(1, request_id="r", prompt=NEW)
    assert side.status[1].phase is Phase.WAITING
    side.request(2, rid="made up too", prompt=NEW)
    assert (side.status[1].phase, side.status[2].phase) == (Phase.WAITING, Phase.READY)
    side.wait(31)
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.TIMED_OUT, True)


@BOTH
def test_a_request_does_not_meet_the_attempt_of_another_prompt_that_still_waits_in_its_room(kind) -> None:
    side = kind()
    side.opened(1, request_id="r", prompt=OLD)
    side.request(1, rid="r", prompt=NEW)
    assert side.status[1].phase is Phase.WAITING, "even where the ids are the same"
    side.opened(2, request_id="r2", prompt=NEW)
    assert side.status[1].phase is Phase.READY
    late = side.wait(TIMING.meet_s + 1)
    (drained,) = {frame.attempt.number: frame for frame in sent(late, f.Drained) if frame.attempt.number == 1}.values()
    assert drained.cause == Cause.TIMED_OUT


def test_each_of_two_requests_in_one_room_sends_its_own_pages() -> None:
    side = Prefill()
    side.request(1, prompt=OLD)
    side.request(2, prompt=NEW)
    side.opened(1, prompt=NEW)
    side.opened(2, prompt=OLD)
    (old,), (new,) = writes(side.send(1, pages=(1, 2))), writes(side.send(2, pages=(3, 4)))
    assert (old.attempt.number, new.attempt.number) == (2, 1)
    side.landed(old), side.landed(new)
    assert [side.status[handle].phase for handle in (1, 2)] == [Phase.DONE, Phase.DONE]


@BOTH
def test_the_same_prompt_again_in_the_same_room_meets_whatever_waits_there(kind) -> None:
    side = kind()
    side.request(1, rid="made up", prompt=OLD)
    side.opened(1, request_id="r", prompt=OLD)
    assert side.status[1].phase is Phase.READY


@BOTH
@pytest.mark.parametrize(("asked", "offered"), [(OLD, b""), (b"", OLD)])
def test_a_half_that_does_not_tell_its_prompt_meets_by_room_as_before(kind, asked, offered) -> None:
    side = kind()
    side.request(1, prompt=asked)
    side.opened(1, prompt=offered)
    assert side.status[1].phase is Phase.READY
    side.request(2, prompt=NEW)
    assert side.status[2].phase is Phase.WAITING, "the room's first request has told its prompt by now"


def test_ranks_of_a_decode_meet_the_request_of_their_own_prompt_each() -> None:
    side = Prefill(TIMING, "d" * 32, DECODE_2)
    side.request(1, prompt=OLD)
    side.request(2, prompt=NEW)
    side.opened(1, prompt=NEW, parts=2)
    side.opened(2, prompt=OLD, parts=2)
    side.opened(1, peer=DECODE_2, prompt=OLD, part=1, parts=2)
    assert (side.status[1].phase, side.status[2].phase) == (Phase.READY, Phase.WAITING)
    side.opened(2, peer=DECODE_2, prompt=NEW, part=1, parts=2)
    assert side.status[2].phase is Phase.READY


def test_an_abort_that_overtakes_its_attempt_ends_the_request_of_its_prompt_only() -> None:
    side = Prefill()
    side.request(1, rid="made up", prompt=OLD)
    side.hear(msgspec.structs.replace(abort_frame(1), prompt=NEW))
    assert side.status[1].phase is Phase.WAITING
    side.request(2, rid="made up too", prompt=NEW)
    assert side.status[2].cause is Cause.PEER_ABORTED
    side.opened(2, prompt=OLD)
    assert side.status[1].phase is Phase.READY


def test_a_half_is_not_told_the_end_of_another_prompt_that_failed_in_its_room() -> None:
    side = Prefill()
    side.request(1, rid="made up", prompt=OLD)
    side.abort(1)
    side.opened(1, prompt=NEW)
    side.request(2, prompt=NEW)
    assert side.status[2].phase is Phase.READY
    assert sent(side.opened(2, prompt=OLD), f.Drained), "but its own half learns it"


def test_a_peer_that_knows_no_prompt_is_read_as_one_that_does_not_tell_it() -> None:
    fields = msgspec.msgpack.decode(f.encode(open_frame(1)))
    assert f.decode(msgspec.msgpack.encode(fields[:-1])).prompt == b""


@pytest.mark.parametrize("kind", [Decode, DecodeRead])
def test_decode_tells_the_prompt_when_it_opens_and_when_prefill_may_not_have_heard_of_it(kind) -> None:
    side = kind(linked=False)
    side.open(prompt=NEW)
    side.do(AbortTransfer(1, "client left"))
    told = sent(side.link(), f.Abort if kind is Decode else f.Drained)
    assert [frame.prompt for frame in told] == [NEW]
    assert [frame.prompt for frame in sent(side.open(2, prompt=OLD), f.Open)] == [OLD]


def test_a_request_whose_attempt_has_ended_learns_why_though_another_has_its_room() -> None:
    side = Prefill()
    side.request(1, rid="first")
    side.opened(1, request_id="first")
    side.hear(abort_frame(2, rid="second"))
    side.request(2, rid="second")
    assert side.status[2].cause is Cause.PEER_ABORTED, "not that the room is in use: that is answered otherwise"
    assert side.status[1].phase is Phase.READY


@BOTH
def test_an_attempt_whose_request_has_ended_learns_why_though_another_has_its_room(kind) -> None:
    side = kind()
    side.request(1, rid="first")
    side.abort(1)
    side.request(2, rid="second")
    side.opened(1, request_id="second")
    (told,) = sent(side.opened(2, request_id="first"), f.Drained)
    assert told.cause == Cause.ABORTED
    assert side.status[2].phase is Phase.READY
