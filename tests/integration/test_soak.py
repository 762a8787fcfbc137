"""The soak itself: a short one passes, and one over a broken connector does not."""

import re
from collections import Counter

import pytest
from click.testing import CliRunner

from proof.soak.__main__ import check_power, main
from proof.soak.fleet import SoakError, Total


def soak(*arguments: str) -> tuple[int, dict[str, int], str]:
    done = CliRunner().invoke(main, arguments)
    last = done.output.strip().splitlines()[-1]
    return done.exit_code, {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", last)}, done.output


@pytest.mark.parametrize("plane", ["nixl-cma", "nixl-tcp"])
def test_hundreds_of_aborts_leave_nothing_behind(plane: str) -> None:
    late = []
    while not any(late):  # few aborts come during a write
        assert len(late) < 4, "no abort came during a write"
        code, counts, output = soak("--aborts", "250", "--plane", plane)
        assert code == 0, output
        assert counts["aborted"] >= 250
        assert (counts["stale_bytes"], counts["leaked_rows"]) == (0, 0)
        late.append(int(re.search(r"bytes came after the abort in (\d+)", output)[1]))


def test_soak_without_aborts_during_writes_fails() -> None:
    many, few = Counter(aborted=20_000, done=1), Counter(aborted=250)
    check_power(Total(many, late=200))
    check_power(Total(few, late=0))
    with pytest.raises(SoakError, match="bytes came after 199 of 20000 aborts, at least 200 must be so"):
        check_power(Total(many, late=199))
    with pytest.raises(SoakError, match="no hand-off was done"):
        check_power(Total(Counter(aborted=20_000), late=200))


def test_soak_with_an_unasked_end_fails() -> None:
    with pytest.raises(SoakError, match="no side aborted ended as peer_lost, timed_out"):
        check_power(Total(Counter(aborted=1, done=1, timed_out=1, peer_lost=2)))


@pytest.mark.parametrize(("fault", "count"), [("release", "stale_bytes"), ("keep", "leaked_rows")])
def test_soak_finds_a_broken_connector(fault: str, count: str, monkeypatch) -> None:
    monkeypatch.setenv("PDPOOL_BREAK", fault)
    broken = "tests.integration.soak_broken_decode"
    code, counts, output = soak("--aborts", "300", "--plane", "nixl-tcp", "--decode-module", broken)
    assert code == 1, output
    assert counts[count] > 0, output
