"""Each end of a hand-off is logged once, with what finds it in the log of the other side, at a bounded rate."""

import logging

import pytest
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus
from pdpool_connector.runtime.outcome_log import LINES_BURST, LINES_PER_SECOND, RELEASE_BUCKETS, OutcomeLog
from pdpool_connector.runtime.transfer import Transfer

ATTEMPT = AttemptId("b" * 32, 7)
DONE = TransferStatus(Phase.DONE, bytes_moved=4096, releasable=True)
LOST = TransferStatus(Phase.FAILED, Cause.PEER_LOST, "prefill p:1 was restarted")
LOST_FREE = TransferStatus(Phase.FAILED, Cause.PEER_LOST, "prefill p:1 was restarted", releasable=True)
ABORTED = TransferStatus(Phase.FAILED, Cause.PEER_ABORTED, "by the client", releasable=True)


class Side:
    def __init__(self) -> None:
        self.now = 0.0
        self.ends = OutcomeLog("decode", 3, clock=lambda: self.now)

    def open(self) -> Transfer:
        transfer = Transfer(1, 42, "req-1", "", lambda _: None)
        transfer.attempts, transfer.opened_at = (ATTEMPT,), self.now
        return transfer

    def publish(self, transfer: Transfer, status: TransferStatus) -> None:
        self.ends.changed(transfer, status)
        transfer.status = status


@pytest.fixture
def side(caplog) -> Side:
    caplog.set_level(logging.INFO)
    return Side()


def test_failure_is_one_line_with_all_names(side, caplog) -> None:
    transfer = side.open()
    side.now = 1.5
    side.publish(transfer, LOST)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in ("decode rank=3", "attempt=bbbbbbbb/7", "room=42", "request_id='req-1'", "cause=peer_lost", "1.500"):
        assert part in record.getMessage()
    assert "held" in record.getMessage()
    assert "prefill p:1 was restarted" in record.getMessage()


def test_abort_is_no_warning_and_counts_apart(side, caplog) -> None:
    side.publish(side.open(), ABORTED)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert side.ends.outcomes == {"done": 0, "failed": 0, "aborted": 1}
    assert side.ends.causes == {"peer_aborted": 1}


def test_at_debug_every_end_is_logged(side, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(3 * LINES_BURST):
        side.publish(side.open(), DONE)
    assert len([record for record in caplog.records if " done: " in record.getMessage()]) == 3 * LINES_BURST


def test_steps_are_logged_at_debug_only(side, caplog) -> None:
    transfer = side.open()
    side.publish(transfer, TransferStatus(Phase.READY))
    assert not caplog.records
    caplog.set_level(logging.DEBUG)
    side.publish(transfer, TransferStatus(Phase.TRANSFERRING))
    side.publish(transfer, DONE)
    assert [record.levelname for record in caplog.records] == ["DEBUG", "INFO"]
    assert "attempt=bbbbbbbb/7 room=42 request_id='req-1' done: bytes=4096" in caplog.text


def test_late_release_is_timed_and_logged(side, caplog) -> None:
    transfer = side.open()
    side.publish(transfer, LOST)
    side.now = 3.0
    side.publish(transfer, LOST_FREE)
    side.publish(transfer, LOST_FREE)
    assert side.ends.outcomes["failed"] == side.ends.causes["peer_lost"] == 1
    assert "released: 3.000 s after it failed" in caplog.text
    releases = side.ends.releases
    assert sum(releases.counts) == 1
    assert releases.counts[RELEASE_BUCKETS.index(5.0)] == 1
    assert releases.total == 3.0


def test_success_is_no_release(side) -> None:
    side.publish(side.open(), DONE)
    assert sum(side.ends.releases.counts) == 0


def test_storm_of_ends_is_logged_at_a_rate(side, caplog) -> None:
    for _ in range(LINES_BURST + 25):
        side.publish(side.open(), DONE)
    assert len(caplog.records) == LINES_BURST
    side.publish(side.open(), LOST_FREE)
    assert len(caplog.records) == LINES_BURST + 1  # failures have a budget of their own
    side.now += 1.0
    for _ in range(LINES_BURST):
        side.publish(side.open(), DONE)
    assert len(caplog.records) == LINES_BURST + 1 + LINES_PER_SECOND
    assert "(25 like this not logged before)" in caplog.text
    assert side.ends.outcomes["done"] == 2 * LINES_BURST + 25


def test_each_hold_is_logged_once(side, caplog) -> None:
    side.ends.held([ATTEMPT])
    side.ends.held([ATTEMPT])
    assert caplog.text.count("attempt=bbbbbbbb/7 held") == 1
    side.ends.held([])
    side.ends.held([ATTEMPT])
    assert caplog.text.count("attempt=bbbbbbbb/7 held") == 2
