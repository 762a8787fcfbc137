"""The soak itself: a short one passes, and one over a broken connector does not."""

import re

import pytest
from click.testing import CliRunner

from dev.soak.__main__ import main


def soak(*arguments: str) -> tuple[int, dict[str, int], str]:
    done = CliRunner().invoke(main, arguments)
    last = done.output.strip().splitlines()[-1]
    return done.exit_code, {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", last)}, done.output


@pytest.mark.parametrize("engine", ["nixl-cma", "nixl-tcp"])
def test_hundreds_of_aborted_hand_offs_leave_no_byte_and_no_row_out_of_place(engine: str) -> None:
    late = []
    while not any(late):  # few aborts meet a write under way
        assert len(late) < 4, "no abort met a write under way"
        code, counts, output = soak("--aborts", "250", "--engine", engine)
        assert code == 0, output
        assert counts["aborted"] >= 250
        assert (counts["stale_bytes"], counts["leaked_rows"]) == (0, 0)
        late.append(int(re.search(r"bytes came after the abort in (\d+)", output)[1]))


@pytest.mark.parametrize(("fault", "count"), [("release", "stale_bytes"), ("keep", "leaked_rows")])
def test_a_broken_connector_is_found_out(fault: str, count: str, monkeypatch) -> None:
    monkeypatch.setenv("PDPOOL_BREAK", fault)
    broken = "tests.integration.soak_broken_decode"
    code, counts, output = soak("--aborts", "300", "--engine", "nixl-tcp", "--decode-module", broken)
    assert code == 1, output
    assert counts[count] > 0, output
