"""What real processes show of themselves: flight records that replay, metrics, logs."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from pdpool_connector.cli import main
from pdpool_connector.flight.record import SUFFIX, Record, decode_record
from pdpool_connector.layout.checksum import sampled

from tests.integration.connector_peer import Side
from tests.integration.handoffs import TIMING


@pytest.fixture
def sides(tmp_path):
    """Make sides that record their flights below `tmp_path/role`; all are ended, and must exit cleanly."""
    made: list[Side] = []

    def make(role: str, **options) -> Side:
        options = {"timing": TIMING, "request_deadline_s": 60.0, "flight_dir": str(tmp_path / role), **options}
        made.append(Side(role, "local", **options))
        return made[-1]

    yield make
    codes = [side.end() for side in reversed(made)]
    assert set(codes) <= {0, -signal.SIGKILL}, codes


def meet(prefill: Side, decode: Side, room: int, name: str, pages: Sequence[int] = (8, 3)) -> None:
    prefill.open(name, room)
    decode.open(name, room, prefill=prefill.bootstrap, pages=list(pages), aux_slot=5)


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


@pytest.mark.parametrize("direction", ["write", "read"])
def test_failed_and_aborted_hand_offs_are_recorded_by_both_sides_and_replay(sides, tmp_path, direction) -> None:
    prefill, decode = sides("prefill", direction=direction), sides("decode", direction=direction)
    mover = prefill if direction == "write" else decode
    for room in range(3):
        meet(prefill, decode, room, f"good{room}")
        prefill.send(f"good{room}", [1, 2])
        decode.until(f"good{room}", "done")
    meet(prefill, decode, 7, "aborted")
    prefill.until("aborted", "ready")
    mover.call("hold_writes")
    prefill.send("aborted", [1, 2])
    mover.settle(lambda stats: stats["held_writes"] == 1)
    decode.abort("aborted")
    decode.until("aborted", "ended")
    prefill.until("aborted", "ended")
    mover.call("release_writes")
    meet(prefill, decode, 8, "invalid", pages=(9, 4))
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


def test_a_hand_off_whose_peer_dies_is_recorded_while_its_pages_are_held_and_again_when_fenced(sides, tmp_path) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    meet(prefill, decode, 7, "orphan")
    prefill.until("orphan", "ready")
    prefill.call("hold_writes")
    prefill.send("orphan", [1, 2])
    prefill.settle(lambda stats: stats["held_writes"] == 1)
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


def test_a_record_that_tells_otherwise_than_the_machine_is_shown_with_its_first_difference(sides, tmp_path) -> None:
    prefill = sides("prefill")
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


def test_a_file_that_is_no_record_is_refused(tmp_path) -> None:
    path = tmp_path / "x"
    path.write_text("{}")
    result = CliRunner().invoke(main, ["connector", "replay", str(path)])
    assert result.exit_code == 2
    assert "line 1 is no header" in result.output


def test_one_id_leads_through_the_logs_of_both_sides(sides, capfd) -> None:
    prefill, decode = sides("prefill", log="INFO"), sides("decode", log="INFO")
    meet(prefill, decode, 7, "good")
    prefill.send("good", [1, 2])
    decode.until("good", "done")
    meet(prefill, decode, 8, "bad")
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


def fill(prefill: Side) -> None:
    prefill.pages[:] = np.random.default_rng(1).integers(1, 256, prefill.pages.shape, dtype=np.uint8)


def test_pages_that_land_elsewhere_than_told_fail_the_hand_off_with_a_cause_of_its_own(sides) -> None:
    prefill, decode = sides("prefill", checksum_rate=1.0), sides("decode")
    fill(prefill)
    meet(prefill, decode, 7, "good")
    prefill.send("good", [1], last=False)
    prefill.send("good", [2], start=1)
    assert decode.until("good", "done")["releasable"]
    checked(decode, matched=1)
    prefill.call("corrupt_writes", page=5)
    meet(prefill, decode, 8, "bad")
    prefill.send("bad", [1, 2])
    status = decode.until("bad", "ended")
    assert (status["phase"], status["cause"]) == ("failed", "corrupt")
    assert "checksum" in status["message"]
    decode.until("bad", "releasable")
    checked(decode, matched=1, mismatched=1)
    assert decode.stats()["causes"] == {"corrupt": 1}
    for side in (prefill, decode):
        side.settle(lambda stats: stats["rows"] == stats["kept"] == stats["faults"] == 0)


def test_the_share_of_hand_offs_that_is_checked_is_that_of_the_configuration(sides) -> None:
    prefill, decode = sides("prefill", checksum_rate=0.25), sides("decode")
    fill(prefill)
    for room in range(64):
        meet(prefill, decode, room, f"r{room}")
        prefill.send(f"r{room}", [1, 2])
        decode.until(f"r{room}", "done")
    checked(decode, matched=sum(sampled(number, 0.25) for number in range(1, 65)))


def test_an_abort_while_the_pages_are_being_checked_ends_as_an_abort_or_well_and_leaves_nothing(sides) -> None:
    prefill, decode = sides("prefill", checksum_rate=1.0), sides("decode")
    fill(prefill)
    for room in range(40):
        meet(prefill, decode, room, f"r{room}")
        prefill.send(f"r{room}", [1, 2])
        decode.abort(f"r{room}")
        assert decode.until(f"r{room}", "releasable")["cause"] in (None, "aborted")
    for side in (prefill, decode):
        side.settle(lambda stats: stats["rows"] == stats["kept"] == stats["holds"] == stats["faults"] == 0)
    assert decode.stats()["checksums"]["mismatched"] == 0
