"""Options that the sessions of drills and of faults have in common."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click

Command = Callable[..., None]


def session_options(what: str, names: Sequence[str], times: int) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of a session.

    Args:
        what: What a session plays, such as `drill`.
        names: All that can be played.
        times: How often each is played by default.
    """
    file = click.Path(path_type=Path, dir_okay=False)
    page = click.Path(path_type=Path, dir_okay=False, exists=True)
    limit = f"Start no {what} that would end later.  [default: no limit]"
    only = f"Only this {what}; can be repeated.  [default: all]"
    fresh = "Start from the beginning where an earlier session was interrupted."
    options = (
        click.option("--times", default=times, show_default=True, type=click.IntRange(1), help=f"Runs of each {what}."),
        click.option("--only", type=click.Choice(names), multiple=True, metavar="NAME", help=only),
        click.option("--minutes", type=click.FloatRange(1), help=limit),
        click.option("--fresh", is_flag=True, help=fresh),
        click.option("--results", type=file, help="JSON lines.  [default: the cache]"),
        click.option("--docs", type=page, help="Write the table here."),
        click.option("--list", "listing", is_flag=True, help=f"Show each {what} and exit."),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
