"""Which halves of hand-offs match: by room and prompt, equal request ids first, else in order of arrival."""

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.rooms import MAX_PER_ROOM
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.sides import (
    DECODE,
    DECODE_2,
    TIMEOUTS,
    Decode,
    Prefill,
    abort_frame,
    ids,
    names,
    sent,
    writes,
)

OLD, NEW = b"old prompt", b"new prompt"


def matched(side: Prefill, handle: int = 1) -> int:
    """Number of the attempt that the request of `handle` has matched: the one that its pages are written to."""
    for number in (exchange.attempt.number for exchange in side.machine.under_way(DECODE)):
        side.offered(number, pages=(number,))
    (write,) = writes(side.send(handle, pages=(4,)))
    assert write.target == ids(write.attempt.number)
    return write.attempt.number


class TestOnePrompt:
    """`n` > 1: several requests of one prompt in one room."""

    def test_n_requests_match_attempts_in_order(self) -> None:
        side = Prefill()
        for handle in (1, 2, 3):
            side.request(handle, rid=f"prefill {handle}", prompt=OLD)
        for number in (1, 2, 3):
            side.opened(number, rid=f"decode {number}", prompt=OLD)
        assert [matched(side, handle) for handle in (1, 2, 3)] == [1, 2, 3]

    def test_n_attempts_match_requests_in_order(self) -> None:
        side = Prefill()
        for number in (1, 2, 3):
            side.opened(number, rid=f"decode {number}", prompt=OLD)
        for handle in (1, 2, 3):
            side.request(handle, rid=f"prefill {handle}", prompt=OLD)
        assert [matched(side, handle) for handle in (1, 2, 3)] == [1, 2, 3]

    def test_equal_request_id_goes_before_order(self) -> None:
        side = Prefill()
        side.request(1, rid="a", prompt=OLD)
        side.request(2, rid="b", prompt=OLD)
        side.opened(1, rid="b", prompt=OLD)
        side.opened(2, rid="a", prompt=OLD)
        assert (matched(side, 1), matched(side, 2)) == (2, 1)

    def test_equal_request_id_of_parked_attempt_goes_before_order(self) -> None:
        side = Prefill()
        side.opened(1, rid="a", prompt=OLD)
        side.opened(2, rid="b", prompt=OLD)
        side.request(1, rid="b", prompt=OLD)
        assert matched(side, 1) == 2

    def test_abort_of_one_sample_spares_the_others(self) -> None:
        side = Prefill()
        for handle in (1, 2):
            side.request(handle, rid=f"r{handle}", prompt=OLD)
            side.opened(handle, rid=f"r{handle}", prompt=OLD)
        side.receive(abort_frame(1, rid="r1"))
        assert (side.status[1].cause, side.status[2].phase) == (Cause.PEER_ABORTED, Phase.WAITING)
        assert matched(side, 2) == 2

    def test_same_request_opened_again_matches_next_request(self) -> None:
        side = Prefill()
        side.request(1)
        side.opened(1)
        side.receive(abort_frame(1))
        side.opened(2)
        side.request(2)
        assert (side.status[1].cause, matched(side, 2)) == (Cause.PEER_ABORTED, 2)


class TestSeveralPrompts:
    def test_list_of_prompts_matches_each_its_own(self) -> None:
        side = Prefill()
        prompts = [b"first", b"second", b"third"]
        for handle, prompt in enumerate(prompts, start=1):
            side.request(handle, rid=f"prefill {handle}", prompt=prompt)
        for number, prompt in enumerate(reversed(prompts), start=1):
            side.opened(number, rid=f"decode {number}", prompt=prompt)
        assert [matched(side, handle) for handle in (1, 2, 3)] == [3, 2, 1]

    def test_equal_request_id_of_other_prompt_does_not_match(self) -> None:
        side = Prefill()
        side.opened(1, rid="r", prompt=OLD)
        side.request(1, rid="r", prompt=NEW)
        side.opened(2, rid="r2", prompt=NEW)
        assert matched(side, 1) == 2

    def test_retry_with_longer_prompt_matches_beside_old_halves(self) -> None:
        side = Prefill()
        side.request(1, rid="first try", prompt=OLD)
        side.opened(1, rid="second try", prompt=NEW)
        side.request(2, rid="prefill's own", prompt=NEW)
        assert matched(side, 2) == 1
        side.wait(TIMEOUTS.match_s + 1)
        assert (side.status[1].cause, side.status[1].releasable) == (Cause.TIMED_OUT, True)

    def test_room_used_again_at_once_keeps_requests_apart(self) -> None:
        side = Prefill()
        side.request(1, rid="a", prompt=OLD)
        side.attempt(1, rid="x", prompt=OLD)
        (write,) = writes(side.send(1))
        side.opened(2, rid="y", prompt=NEW)
        side.landed(write)
        side.request(2, rid="b", prompt=NEW)
        assert (side.status[1].phase, matched(side, 2)) == (Phase.DONE, 2)

    def test_abort_without_open_ends_request_of_its_prompt_only(self) -> None:
        side = Prefill()
        side.request(1, rid="a", prompt=OLD)
        side.receive(abort_frame(1, rid="x", prompt=NEW))
        assert side.status[1].phase is Phase.WAITING
        side.request(2, rid="b", prompt=NEW)
        assert side.status[2].cause is Cause.PEER_ABORTED
        side.opened(2, rid="y", prompt=OLD)
        assert matched(side, 1) == 2

    def test_end_of_other_prompt_is_not_given_to_half(self) -> None:
        side = Prefill()
        side.request(1, rid="a", prompt=OLD)
        side.abort(1)
        side.opened(1, rid="x", prompt=NEW)
        side.request(2, rid="b", prompt=NEW)
        assert matched(side, 2) == 1
        assert names(side.opened(2, rid="y", prompt=OLD)) == ["Ended(aborted)"]


class TestWithoutPrompt:
    @pytest.mark.parametrize(("asked", "offered"), [(OLD, b""), (b"", OLD), (b"", b"")])
    def test_half_without_prompt_matches_any(self, asked: bytes, offered: bytes) -> None:
        side = Prefill()
        side.request(1, rid="a", prompt=asked)
        side.opened(1, rid="x", prompt=offered)
        assert matched(side) == 1

    def test_handoff_takes_prompt_of_its_second_half(self) -> None:
        side = Prefill(TIMEOUTS, DECODE, DECODE_2)
        side.request(1, rid="a")
        side.opened(1, rid="x", prompt=OLD, rank_index=0, rank_count=2)
        assert names(side.opened(1, peer=DECODE_2, rid="x", prompt=NEW, rank_index=1, rank_count=2)) == []
        assert side.machine.queues.count("parked") == 1, "a rank with another prompt is another request's"

    def test_decode_gives_prompt_with_open_and_abort(self) -> None:
        side = Decode()
        assert [frame.prompt for frame in sent(side.open(1, prompt=OLD))] == [OLD]
        assert [(type(frame), frame.prompt) for frame in sent(side.abort(1))] == [(f.Abort, OLD)]


class TestBounds:
    def test_full_room_refuses_request(self) -> None:
        side = Prefill()
        for handle in range(MAX_PER_ROOM + 1):
            side.request(handle, rid=f"r{handle}")
        assert side.status[MAX_PER_ROOM - 1].phase is Phase.WAITING
        assert side.status[MAX_PER_ROOM].cause is Cause.REFUSED
        assert f"room 7 has {MAX_PER_ROOM} hand-offs" in side.status[MAX_PER_ROOM].message
        side.request(100, room=8)
        assert side.status[100].phase is Phase.WAITING

    def test_full_room_refuses_attempt_and_still_matches(self) -> None:
        side = Prefill()
        for number in range(MAX_PER_ROOM):
            assert names(side.opened(number, rid=f"r{number}")) == []
        (refused,) = sent(side.opened(MAX_PER_ROOM, rid="one more"), f.Ended)
        assert (refused.cause, refused.settled) == (Cause.REFUSED, True)
        side.request(1, rid="r5")
        assert matched(side) == 5

    def test_ended_handoffs_do_not_fill_room(self) -> None:
        side = Prefill()
        for number in range(1, 3 * MAX_PER_ROOM):
            side.receive(abort_frame(number, rid=f"r{number}"))
        assert side.machine.rows - side.machine.tombstones == MAX_PER_ROOM
        side.opened(1000, rid="live")
        side.request(1, rid="live")
        assert matched(side) == 1000
