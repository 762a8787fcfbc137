"""Signals to processes that experiments and tests have started."""

import os
import signal
from pathlib import Path
from typing import Final

from dev.shell import wait_for

_STOP_S: Final = 30.0
_STANDING: Final = frozenset("TtZX")


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process. A stop has taken effect in every thread when this returns.

    The kernel stops each thread when it next runs. On a busy machine some threads answer a peer for milliseconds more.

    Raises:
        TimeoutError: the process does not stop within 30 s.
        ProcessLookupError: there is no such process.
    """
    os.kill(pid, number)
    if number is not signal.SIGSTOP:
        return

    def running() -> str | None:
        states = {_state(task) for task in Path(f"/proc/{pid}/task").iterdir()}
        return f"threads in state {states - _STANDING}" if states - _STANDING else None

    wait_for(f"process {pid} is stopped", running, deadline_s=_STOP_S, interval_s=0.001)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):  # ended since it was listed
        return "X"
