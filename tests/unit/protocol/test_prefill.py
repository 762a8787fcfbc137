"""Prefill's machine: meeting, and writing."""

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.sides import DECODE, DECODE_2, TIMING, Prefill, ack, ids, names, sent, writes


@pytest.mark.parametrize("first", ["request", "attempt"])
def test_halves_meet_in_either_order_and_everything_lands(first: str) -> None:
    side = Prefill()
    steps = [side.request, side.opened]
    for step in steps if first == "request" else reversed(steps):
        step()
    assert side.status[1].phase is Phase.READY
    assert "Accepted" in names(side.effects)
    (write,) = writes(side.send())
    assert (write.source, write.target, write.aux) == (ids(4, 5), ids(8, 9), (2, 3))
    assert side.status[1].phase is Phase.TRANSFERRING
    assert names(side.landed(write)) == ["Done"]
    assert side.status[1].phase is Phase.DONE
    assert side.status[1].releasable
    assert "Failed" not in names(side.effects)


def test_a_short_hand_off_costs_prefill_two_frames() -> None:
    side = Prefill()
    side.request()
    side.opened()
    (write,) = writes(side.send())
    side.landed(write)
    side.hear(ack())
    side.wait(200)
    assert names(side.effects) == ["Accepted", "Done"]
    assert side.machine.rows == 0


def test_pages_sent_before_decode_is_known_are_written_when_it_comes() -> None:
    side = Prefill()
    side.request()
    assert writes(side.send(last=False)) == []
    assert writes(side.send(pages=(6,), start=2)) == []
    effects = side.opened(pages=ids(8, 9, 10))
    assert [(w.source, w.target, w.aux) for w in writes(effects)] == [
        (ids(4, 5), ids(8, 9), None),
        (ids(6), ids(10), (2, 3)),
    ]
    assert names(effects) == ["Accepted", "Sending"]


def test_done_waits_for_every_write() -> None:
    side = Prefill()
    side.request()
    side.opened()
    one = writes(side.send(pages=(4,), last=False))[0]
    two = writes(side.send(pages=(5,), start=1))[0]
    assert names(side.landed(two)) == []
    assert names(side.landed(one)) == ["Done"]


def test_pages_that_decode_holds_already_are_not_sent() -> None:
    side = Prefill()
    side.request()
    side.opened(prefix_pages=2, pages=ids(8, 9))
    assert side.status[1].prefix_pages == 2
    assert writes(side.send(pages=(1,), last=False)) == []
    (write,) = writes(side.send(pages=(2, 3, 4), start=1))
    assert (write.source, write.target) == (ids(3, 4), ids(8, 9))


def test_a_hand_off_with_nothing_to_send_is_done_at_once() -> None:
    side = Prefill()
    side.request()
    side.opened(prefix_pages=2, pages=b"")
    assert names(side.send(aux_slot=None)) == ["Done"]
    assert side.status[1].phase is Phase.DONE


def test_state_items_go_with_the_last_pages() -> None:
    side = Prefill()
    side.request()
    side.opened(state=ids(50, 51))
    (first,) = writes(side.send(pages=(4,), last=False))
    (second,) = writes(side.send(pages=(5,), start=1, state=(60, 61)))
    assert (first.state, second.state) == ((b"", b""), (ids(60, 61), ids(50, 51)))


def test_state_alone_is_written_and_waited_for() -> None:
    side = Prefill()
    side.request()
    side.opened(pages=b"", state=ids(50))
    (write,) = writes(side.send(pages=(), aux_slot=None, state=(60,)))
    assert names(side.effects) == ["Accepted"]
    assert names(side.landed(write)) == ["Done"]


@pytest.mark.parametrize(("ours", "theirs"), [((60,), ids(50, 51)), ((60, 61), b""), ((), ids(50))])
def test_state_items_that_are_not_as_many_as_offered_end_the_attempt(ours: tuple, theirs: bytes) -> None:
    side = Prefill()
    side.request()
    side.opened(state=theirs)
    assert writes(side.send(state=ours)) == []
    assert side.status[1].cause is Cause.INVALID
    assert f"{len(ours)} state items; decode offered {len(theirs) // 4}" in side.status[1].message


def test_state_items_before_the_last_pages_end_the_attempt() -> None:
    side = Prefill()
    side.request()
    side.opened(state=ids(50))
    side.send(pages=(4,), last=False, state=(60,))
    assert (side.status[1].cause, "before the last" in side.status[1].message) == (Cause.INVALID, True)


@pytest.mark.parametrize(
    ("sends", "why"),
    [
        ([{"pages": (1, 2, 3)}], "up to 3"),
        ([{"pages": (1,)}], "up to 1, the last"),
        ([{"pages": (1,), "start": 1}], "starts at page 1"),
        ([{"pages": (1,), "last": False}, {"pages": (2,), "start": 2}], "starts at page 2"),
        ([{}, {"pages": ()}], "after the last"),
    ],
)
def test_sends_that_do_not_fit_the_offer_end_the_attempt(sends: list[dict], why: str) -> None:
    side = Prefill()
    side.request()
    side.opened()
    for send in sends:
        side.send(**send)
    assert side.status[1].cause is Cause.INVALID
    assert why in side.status[1].message


def test_a_second_request_for_a_live_room_is_refused_and_harms_nobody() -> None:
    side = Prefill()
    side.request(1)
    side.request(2, rid="other")
    assert side.status[2].cause is Cause.CONFLICT
    assert "'r'" in side.status[2].message
    side.opened()
    assert side.status[1].phase is Phase.READY


def test_siblings_share_a_room_and_keep_their_own_attempts() -> None:
    side = Prefill()
    side.request(1, sibling=0)
    side.request(2, sibling=1)
    side.opened(1, sibling=1, pages=ids(30, 31))
    side.opened(2, sibling=0, pages=ids(40, 41))
    assert writes(side.send(2))[0].target == ids(30, 31)
    assert writes(side.send(1))[0].target == ids(40, 41)


def test_an_attempt_for_a_claimed_room_is_refused() -> None:
    side = Prefill(TIMING, DECODE, DECODE_2)
    side.request()
    side.opened(1)
    (drained,) = sent(side.opened(1, peer=DECODE_2), f.Drained)
    assert drained.cause == Cause.CONFLICT
    assert side.status[1].phase is Phase.READY


def test_the_same_request_opened_again_supersedes_and_meets_the_next_request() -> None:
    side = Prefill()
    side.request(1)
    side.opened(1)
    effects = side.opened(2)
    assert side.status[1].cause is Cause.SUPERSEDED
    assert names(effects) == ["Drained", "Accepted"]
    side.request(2)
    assert side.status[2].phase is Phase.READY


def test_a_parked_attempt_that_is_superseded_does_not_fail_the_request() -> None:
    side = Prefill()
    side.opened(1)
    side.opened(2)
    side.request(1)
    assert side.status[1].phase is Phase.READY
