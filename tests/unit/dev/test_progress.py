"""Output of a long wait."""

import io
import threading

import pytest

from dev.demo.screen import Screen
from dev.progress import APART_S, EVERY_S, UNCHANGED_S, Progress, ticking


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(stream: io.StringIO, texts: list[str], every_s: float) -> list[str]:
    clock = _Seconds()
    progress = Progress("  ", stream, clock)
    for text in texts:
        clock.now += every_s
        progress.show(text)
    progress.clear()
    return stream.getvalue().split("\r\x1b[K" if stream.isatty() else "\n")


def test_a_terminal_has_one_line_that_is_rewritten_and_then_removed() -> None:
    assert shown(_Terminal(), ["1 of 3", "1 of 3"], EVERY_S) == ["", "  1 of 3 [2 s]", "  1 of 3 [4 s]", ""]


def test_a_log_gets_a_line_for_each_change() -> None:
    assert shown(io.StringIO(), ["1 of 3", "1 of 3", "2 of 3"], EVERY_S) == ["  1 of 3 [2 s]", "  2 of 3 [6 s]", ""]


def test_a_log_is_told_now_and_then_that_nothing_changes() -> None:
    assert shown(io.StringIO(), ["1 of 3"] * 2, UNCHANGED_S) == ["  1 of 3 [10 s]", "  1 of 3 [20 s]", ""]


@pytest.mark.parametrize("stream", [io.StringIO, _Terminal])
def test_short_waits_and_quick_changes_print_nothing(stream: type[io.StringIO]) -> None:
    assert shown(stream(), ["1 of 3"], APART_S / 2) == [""]


def test_a_line_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert shown(_Terminal(), ["x" * 50], EVERY_S)[1] == "  " + "x" * 17


def test_a_block_that_blocks_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dev.progress.EVERY_S", 0.01)
    stream, clock, asked = io.StringIO(), _Seconds(), threading.Event()

    def state() -> str:
        clock.now += EVERY_S
        asked.set()
        return "still at it"

    with ticking(Progress("", stream, clock), state):
        assert asked.wait(10)
    assert stream.getvalue().startswith("still at it [2 s]\n")


def test_a_wait_shows_what_it_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("dev.progress.APART_S", 0.0)
    reasons = iter(["two pods left", "one pod left", None])
    Screen().wait("all to be gone", lambda: next(reasons), deadline_s=10, interval_s=0)
    assert [line.split(" [")[0].strip() for line in capsys.readouterr().out.splitlines()] == [
        "waiting for all to be gone (at most 10 s)",
        "two pods left",
        "one pod left",
    ]
