"""Attempts with several writers: TP 2 x PP 2 x CP 2, and DP ranks beside them."""

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import Linked, OfferPages, OpenAttempt, PeerReady, Writer
from pdpool_connector.protocol.states import DecodeState
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.sides import (
    PREFILL,
    PREFILL_2,
    TIMEOUTS,
    Decode,
    accepted,
    ended,
    ids,
    ignored,
    names,
    sent,
)

WRITERS = tuple(f"{rank:032x}" for rank in range(8))
ENDS = pytest.mark.parametrize("cause", ["", "transfer_failed"], ids=["done", "failed"])


@pytest.fixture
def many() -> Decode:
    side = Decode(writers=WRITERS)
    side.offered()
    return side


@pytest.fixture
def two_dp_ranks() -> Decode:
    """Attempt 1 is served by one DP rank of prefill, attempt 2 by another, in one room."""
    side = Decode()
    side.do(PeerReady(PREFILL_2, f.VERSION_MAX))
    side.do(Linked("p:2", (Writer(PREFILL_2, writes_aux=True),)))
    side.offered()
    side.do(OpenAttempt(2, "p:2", 7, "r", 30.0))
    side.do(OfferPages(2, ids(10, 11), 0, 4))
    return side


class TestAllWriters:
    @pytest.mark.parametrize("last", WRITERS)
    def test_attempt_is_done_with_last_writer(self, many: Decode, last: str) -> None:
        for _ in range(2):
            for writer in WRITERS:
                if writer != last:
                    assert names(many.receive(ended(sender=writer, moved=1))) == ["Ack"]
        assert (many.status[1].phase, many.status[1].releasable) == (Phase.TRANSFERRING, False)
        many.receive(ended(sender=last, moved=1))
        assert (many.status[1].phase, many.status[1].bytes_moved) == (Phase.DONE, len(WRITERS))
        assert many.machine.rows == 0

    @pytest.mark.parametrize("last", WRITERS)
    @ENDS
    def test_aborted_attempt_is_released_by_last_writer(self, many: Decode, last: str, cause: str) -> None:
        many.abort()
        for writer in WRITERS:
            if writer != last:
                many.receive(ended(1, cause, sender=writer))
        assert {effect.peer for effect in many.wait(TIMEOUTS.retry_max_s)} == {last}
        many.wait(TIMEOUTS.quiesce_s)
        assert (many.status[1].releasable, len(many.machine.held())) == (False, 1)
        many.receive(ended(1, cause, sender=last))
        assert (many.status[1].releasable, many.machine.rows) == (True, 0)

    def test_failed_writer_stops_the_others(self, many: Decode) -> None:
        effects = many.receive(ended(1, "transfer_failed", sender=WRITERS[3]))
        assert len(sent(effects, f.Abort)) == len(WRITERS) - 1
        assert (many.status[1].cause, many.status[1].message) == (
            Cause.TRANSFER_FAILED,
            "transfer_failed at prefill",
        )

    def test_only_unanswered_writers_get_repetitions(self) -> None:
        side = Decode(writers=(PREFILL, PREFILL_2))
        side.open()
        side.receive(accepted())
        effects = side.wait(0.1)
        assert [effect.peer for effect in effects] == [PREFILL, PREFILL_2]
        assert names(effects) == ["Query", "Open"]

    def test_one_writer_gets_aux_row(self) -> None:
        side = Decode(writers=(PREFILL, PREFILL_2))
        side.open()
        assert [offer.aux_slot for offer in sent(side.offer(), f.Offer)] == [3, f.NO_AUX]

    def test_writer_that_fails_before_offer_frees_memory(self) -> None:
        side = Decode(writers=(PREFILL, PREFILL_2))
        side.open()
        side.receive(ended(1, "aborted"))
        assert side.status[1].releasable, "no memory was offered"
        assert side.machine.rows == 1
        side.receive(ended(1, "peer_aborted", sender=PREFILL_2))
        assert side.machine.rows == 0


class TestEarlierAttempts:
    @ENDS
    def test_ends_of_earlier_attempt_do_not_end_next(self, many: Decode, cause: str) -> None:
        many.abort()
        for writer in WRITERS:
            many.receive(ended(1, "peer_aborted", sender=writer))
        many.offered(2)
        for writer in WRITERS:
            effects = many.receive(ended(1, cause, sender=writer))
            assert (names(effects), ignored(effects)) == (["Ack"], ["stale"])
        assert many.status[2].phase is Phase.TRANSFERRING
        many.abort(2)
        for writer in WRITERS:
            many.receive(ended(1, cause, sender=writer))
        assert not many.status[2].releasable


class TestOtherInstances:
    @pytest.mark.parametrize(
        "frame",
        [
            accepted(sender=PREFILL_2),
            ended(sender=PREFILL_2),
            ended(1, "transfer_failed", settled=False, sender=PREFILL_2),
            ended(1, "transfer_failed", sender=PREFILL_2),
        ],
        ids=["accepted", "done", "unsettled", "failed"],
    )
    def test_frames_of_other_dp_rank_are_dropped(self, two_dp_ranks: Decode, frame: f.AttemptFrame) -> None:
        side = two_dp_ranks
        before = dict(side.status)
        assert ignored(side.receive(frame)) == ["stranger"]
        assert side.status == before
        side.abort(1)
        assert ignored(side.receive(frame)) == ["stranger"]
        assert not side.status[1].releasable
        assert [attempt.state for attempt in side.machine.under_way(PREFILL_2)] == [DecodeState.OFFERED]
