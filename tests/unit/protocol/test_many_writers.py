"""All the ranks that an attempt may have, TP 2 x PP 2 x CP 2, and DP ranks beside them: whose word counts for what."""

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import Ignored, Linked, OpenAttempt, PeerReady, Writer
from pdpool_connector.protocol.states import DecodeState
from pdpool_connector.protocol.status import Phase

from tests.unit.protocol.sides import (
    DECODE,
    DECODE_2,
    PREFILL,
    PREFILL_2,
    TIMING,
    Decode,
    Prefill,
    about,
    ack,
    ids,
    names,
)

WRITERS = tuple(f"{rank:032x}" for rank in range(8))
SAID: dict[type[f.AttemptFrame], dict[str, object]] = {
    f.Accepted: {},
    f.Sending: {},
    f.Done: {"bytes_moved": 1},
    f.Failed: {"cause": "transfer_failed", "message": "no route"},
    f.Drained: {"cause": "transfer_failed", "message": "no route"},
}
ENDS = [f.Done, f.Drained]


def said(kind: type[f.AttemptFrame], number: int = 1, *, sender: str = PREFILL, room: int = 7) -> f.AttemptFrame:
    return kind(**(about(number, room=room) | {"sender": sender}), **SAID[kind])


def reasons(effects) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, Ignored)]


@pytest.fixture
def many() -> Decode:
    side = Decode(writers=WRITERS)
    side.open()
    return side


@pytest.fixture
def two_dp_ranks() -> Decode:
    """Attempt 1 is served by one DP rank of prefill, attempt 2 by another, in one room."""
    side = Decode()
    side.do(PeerReady(PREFILL_2, f.VERSION_MAX))
    side.do(Linked("p:2", (Writer(PREFILL_2, writes_aux=True),)))
    side.open()
    side.do(OpenAttempt(2, "p:2", 7, 0, "r", ids(10, 11), 0, 4, 30.0))
    return side


@pytest.mark.parametrize("last", WRITERS)
def test_an_attempt_is_done_with_the_last_writer_whichever_it_is_and_however_often_the_others_say_so(
    many, last
) -> None:
    for _ in range(2):
        for writer in WRITERS:
            if writer != last:
                assert names(many.hear(said(f.Done, sender=writer))) == ["Ack"]
    assert (many.status[1].phase, many.status[1].releasable) == (Phase.WAITING, False)
    many.hear(said(f.Done, sender=last))
    assert (many.status[1].phase, many.status[1].bytes_moved, many.machine.rows) == (Phase.DONE, len(WRITERS), 0)


@pytest.mark.parametrize("last", WRITERS)
@pytest.mark.parametrize("end", ENDS)
def test_an_aborted_attempt_is_released_by_the_last_writers_word_and_only_that_one_is_told_again(
    many, last: str, end
) -> None:
    many.abort()
    for _ in range(2):
        for writer in WRITERS:
            if writer != last:
                many.hear(said(end, sender=writer))
    again = [effect for effect in many.wait(TIMING.retry_max_s) if getattr(effect, "peer", last) != last]
    assert again == []
    many.wait(TIMING.drain_s)
    assert (many.status[1].releasable, len(many.machine.held())) == (False, 1)
    many.hear(said(end, sender=last))
    assert (many.status[1].releasable, many.machine.rows) == (True, 0)


@pytest.mark.parametrize("end", ENDS)
def test_the_words_about_an_earlier_attempt_of_a_room_say_nothing_of_the_next(many, end) -> None:
    many.abort()
    for writer in WRITERS:
        many.hear(said(f.Drained, sender=writer))
    many.open(2)
    for writer in WRITERS:
        effects = many.hear(said(end, 1, sender=writer))
        assert (names(effects), reasons(effects)) == (["Ack"], ["stale"])
    assert many.status[2].phase is Phase.WAITING
    many.abort(2)
    for writer in WRITERS:
        many.hear(said(end, 1, sender=writer))
    assert not many.status[2].releasable


@pytest.mark.parametrize("kind", SAID)
def test_no_word_of_another_dp_rank_counts_for_an_attempt_that_it_does_not_serve(two_dp_ranks, kind) -> None:
    side = two_dp_ranks
    before = dict(side.status)
    assert reasons(side.hear(said(kind, 1, sender=PREFILL_2))) == ["stranger"]
    assert side.status == before
    side.abort(1)
    assert reasons(side.hear(said(kind, 1, sender=PREFILL_2))) == ["stranger"]
    assert not side.status[1].releasable
    assert [attempt.state for attempt in side.machine.under_way(PREFILL_2)] == [DecodeState.OPENING]
    side.hear(said(f.Drained, 1, sender=PREFILL))
    assert side.status[1].releasable
    assert side.status[2].phase is Phase.WAITING


@pytest.mark.parametrize("end", ENDS)
def test_words_about_a_room_that_decode_does_not_have_are_dropped_and_leave_nothing(two_dp_ranks, end) -> None:
    side, fresh = two_dp_ranks, Decode()
    assert reasons(side.hear(said(end, 1, room=8))) == ["mismatch"]
    assert reasons(fresh.hear(said(end, 1))) == ["stale"]
    assert (side.machine.rows, fresh.machine.rows) == (2, 0)
    assert side.status[1].phase is Phase.WAITING


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"attempt": f.AttemptId(DECODE, 2)}, "stale"), ({"room": 8}, "mismatch"), ({"sender": DECODE_2}, "stranger")],
    ids=["an attempt that prefill has not seen", "another room", "another decode"],
)
def test_acknowledgements_of_what_is_not_prefills_to_forget_change_nothing(changes: dict, reason: str) -> None:
    side = Prefill(TIMING, DECODE, DECODE_2)
    side.request()
    side.opened()
    side.abort()
    rows, stones = side.machine.rows, side.machine.tombstones
    assert reasons(side.hear(f.Ack(**(about(1) | changes)))) == [reason]
    assert (side.machine.rows, side.machine.tombstones) == (rows, stones)
    side.wait(TIMING.acked_s + 1)
    assert side.machine.tombstones == stones, "still to be acknowledged"
    side.hear(ack())
    side.wait(TIMING.acked_s + 1)
    assert side.machine.rows == 0
