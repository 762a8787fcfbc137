"""Decode's check of pages that have landed, beside the ends of hand-offs and of peers."""

import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from pdpool_connector import Cause, HostArena, KVMemory, Phase, TransferStatus
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import AbortTransfer, Received
from pdpool_connector.runtime.announce import Announcements
from pdpool_connector.runtime.checksum_verifier import ChecksumVerifier

PREFILL, DECODE = "a" * 32, "d" * 32
ATTEMPT = f.AttemptId(DECODE, 1)
PAGES = np.array([0, 1], "<i4").tobytes()


class Decode:
    """What the machine is told, and a thread that hashes when it is let go."""

    def __init__(self, memory: KVMemory) -> None:
        self.told: list = []
        self.posted: list = []
        self.hashed = threading.Event()
        self.checks = ChecksumVerifier(memory, self.told.append, self.post, 1.0)
        whole = self.checks._sums.whole
        self.go_on = threading.Event()
        self.checks._sums.whole = lambda pages: self.go_on.wait(30) and whole(pages)

    def post(self, call) -> None:
        self.posted.append(call)
        self.hashed.set()

    def hear(self, checksum: int | None, writers=(PREFILL,)) -> f.Done:
        done = f.Done(
            version=f.VERSION_MAX, sender=PREFILL, attempt=ATTEMPT, room=1, sibling=0, bytes_moved=0, checksum=checksum
        )
        params = SimpleNamespace(pages=PAGES)
        self.checks.done(done, SimpleNamespace(cause=None, writers=writers, done=set(), params=params))
        return done

    def let_it_end(self) -> None:
        self.hashed.clear()
        self.go_on.set()
        assert self.hashed.wait(30)
        self.turn()

    def turn(self) -> None:
        calls, self.posted = self.posted, []
        for call in calls:
            call()


@pytest.fixture
def decode():
    with HostArena(2 * 256 + 64) as arena:
        memory = KVMemory(
            kv=(arena.region(0, 128, 2), arena.region(256, 128, 2)),
            aux=arena.region(512, 64, 1),
            page_tokens=16,
            layers=1,
            kv_heads=1,
            head_dim=2,
            dtype="float32",
            model="m",
        )
        made = Decode(memory)
        yield made
        made.go_on.set()
        made.checks.close()


def outcomes(decode: Decode) -> dict[str, int]:
    return {name: count for name, count in decode.checks.outcomes.items() if count}


def test_pages_that_are_not_what_was_told_fail_the_hand_off_before_its_end_is_heard(decode):
    done = decode.hear(checksum=12345)
    assert decode.told == []
    decode.let_it_end()
    abort, received = decode.told
    assert (type(abort), abort.cause, received) == (AbortTransfer, Cause.CORRUPT, Received(done))
    assert outcomes(decode) == {"mismatched": 1}


def test_a_hand_off_whose_writers_tell_no_sum_counts_as_skipped_once_where_it_was_to_be_checked(decode):
    told = [decode.hear(checksum=None, writers=(PREFILL, "b" * 32)), decode.hear(checksum=None)]
    assert decode.told == [Received(done) for done in told]
    assert outcomes(decode) == {"skipped": 1}
    decode.checks._rate = 0.0
    decode.hear(checksum=None)
    assert outcomes(decode) == {"skipped": 1}


@pytest.mark.parametrize("releasable", [False, True])
def test_what_pages_hold_after_their_hand_off_has_ended_is_no_corruption(decode, releasable):
    done = decode.hear(checksum=12345)
    decode.checks.ended(ATTEMPT, TransferStatus(Phase.FAILED, Cause.ABORTED, "", releasable=releasable))
    decode.turn()
    assert decode.told == [Received(done)], "one that was given up waits for the word that its writer is done"
    decode.let_it_end()
    assert decode.told == [Received(done)]
    assert outcomes(decode) == {"skipped": 1}


def test_what_a_peer_had_said_is_heard_before_it_is_lost_without_waiting_for_the_check(decode):
    done = decode.hear(checksum=12345)
    decode.checks.lost("b" * 32)
    assert decode.told == []
    decode.checks.lost(PREFILL)
    assert decode.told == [Received(done)]
    decode.checks.lost(PREFILL)
    decode.let_it_end()
    assert decode.told == [Received(done)]
    assert outcomes(decode) == {"skipped": 1}


def computed() -> tuple[f.Computed, SimpleNamespace]:
    exchange = SimpleNamespace(open=SimpleNamespace(prefix_pages=0, pages=PAGES))
    header = {"version": f.VERSION_MAX, "sender": PREFILL, "attempt": ATTEMPT, "room": 1, "sibling": 0}
    return f.Computed(**header, sequence=0, start=0, pages=PAGES, last=True, aux_slot=f.NO_AUX, state=b""), exchange


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_where_no_thread_is_left_to_check_a_hand_off_ends_unchecked(decode, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert decode.told == [Received(decode.hear(checksum=12345))]
    assert outcomes(decode) == {"skipped": 1}


def cannot_be_read(*_: object) -> int:
    raise OSError("the memory is not mapped any more")


def test_where_a_sum_cannot_be_taken_a_hand_off_ends_unchecked(decode, caplog):
    decode.checks._sums.whole = cannot_be_read
    done = decode.hear(checksum=12345)
    assert decode.hashed.wait(30)
    decode.turn()
    assert decode.told == [Received(done)]
    assert outcomes(decode) == {"skipped": 1}
    assert "a checksum could not be taken" in caplog.text


def test_where_a_sum_cannot_be_taken_pages_are_announced_without():
    said: list[f.Computed] = []
    posted = queue.SimpleQueue()
    announcements = Announcements(1.0, posted.put)
    announcements.send(*computed(), cannot_be_read, said.append)
    posted.get(timeout=30)()
    assert said == [computed()[0]]
    announcements.send(*computed(), lambda *_: 77, said.append)
    posted.get(timeout=30)()
    assert said[1].checksum == 77
    announcements.close()


def test_where_no_thread_is_left_to_take_a_sum_pages_are_announced_without(monkeypatch):
    said: list[f.Computed] = []
    announcements = Announcements(1.0, lambda call: call())
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    announcements.send(*computed(), lambda *_: 0, said.append)
    assert said == [computed()[0]]
    announcements.close()
