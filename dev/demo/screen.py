"""Output of the demo: numbered steps, commands as a user would type them, waits with their deadline."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dev.progress import Progress, ticking
from dev.shell import wait_for

INDENT = "   "


class DemoError(RuntimeError):
    """The story cannot continue. The message says what was expected and what was found."""


class Screen:
    """Prints the story. Times in brackets are seconds since its start."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self._began = time.monotonic()
        self._step = 0
        self.doing = "starting"
        """The current activity, for the report of a failure."""
        self._progress = Progress(INDENT)

    def step(self, title: str) -> None:
        """Begin a step."""
        self._step += 1
        self.doing = title
        self.console.print(f"\n[bold cyan]{self._step}. {escape(title)}[/]  [dim]\\[{self._elapsed():.0f} s][/]")

    def say(self, text: str) -> None:
        """Print a sentence."""
        self.console.print(f"   {escape(text)}")

    def command(self, text: str) -> None:
        """Print a command that the demo runs, in a form that can be copied."""
        self.console.print(f"   [green]$ {escape(text)}[/]")

    def block(self, text: str) -> None:
        """Print several lines, indented."""
        for line in text.rstrip().splitlines():
            self.console.print(f"     [dim]{escape(line)}[/]")

    def fragment(self, text: str) -> None:
        """Print a piece of a streamed answer."""
        self.console.print(text, end="", markup=False, style="bold")

    def event(self, since: float, text: str) -> None:
        """Print an observation, with the seconds since a time of `time.monotonic()`."""
        self._progress.clear()
        self.console.print(f"   [yellow]+{time.monotonic() - since:5.1f} s[/]  {escape(text)}")

    def wait(self, what: str, unmet: Callable[[], str | None], deadline_s: float, interval_s: float = 0.5) -> float:
        """Wait for a condition while showing what is missing. Return the seconds it took.

        Args:
            what: the condition.
            unmet: returns None when it holds, else the reason.
            deadline_s: longest wait.
            interval_s: time between checks.

        Raises:
            TimeoutError: the condition did not hold in time.
        """
        began = time.monotonic()
        self.say(f"waiting for {what} (at most {deadline_s:.0f} s)")
        self._progress = Progress(INDENT)

        def shown() -> str | None:
            if (reason := unmet()) is not None:
                self._progress.show(reason)
            return reason

        try:
            wait_for(what, shown, deadline_s=deadline_s, interval_s=interval_s)
        finally:
            self._progress.clear()
        return time.monotonic() - began

    def ticking(self, state: Callable[[], str]) -> AbstractContextManager[None]:
        """Show `state()` while the block runs. `state` must not raise, and the block must not print."""
        return ticking(Progress(INDENT), state)

    @contextmanager
    def counting(self, total: int, what: str) -> Iterator[Callable[[], None]]:
        """Return a function to call for each of `total` items. It shows their number: `3 of 32 answered`."""
        done = 0

        def one() -> None:
            nonlocal done
            done += 1

        with self.ticking(lambda: f"{done} of {total} {what}"):
            yield one

    def figures(self, rows: list[tuple[str, str]]) -> None:
        """Print a table of names and values."""
        table = Table(show_header=False, title="what was measured", title_justify="left")
        for name, value in rows:
            table.add_row(escape(name), escape(value))
        self.console.print()
        self.console.print(table)

    def _elapsed(self) -> float:
        return time.monotonic() - self._began
