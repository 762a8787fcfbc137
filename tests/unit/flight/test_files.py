"""Writing records: bounded in rate, number and bytes, and harmless when the disk fails."""

import errno
import os
import time
from pathlib import Path

import pytest
from pdpool_connector.flight import files
from pdpool_connector.flight.files import BURST, Flight, Source, prune
from pdpool_connector.flight.record import SUFFIX, decode_record
from pdpool_connector.flight.recorder import RING
from pdpool_connector.protocol.events import AbortTransfer, Event, OfferPages, OpenAttempt, OpenRequest, Received, Tick
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus
from pdpool_connector.protocol.timeouts import Timeouts

from tests.unit.protocol.sides import Decode, ended

ME = "a" * 32
FAILED = TransferStatus(Phase.FAILED, Cause.TIMED_OUT, "late", releasable=True)
ABORTED = TransferStatus(Phase.FAILED, Cause.PEER_ABORTED, "left", releasable=True)
HELD = TransferStatus(Phase.FAILED, Cause.TIMED_OUT, "late", releasable=False)


def flight(directory: Path, clock=time.monotonic) -> Flight:
    return Flight(directory, Source("prefill", 0, ME, Timeouts()), clock)


def fail(recorder: Flight, handle: int, status: TransferStatus = FAILED) -> None:
    machine = PrefillMachine(ME)
    event = OpenRequest(handle, handle, f"r{handle}", 9.0)
    recorder.note(event, 1.0, machine.handle(event, 1.0))
    recorder.ended(handle, status, 2.0)


def test_many_failures_write_burst_then_few_a_second(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "QUEUE", 1000)
    now = [0.0]
    recorder = flight(tmp_path, lambda: now[0])
    for handle in range(BURST + 10):
        fail(recorder, handle)
    assert recorder.skipped == 10
    now[0] += 1.0
    for handle in range(100, 110):
        fail(recorder, handle)
    assert recorder.skipped == 10 + 10 - files.PER_SECOND
    assert recorder.close(10)
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == BURST + files.PER_SECOND


def test_skipped_failure_is_counted_once(tmp_path):
    now = [0.0]
    recorder = flight(tmp_path, lambda: now[0])
    for handle in range(BURST):
        fail(recorder, handle)
    for status in (HELD, FAILED):
        now[0] += 10.0 * (status is FAILED)
        recorder.ended(100, status, now[0])
    assert recorder.lost()["skipped"] == 1
    assert recorder.close(10)


def test_written_record_can_be_read(tmp_path) -> None:
    recorder = flight(tmp_path / "made" / "for it")
    fail(recorder, 1)
    assert recorder.close(10)
    (path,) = (tmp_path / "made" / "for it").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    header = decode_record(path.read_bytes()).header
    assert (header.room, header.request_id, header.cause, header.message) == (1, "r1", "timed_out", "late")


def test_record_without_beginning_replaces_no_whole_one(tmp_path) -> None:
    recorder, decode = flight(tmp_path), Decode()

    def do(*events: Event) -> None:
        for event in events:
            recorder.note(event, decode.now, decode.do(event), decode.machine.fired)

    do(OpenAttempt(1, "p:1", 7, "r", 30.0), OfferPages(1, b""), AbortTransfer(1, "client left"))
    recorder.ended(1, decode.status[1], decode.now)
    for _ in range(RING + 1):  # prefill is frozen, and gets one Abort after another
        decode.now = decode.machine.next_deadline
        do(Tick())
    do(Received(ended(1, "peer_aborted")))
    assert decode.status[1].releasable
    recorder.ended(1, decode.status[1], decode.now)
    assert recorder.close(10)
    (path,) = tmp_path.iterdir()
    record = decode_record(path.read_bytes())
    assert (record.header.missing, record.header.releasable) == (0, False)


def test_missing_directory_is_counted_and_logged(tmp_path, caplog) -> None:
    recorder = flight(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    fail(recorder, 1)
    assert recorder.close(10)
    assert recorder.unwritten == 1
    assert "could not be written" in caplog.text


def test_partial_file_is_removed_when_disk_is_full(tmp_path, monkeypatch) -> None:
    whole = Path.write_bytes

    def full(path: Path, data: bytes) -> None:
        whole(path, data[:10])
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    recorder = flight(tmp_path)
    fail(recorder, 1)
    assert recorder.close(10)
    assert recorder.unwritten == 1
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_made_is_an_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        flight(tmp_path / "file" / "below")


@pytest.mark.parametrize(("max_files", "max_bytes"), [(3, 10**6), (100, 30)])
@pytest.mark.parametrize("suffix", [SUFFIX, ".flight.part"])
def test_oldest_records_are_removed_first(tmp_path, max_files, max_bytes, suffix) -> None:
    (tmp_path / "other").write_bytes(b"x" * 1000)
    for index in range(6):
        path = tmp_path / f"{index}{suffix}"
        path.write_bytes(b"x" * 10)
        os.utime(path, (index, index))
    prune(tmp_path, max_files, max_bytes)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(f"{i}{suffix}" for i in (3, 4, 5)), "other"]


def test_aborts_displace_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "QUEUE", 1000)
    now = [0.0]
    recorder = flight(tmp_path, lambda: now[0])
    for handle in range(100):
        now[0] += 0.1
        fail(recorder, handle, ABORTED)
    lost = recorder.skipped
    assert lost > 0
    fail(recorder, 1000)
    assert recorder.skipped == lost
    for handle in range(2000, 2100):
        now[0] += 0.1
        fail(recorder, handle, ABORTED)
    assert recorder.close(10)
    prune(tmp_path, max_files=2)
    left = [decode_record(path.read_bytes()).header for path in tmp_path.iterdir()]
    assert sorted(header.cause for header in left) == ["peer_aborted", "timed_out"]
