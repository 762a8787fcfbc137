"""Allows one demo at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

import click

from dev.paths import cache_dir


@contextmanager
def alone() -> Iterator[None]:
    """Allow one demo at a time on this machine, because two would remove each other's pools.

    Raises:
        click.ClickException: another demo runs. The message has its process id.
    """
    path = cache_dir() / "demo.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise click.ClickException(
                f"another demo is running on this machine, as process {handle.read().strip() or 'unknown'} (it holds "
                f"{path}): wait until it has ended, or press Ctrl-C there"
            ) from None
        handle.truncate(0)
        print(os.getpid(), file=handle, flush=True)
        yield
