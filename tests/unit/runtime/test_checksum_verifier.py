"""Decode's check of pages that have landed, beside the ends of hand-offs and of peers."""

import threading

import numpy as np
import pytest
from pdpool_connector import Cause
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import AbortTransfer, Received
from pdpool_connector.runtime.checksum_verifier import ChecksumVerifier, Written

PREFILL, OTHER, DECODE = "a" * 32, "b" * 32, "d" * 32
ATTEMPT = f.AttemptId(DECODE, 1)
PAGES = np.array([0, 1], "<i4").tobytes()
LANDED = 777


class Decode:
    """The events that the machine gets, and a thread that hashes once it is released."""

    def __init__(self, rate: float = 1.0) -> None:
        self.events: list = []
        self.posted: list = []
        self.hashed = threading.Event()
        self.released = threading.Event()
        self.error: Exception | None = None
        self.verifier = ChecksumVerifier(self.page_sum, self.events.append, self.post, rate)

    def page_sum(self, pages: list[int]) -> int:
        assert pages == [0, 1]
        assert self.released.wait(30)
        if self.error is not None:
            raise self.error
        return LANDED

    def post(self, call) -> None:
        self.posted.append(call)
        self.hashed.set()

    def receive(self, checksum: int | None, sender=PREFILL, unsettled=(PREFILL,), writers=(PREFILL,)) -> f.Ended:
        ended = f.Ended(
            version=f.VERSION_MAX, sender=sender, attempt=ATTEMPT, room=1, cause="", settled=True, checksum=checksum
        )
        self.verifier.done(ended, Written(writers, unsettled, PAGES))
        return ended

    def finish(self) -> None:
        self.hashed.clear()
        self.released.set()
        assert self.hashed.wait(30)
        self.turn()

    def turn(self) -> None:
        calls, self.posted = self.posted, []
        for call in calls:
            call()

    def outcomes(self) -> dict[str, int]:
        return {name: count for name, count in self.verifier.outcomes.items() if count}


@pytest.fixture
def decode():
    made = Decode()
    yield made
    made.released.set()
    made.verifier.close()


def test_equal_sums_let_the_result_pass(decode):
    ended = decode.receive(LANDED)
    assert decode.events == []
    decode.finish()
    assert decode.events == [Received(ended)]
    assert decode.outcomes() == {"matched": 1}


def test_sums_of_all_writers_are_added(decode):
    both = (PREFILL, OTHER)
    first = decode.receive(700, OTHER, unsettled=both, writers=both)
    assert decode.events == [Received(first)]
    last = decode.receive(77, PREFILL, unsettled=(PREFILL,), writers=both)
    decode.finish()
    assert decode.events == [Received(first), Received(last)]
    assert decode.outcomes() == {"matched": 1}


def test_mismatch_aborts_before_the_result(decode):
    ended = decode.receive(12345)
    decode.finish()
    abort, received = decode.events
    assert (type(abort), abort.cause, received) == (AbortTransfer, Cause.CORRUPT, Received(ended))
    assert decode.outcomes() == {"mismatched": 1}


def test_missing_sums_count_as_skipped_once(decode):
    both = (PREFILL, OTHER)
    ended = [
        decode.receive(None, OTHER, unsettled=both, writers=both),
        decode.receive(None, PREFILL, unsettled=(PREFILL,), writers=both),
    ]
    assert decode.events == [Received(one) for one in ended]
    assert decode.outcomes() == {"skipped": 1}


def test_missing_sum_of_an_unsampled_attempt_is_not_counted():
    decode = Decode(rate=0.0)
    decode.receive(None)
    assert decode.outcomes() == {}
    decode.verifier.close()


def test_repeated_result_does_not_overtake_the_check(decode):
    decode.receive(LANDED)
    decode.receive(LANDED)
    assert decode.events == []
    decode.finish()
    assert len(decode.events) == 1


def test_check_after_the_end_says_nothing(decode):
    ended = decode.receive(12345)
    decode.verifier.ended(ATTEMPT)
    decode.turn()
    assert decode.events == [Received(ended)], "the aborted attempt waits for the result of its writer"
    decode.finish()
    assert decode.events == [Received(ended)]
    assert decode.outcomes() == {"skipped": 1}


def test_loss_of_a_peer_passes_its_result_on_first(decode):
    ended = decode.receive(12345)
    decode.verifier.lost(OTHER)
    assert decode.events == []
    decode.verifier.lost(PREFILL)
    decode.verifier.lost(PREFILL)
    assert decode.events == [Received(ended)]
    decode.finish()
    assert decode.events == [Received(ended)]
    assert decode.outcomes() == {"skipped": 1}


def test_result_passes_where_no_thread_is_left(decode, monkeypatch):
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert decode.events == [Received(decode.receive(12345))]
    assert decode.outcomes() == {"skipped": 1}


def test_result_passes_where_no_sum_can_be_taken(decode, caplog):
    decode.error = OSError("the memory is not mapped any more")
    ended = decode.receive(12345)
    decode.finish()
    assert decode.events == [Received(ended)]
    assert decode.outcomes() == {"skipped": 1}
    assert "a checksum could not be taken" in caplog.text
