"""Signals to processes that experiments and tests have started."""

import contextlib
import os
import signal
import subprocess
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


def members(leader: int) -> list[int]:
    """Return the ids of the processes of a group, by that of its leader."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(int(entry.name)) == leader:
                    found.append(int(entry.name))
    return found


def kill_group(leader: "subprocess.Popen[bytes]", within_s: float) -> None:
    """Kill all processes of a group at once, and wait for the end of its leader."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait(within_s)


def end_group(leader: "subprocess.Popen[bytes]", within_s: float) -> None:
    """End a group by SIGTERM to its leader, and what is left after `within_s` by SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGCONT)
        leader.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        leader.wait(within_s)
    kill_group(leader, within_s)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):  # ended since it was listed
        return "X"
