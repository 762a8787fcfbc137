"""Run commands, write files, wait for conditions; errors say what happened."""

import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from dev.progress import Progress, ticking


class CommandError(RuntimeError):
    """A command failed; the message holds the command and the end of its output."""


def run(
    *command: str | Path,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> str:
    """Run a command and return its standard output.

    Args:
        command: program and arguments.
        stdin: text given on standard input; nothing if None.
        env: variables added to this process's own.
        timeout_s: the command is killed after that time.

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
    """Prints lines that carry the seconds since it was made."""

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
        """Show `state()`, which must not raise, while the block runs; the block itself prints nothing."""
        return ticking(Progress(f"{self._label}            "), state)


@contextmanager
def exclusively(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock file; another process that holds it is waited for, and that is said.

    Args:
        lock: the file; the kernel releases it when its holder ends, however that ends.
        what: what the holder does, for the message.
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
    """Ask again until a condition holds.

    Args:
        what: name of the condition, for the error.
        unmet: returns None when the condition holds, else why it does not.
        deadline_s: longest wait.
        interval_s: time between two questions.

    Raises:
        TimeoutError: it did not hold in time; the message holds the last reason.
    """
    end = time.monotonic() + deadline_s
    while (reason := unmet()) is not None:
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not so after {deadline_s:.0f} s: {reason}")
        time.sleep(interval_s)
