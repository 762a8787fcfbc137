"""Halves that ended before their other half came: who is told of them, who is not, and how many are remembered."""

import contextlib

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import OpenRequest
from pdpool_connector.protocol.missed import PER_PLACE
from pdpool_connector.protocol.status import Cause, Phase
from pdpool_connector.protocol.timeouts import Timeouts

from tests.unit.protocol.sides import DECODE, DECODE_2, Prefill, PrefillRead, about, sent

BOTH = pytest.mark.parametrize("kind", [Prefill, PrefillRead])


def refuse(side: Prefill, handle: int, room: int) -> None:
    side.do(OpenRequest(handle, room, 0, "r", 30.0, refused="no memory"))


def give_up(side: Prefill, number: int, **fields: object) -> None:
    """Decode's word that an attempt ends, which prefill may hear before it hears of the attempt."""
    room = fields.pop("room", 7)
    kind = f.Drained if isinstance(side, PrefillRead) else f.Abort
    header = about(number, room=room)
    side.hear(kind(**header, cause="aborted", message="client left", **fields))


def drained(effects: list) -> list[str]:
    return [frame.cause for frame in sent(effects, f.Drained)]


@BOTH
def test_halves_that_were_met_take_no_room_from_those_that_were_not(kind) -> None:
    side = kind(Timeouts(max_attempts=8))
    for number in range(1, 20):
        refuse(side, number, room=number)
        assert drained(side.opened(number, room=number)) == [Cause.REFUSED]
    assert len(side.machine._missed) == 0


@BOTH
def test_what_nobody_comes_for_is_forgotten_row_by_row(kind) -> None:
    side = kind(Timeouts(verdict_s=10.0, acked_s=1.0))
    for number in range(1, 5):
        refuse(side, number, room=number)
        side.wait(1.0)
    assert drained(side.opened(1, room=1)) == [Cause.REFUSED]
    side.wait(6.5)  # 10.5 s after the first, which was met, and 9.5 s after the second
    assert len(side.machine._missed) == 3
    side.wait(1.0)
    assert len(side.machine._missed) == 2
    side.wait(3.0)
    assert len(side.machine._missed) == 0


@BOTH
def test_a_room_is_searched_in_bounded_time_however_much_has_ended_in_it(kind) -> None:
    side = kind()
    for number in range(1, 3 * PER_PLACE):
        give_up(side, number, request_id=f"r{number}")
    assert len(side.machine._missed) == PER_PLACE
    give_up(side, 3 * PER_PLACE, request_id="r", room=8)
    side.request(1, room=8, rid="r")
    assert side.status[1].cause is Cause.PEER_ABORTED, "another room is none the worse"


@BOTH
@pytest.mark.parametrize("opened", [True, False])
def test_one_decode_alone_gets_half_of_the_room(kind, opened) -> None:
    side = kind(Timeouts(max_attempts=8, meet_s=5.0), DECODE, DECODE_2)
    for number in range(1, 20):
        if opened:
            side.opened(number, room=number)
            side.wait(5.0)
        else:
            give_up(side, number, request_id="r", room=number)
    assert len(side.machine._missed) == 4
    side.opened(1, peer=DECODE_2, room=30)
    side.wait(5.0)
    side.request(1, room=30)
    assert side.status[1].cause is Cause.TIMED_OUT


@BOTH
@pytest.mark.parametrize("requested", [True, False])
def test_a_part_of_another_request_does_not_learn_the_end_of_the_one_before_in_its_room(kind, requested) -> None:
    side = kind(Timeouts(), DECODE, DECODE_2)
    if requested:
        side.request(1, rid="old")
    side.opened(1, request_id="old", part=0, parts=2)
    give_up(side, 1, request_id="old", part=0, parts=2)
    if not requested:
        side.request(1, rid="old")
    assert side.status[1].cause is Cause.PEER_ABORTED
    assert not drained(side.opened(1, peer=DECODE_2, request_id="new", part=1, parts=2))
    side.opened(2, request_id="new", part=0, parts=2)
    side.request(2, rid="new")
    assert side.status[2].phase is Phase.READY
    assert drained(side.opened(2, peer=DECODE_2, request_id="old", part=1, parts=2)) == [Cause.PEER_ABORTED]


@BOTH
def test_nor_does_it_where_the_end_came_before_any_attempt(kind) -> None:
    side = kind(Timeouts(), DECODE, DECODE_2)
    side.request(1, rid="made up")
    give_up(side, 1, request_id="old", part=0, parts=2)
    assert side.status[1].cause is Cause.PEER_ABORTED
    assert not drained(side.opened(1, peer=DECODE_2, request_id="new", part=1, parts=2))
    assert drained(side.opened(2, peer=DECODE_2, request_id="old", part=1, parts=2)) == [Cause.PEER_ABORTED]


@BOTH
def test_an_end_of_a_part_that_there_cannot_be_keeps_no_real_part_from_learning_its_own(kind) -> None:
    side = kind(Timeouts(), DECODE, DECODE_2)
    side.request()
    side.opened(1, part=0, parts=2)
    with contextlib.suppress(f.MalformedFrameError):
        give_up(side, 2, request_id="r", part=7, parts=2)
    give_up(side, 1, request_id="r", part=0, parts=2)
    assert drained(side.opened(1, peer=DECODE_2, part=1, parts=2)) == [Cause.PEER_ABORTED]
