"""READ: decode reads what prefill has computed, and says how it ended; prefill's pages wait for its word."""

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    Ignored,
    Writer,
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

# --- Without trouble ---


def test_prefill_announces_what_is_computed_and_is_done_when_decode_says_so() -> None:
    side = PrefillRead()
    side.request()
    side.opened(pages=ids(8, 9, 10))
    assert side.status[1].phase is Phase.READY
    (first,) = sent(side.send(pages=(4,), last=False))
    (second,) = sent(side.send(pages=(5, 6), start=1))
    assert [(c.sequence, c.start, c.pages, c.last, c.aux_slot) for c in (first, second)] == [
        (0, 0, ids(4), False, -1),
        (1, 1, ids(5, 6), True, 2),
    ]
    assert side.status[1].phase is Phase.TRANSFERRING
    assert names(side.hear(said(f.Done))) == ["Ack"]
    assert (side.status[1].phase, side.status[1].bytes_moved, side.status[1].releasable) == (Phase.DONE, 10, True)
    side.wait(100)
    assert side.machine.rows == 0


def test_decode_reads_what_is_announced_and_says_done() -> None:
    side = DecodeRead()
    (opened,) = sent(side.open())
    assert opened.aux_slot == 3
    side.hear(said(f.Accepted, sender=PREFILL))
    (read,) = reads(side.hear(computed()))
    assert (read.peer, read.source, read.target, read.aux) == (PREFILL, ids(4, 5), ids(8, 9), (2, 3))
    assert side.status[1].phase is Phase.TRANSFERRING
    (done,) = sent(side.landed(read))
    assert (type(done), done.bytes_moved) == (f.Done, 8)
    assert (side.status[1].phase, side.status[1].bytes_moved, side.status[1].releasable) == (Phase.DONE, 8, True)
    side.hear(said(f.Ack, sender=PREFILL))
    side.wait(100)
    assert names(side.effects) == ["Open", "Done"]
    assert side.machine.rows == 0


def test_a_hand_off_costs_prefill_three_frames() -> None:
    side = sending()
    side.hear(said(f.Done))
    side.wait(100)
    assert names(side.effects) == ["Accepted", "Computed", "Ack"]


def test_pages_that_decode_holds_are_neither_announced_nor_read() -> None:
    side = PrefillRead()
    side.request()
    side.opened(prefix_pages=2, pages=ids(8, 9))
    assert sent(side.send(pages=(1,), last=False)) == []
    (frame,) = sent(side.send(pages=(2, 3, 4), start=1))
    assert (frame.sequence, frame.start, frame.pages) == (0, 2, ids(3, 4))
    other = DecodeRead()
    other.open(prefix=2)
    (read,) = reads(other.hear(frame))
    assert (read.source, read.target) == (ids(3, 4), ids(8, 9))


def test_with_nothing_to_read_decode_is_done_at_once() -> None:
    side = PrefillRead()
    side.request()
    side.opened(prefix_pages=2, pages=b"", aux_slot=-1)
    (frame,) = sent(side.send())
    other = DecodeRead(TIMING, (Writer(PREFILL, writes_aux=False),))
    other.open(prefix=2, pages=())
    assert names(other.hear(frame)) == ["Done"]
    assert other.status[1].phase is Phase.DONE
    side.hear(said(f.Done, bytes_moved=0))
    assert side.status[1].phase is Phase.DONE


def test_state_items_are_read_with_the_last_pages() -> None:
    side = PrefillRead()
    side.request()
    side.opened(state=ids(50))
    first, second = sent(side.send(pages=(4,), last=False)) + sent(side.send(pages=(5,), start=1, state=(60,)))
    other = DecodeRead()
    other.open(state=(50,))
    assert reads(other.hear(first))[0].state == (b"", b"")
    assert reads(other.hear(second))[0].state == (ids(60), ids(50))


def test_every_source_must_be_read_before_any_is_told_that_it_is_done() -> None:
    side = DecodeRead(TIMING, (PREFILL, PREFILL_2))
    side.open()
    (mine,) = reads(side.hear(computed()))
    (theirs,) = reads(side.hear(computed(sender=PREFILL_2, aux_slot=-1)))
    assert names(side.landed(mine)) == []
    effects = side.landed(theirs)
    assert names(effects) == ["Done", "Done"]
    assert {effect.peer for effect in effects if hasattr(effect, "frame")} == {PREFILL, PREFILL_2}
    assert (side.status[1].phase, side.status[1].bytes_moved) == (Phase.DONE, 16)


def test_a_request_of_two_parts_is_done_when_both_have_been_read() -> None:
    side = PrefillRead(TIMING, DECODE, DECODE_2)
    side.request()
    side.opened(1, part=0, parts=2)
    assert names(side.send()) == ["Computed"]
    assert names(side.opened(1, peer=DECODE_2, part=1, parts=2, aux_slot=-1)) == ["Accepted", "Computed"]
    side.hear(said(f.Done))
    assert side.status[1].phase is Phase.TRANSFERRING
    side.hear(f.Done(**about(1, sender=DECODE_2), bytes_moved=5))
    assert (side.status[1].phase, side.status[1].bytes_moved) == (Phase.DONE, 15)


def test_a_part_that_fails_fails_the_other_and_its_pages_wait_for_both() -> None:
    side = PrefillRead(TIMING, DECODE, DECODE_2)
    side.request()
    side.opened(1, part=0, parts=2)
    side.opened(1, peer=DECODE_2, part=1, parts=2)
    side.send()
    effects = side.hear(said(f.Drained))
    assert [(frame.attempt.decode, type(frame)) for frame in sent(effects, f.Abort)] == [(DECODE_2, f.Abort)]
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.PEER_ABORTED, False)
    side.hear(f.Drained(**about(1, sender=DECODE_2), cause="peer_aborted", message=""))
    assert side.status[1].releasable


# --- Lost and late frames ---


def test_what_decode_has_not_noted_is_repeated_with_back_off_until_it_has() -> None:
    side = PrefillRead()
    side.request()
    side.opened(pages=ids(8, 9, 10))
    side.send(pages=(4,), last=False)
    side.send(pages=(5,), start=1, last=False)
    repeated = sent(side.wait(1), f.Computed)
    assert 6 <= len(repeated) <= 8
    side.hear(said(f.Fetching, taken=1))
    assert {frame.sequence for frame in sent(side.wait(5), f.Computed)} == {1}
    side.hear(said(f.Fetching, taken=2))
    assert names(side.wait(TIMING.query_s + 0.1)) == ["Query"]
    (third,) = sent(side.send(pages=(6,), start=2))
    assert (third.sequence, third.last) == (2, True)


def test_decode_takes_announcements_in_order_and_once() -> None:
    side = DecodeRead()
    side.open(pages=(8, 9))
    late = side.hear(computed(sequence=1, start=1, pages=(5,)))
    assert [effect.reason for effect in late if isinstance(effect, Ignored)] == ["gap"]
    assert len(reads(side.hear(computed(pages=(4,), last=False)))) == 1
    again = side.hear(computed(pages=(4,), last=False))
    assert reads(again) == []
    assert [frame.taken for frame in sent(again, f.Fetching)] == [1]
    assert len(reads(side.hear(computed(sequence=1, start=1, pages=(5,))))) == 1


def test_done_is_repeated_until_acknowledged_and_each_time_acknowledged_by_prefill() -> None:
    side, read = receiving()
    side.landed(read)
    assert set(names(side.wait(10))) == {"Done"}
    side.hear(said(f.Ack, sender=PREFILL))
    assert names(side.wait(10)) == []
    other = sending()
    assert names(other.hear(said(f.Done))) == ["Ack"]
    assert names(other.hear(said(f.Done))) == ["Ack"]
    assert other.status[1].bytes_moved == 10


def test_open_is_repeated_until_answered_and_a_waiting_attempt_is_asked_after() -> None:
    side = DecodeRead()
    side.open()
    assert set(names(side.wait(2))) == {"Open"}
    side.hear(said(f.Accepted, sender=PREFILL))
    assert names(side.wait(10)) == ["Query", "Query", "Query"]


@pytest.mark.parametrize("asked", [f.Query, f.Open])
def test_prefill_answers_by_what_decode_has_not_noted(asked: type[f.Frame]) -> None:
    side = sending()
    ask = said(f.Query) if asked is f.Query else None
    assert names(side.hear(ask) if ask is not None else side.opened()) == ["Computed"]
    side.hear(said(f.Fetching, taken=1))
    assert names(side.hear(ask) if ask is not None else side.opened()) == ["Accepted"]


def test_a_query_of_prefill_is_answered_in_every_state_and_for_the_unknown() -> None:
    side = DecodeRead()
    side.open()
    query = said(f.Query, sender=PREFILL)
    assert [frame.taken for frame in sent(side.hear(query), f.Fetching)] == [0]
    (read,) = reads(side.hear(computed()))
    assert [frame.taken for frame in sent(side.hear(query), f.Fetching)] == [1]
    side.abort()
    assert names(side.hear(query)) == ["Failed"]
    side.landed(read, WriteResult.STOPPED)
    assert names(side.hear(query)) == ["Drained"]
    (drained,) = sent(side.hear(said(f.Query, 99, sender=PREFILL)), f.Drained)
    assert drained.cause == Cause.FORGOTTEN


def test_a_late_open_of_a_concluded_attempt_meets_nobody() -> None:
    side = sending()
    side.hear(said(f.Done))
    side.request(2)
    assert names(side.opened()) == ["Ack"]
    side.wait(TIMING.acked_s + 1)
    (drained,) = sent(side.opened(), f.Drained)
    assert (drained.cause, side.status[2].phase) == (Cause.REFUSED, Phase.WAITING)


@pytest.mark.parametrize("late", [computed(), said(f.Abort, sender=PREFILL)])
def test_late_frames_of_a_concluded_attempt_are_answered_and_change_nothing(late: f.Frame) -> None:
    side, read = receiving()
    side.landed(read)
    assert names(side.hear(late)) == ["Done"]
    side.hear(said(f.Ack, sender=PREFILL))
    side.wait(TIMING.acked_s + 1)
    assert side.machine.rows == 0
    (drained,) = sent(side.hear(late), f.Drained)
    assert drained.cause == Cause.FORGOTTEN
    assert (side.machine.rows, side.status[1].phase) == (0, Phase.DONE)


def test_an_end_that_nobody_waits_for_is_acknowledged_and_stored_only_to_be_remembered() -> None:
    side = PrefillRead()
    assert names(side.hear(said(f.Done, 5))) == ["Ack"]
    assert side.machine.rows == 0
