"""Signals to processes that experiments and tests have started."""

import os
import signal
import time
from pathlib import Path
from typing import Final

_STOP_S: Final = 30.0
_STANDING: Final = frozenset("TtZX")


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process; a stop has taken effect in every thread when this returns.

    The kernel stops each thread when it next runs: on a busy machine some answer a peer for milliseconds more.

    Raises TimeoutError when the process does not stop within 30 s, ProcessLookupError when there is none.
    """
    os.kill(pid, number)
    if number is not signal.SIGSTOP:
        return
    deadline = time.monotonic() + _STOP_S
    while not all(_state(task) in _STANDING for task in Path(f"/proc/{pid}/task").iterdir()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} does not stop within {_STOP_S} s")
        time.sleep(0.001)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):  # ended since it was listed
        return "X"
