"""What real processes show of themselves: flight records that replay, checksums, logs."""

import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from pdpool_connector.cli import main
from pdpool_connector.flight.record import SUFFIX, Record, decode_record
from pdpool_connector.layout.checksum import sampled

from tests.integration.connector_peer import Side
from tests.integration.handoffs import fill, hold_a_write, open_both, settle_empty


@pytest.fixture
def recorded(sides, tmp_path):
    """Make sides that record their flights below `tmp_path/role`."""
    return lambda role, **options: sides(role, "local", flight_dir=str(tmp_path / role), **options)


def records(directory: Path) -> dict[str, Record]:
    """Records by request id."""
    found = [decode_record(path.read_bytes()) for path in directory.glob(f"*{SUFFIX}")]
    return {record.header.request_id: record for record in found}


def replayed(directory: Path) -> list[str]:
    """Output of `pdpool connector replay` for each record."""
    outputs = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        result = CliRunner().invoke(main, ["connector", "replay", str(path)])
        assert result.exit_code == 0, result.output
        outputs.append(result.output)
    return outputs


def test_failed_hand_offs_are_recorded_and_replay(recorded, tmp_path) -> None:
    prefill, decode = recorded("prefill"), recorded("decode")
    for room in range(3):
        open_both(prefill, decode, room, name=f"good{room}")
        prefill.send(f"good{room}", [1, 2])
        decode.until(f"good{room}", "done")
    hold_a_write(prefill, decode, name="aborted")
    decode.abort("aborted")
    decode.until("aborted", "ended")
    prefill.until("aborted", "ended")
    prefill.call("release_writes")
    open_both(prefill, decode, 8, name="invalid", pages=(9, 4))
    prefill.send("invalid", [1, 2, 3])
    for side in (prefill, decode):
        side.until("aborted", "releasable")
        side.until("invalid", "releasable")
        assert side.end() == 0
    for role in ("prefill", "decode"):
        found = records(tmp_path / role)
        assert set(found) == {"aborted", "invalid"}
        assert all(record.header.releasable for record in found.values())
        outputs = replayed(tmp_path / role)
        assert all("replay ok: events=" in output and "differences=0" in output for output in outputs)
    ours, theirs = records(tmp_path / "prefill"), records(tmp_path / "decode")
    assert (ours["aborted"].header.cause, theirs["aborted"].header.cause) == ("peer_aborted", "aborted")
    assert ours["invalid"].header.cause == theirs["invalid"].header.cause == "invalid"


def test_held_hand_off_is_recorded_again_when_fenced(recorded, tmp_path) -> None:
    prefill, decode = recorded("prefill"), recorded("decode")
    hold_a_write(prefill, decode, name="orphan")
    prefill.kill()
    assert decode.until("orphan", "ended")["cause"] == "peer_lost"
    decode.settle(lambda stats: stats["holds"] == 1)
    deadline = time.monotonic() + 30
    while not (found := records(tmp_path / "decode")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not found["orphan"].header.releasable
    decode.call("fence", incarnation=prefill.incarnation)
    decode.until("orphan", "releasable")
    assert decode.end() == 0
    assert records(tmp_path / "decode")["orphan"].header.releasable
    (output,) = replayed(tmp_path / "decode")
    assert "Fenced" in output
    assert "PeerLost" in output


def test_changed_record_shows_its_first_difference(recorded, tmp_path) -> None:
    prefill = recorded("prefill")
    prefill.open("alone", 3)
    prefill.abort("alone")
    prefill.until("alone", "releasable")
    assert prefill.end() == 0
    (path,) = (tmp_path / "prefill").glob(f"*{SUFFIX}")
    changed = tmp_path / "changed"
    changed.write_bytes(path.read_bytes().replace(b'"phase":"failed"', b'"phase":"done"'))
    result = CliRunner().invoke(main, ["connector", "replay", "--quiet", str(changed)])
    assert result.exit_code == 1
    assert "first difference at step 2" in result.output
    assert "Phase.DONE" in result.output


def test_file_that_is_no_record_is_refused(tmp_path) -> None:
    path = tmp_path / "x"
    path.write_text("{}")
    result = CliRunner().invoke(main, ["connector", "replay", str(path)])
    assert result.exit_code == 2
    assert "line 1 is no header" in result.output


def test_logs_of_both_sides_share_one_id(sides, capfd) -> None:
    prefill, decode = sides("prefill", log="INFO"), sides("decode", log="INFO")
    open_both(prefill, decode, 7, name="good")
    prefill.send("good", [1, 2])
    decode.until("good", "done")
    open_both(prefill, decode, 8, name="bad")
    prefill.until("bad", "ready")
    decode.abort("bad")
    prefill.until("bad", "releasable")
    assert prefill.end() == decode.end() == 0
    text = capfd.readouterr().err
    short = decode.incarnation[:8]
    for room, name, ours, theirs in ((7, "good", "done", "done"), (8, "bad", "aborted", "aborted")):
        number = room - 6
        line = f"attempt={short}/{number} room={room} request_id='{name}'"
        assert text.count(f"prefill rank=0 {line} {ours}") == 1
        assert text.count(f"decode rank=0 {line} prefill={prefill.bootstrap} {theirs}") == 1
    assert "cause=peer_aborted" in text


def checked(side: Side, **outcomes: int) -> None:
    """Wait until as many checks have come out so, and no other."""
    expected = {"matched": 0, "mismatched": 0, "skipped": 0, **outcomes}
    side.settle(lambda stats: stats["checksums"] == expected)


def test_wrong_bytes_fail_the_hand_off_as_corrupt(sides) -> None:
    prefill, decode = sides("prefill", checksum_rate=1.0), sides("decode")
    fill(prefill, 1)
    open_both(prefill, decode, 7, name="good")
    prefill.send("good", [1], last=False)
    prefill.send("good", [2], start=1)
    assert decode.until("good", "done")["releasable"]
    checked(decode, matched=1)
    prefill.call("corrupt_writes", page=5)
    open_both(prefill, decode, 8, name="bad")
    prefill.send("bad", [1, 2])
    status = decode.until("bad", "ended")
    assert (status["phase"], status["cause"]) == ("failed", "corrupt")
    assert "checksum" in status["message"]
    decode.until("bad", "releasable")
    checked(decode, matched=1, mismatched=1)
    assert decode.stats()["causes"] == {"corrupt": 1}
    settle_empty(prefill, decode)


def test_checksum_rate_sets_the_share_that_is_checked(sides) -> None:
    prefill, decode = sides("prefill", checksum_rate=0.25), sides("decode")
    fill(prefill, 1)
    for room in range(64):
        open_both(prefill, decode, room, name=f"r{room}")
        prefill.send(f"r{room}", [1, 2])
        decode.until(f"r{room}", "done")
    checked(decode, matched=sum(sampled(number, 0.25) for number in range(1, 65)))


def test_abort_during_a_check_leaves_nothing(sides) -> None:
    prefill, decode = sides("prefill", checksum_rate=1.0), sides("decode")
    fill(prefill, 1)
    for room in range(40):
        open_both(prefill, decode, room, name=f"r{room}")
        prefill.send(f"r{room}", [1, 2])
        decode.abort(f"r{room}")
        assert decode.until(f"r{room}", "releasable")["cause"] in (None, "aborted")
    settle_empty(prefill, decode)
    assert decode.stats()["checksums"]["mismatched"] == 0
