"""The processes of tests: each request gets a new one, even if an earlier one has failed."""

import functools
import os
from pathlib import Path

import pytest

from tests.integration import forked
from tests.integration.forked import Forked

MODULE = "tests.integration.backend_peer"


def pipe(pid: int | str, descriptor: int) -> str:
    return str(Path(f"/proc/{pid}/fd/{descriptor}").readlink())


def test_a_process_that_came_too_late_is_not_taken_for_the_next(monkeypatch) -> None:
    monkeypatch.setattr(forked, "_parent", functools.cache(forked._parent.__wrapped__))
    monkeypatch.setattr(forked, "FORK_S", 0.001)  # less than the imports before the first fork take
    with pytest.raises(TimeoutError):
        Forked(MODULE, dict(os.environ))
    monkeypatch.setattr(forked, "FORK_S", 180.0)
    process = Forked(MODULE, dict(os.environ))
    process.stdin.write(b'{"command": "usage"}\n')
    process.stdin.flush()
    assert process.stdout.readline(), "it runs"
    assert pipe(process.pid, 0) == pipe("self", process.stdin.fileno())
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()
