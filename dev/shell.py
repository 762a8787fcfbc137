"""Runs commands, writes files and waits for conditions. Errors say what happened."""

import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from dev.progress import Progress, ticking


class CommandError(RuntimeError):
    """A command failed. The message has the command and the end of its output."""


def run(
    *command: str | Path,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> str:
    """Run a command and return its standard output.

    Args:
        command: program and arguments.
        stdin: text for standard input.
        env: additional environment variables.
        timeout_s: time after which the command is killed.

    Raises:
        CommandError: it cannot be started, ended with another code than 0, or took longer than `timeout_s`.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            env=os.environ | dict(env or {}),
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"`{' '.join(words)}`: {error}") from error
    if done.returncode:
        raise CommandError(f"`{' '.join(words)}` ended with {done.returncode}: {(done.stderr or done.stdout)[-3000:]}")
    return done.stdout


def write_text(path: Path, text: str) -> None:
    """Write a file so that readers see the old or the new content, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.rename(path)


class Clock:
    """Prints lines with the seconds since its creation."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Print one line."""
        print(f"{self._label} [{self.elapsed_s:6.1f} s] {text}", flush=True)

    def ticking(self, state: Callable[[], str]) -> AbstractContextManager[None]:
        """Show `state()` while the block runs. `state` must not raise, and the block must not print."""
        return ticking(Progress(f"{self._label}            "), state)


@contextmanager
def exclusively(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock file. If another process holds it, print that and wait.

    Args:
        lock: the file. The kernel releases it when its holder ends, even by a crash.
        what: activity of the holder, for the message.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is {what} ({lock}); waiting for it", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def wait_for(what: str, unmet: Callable[[], str | None], *, deadline_s: float, interval_s: float = 0.3) -> None:
    """Check a condition repeatedly until it holds.

    Args:
        what: the condition, for the error.
        unmet: returns None when it holds, else the reason.
        deadline_s: longest wait.
        interval_s: time between checks.

    Raises:
        TimeoutError: it did not hold in time. The message has the last reason.
    """
    end = time.monotonic() + deadline_s
    while (reason := unmet()) is not None:
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not so after {deadline_s:.0f} s: {reason}")
        time.sleep(interval_s)
