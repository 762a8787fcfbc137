"""Faults on the local cluster: does the operator name the instance at fault, and restart it.

All of them three times in both modes take about four hours. An interrupted session is continued by the next one, unless
the code has changed. Exit code 1: a run was not right, or not all were played.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from dev.paths import cache_dir
from dev.shell import Clock
from dev.tools.build import BuildError
from proof.cluster.options import session_options
from proof.cluster.page import write
from proof.cluster.results import Results, sources_digest
from proof.cluster.session import exit_on_sigterm, session
from proof.cluster.stage import Stage
from proof.faults.deeds import PLAYS
from proof.faults.expectation import Expectation, Mode, read
from proof.faults.play import FAILED, play
from proof.faults.report import line, matrix, table
from proof.faults.score import Run, summary, wrong
from tests.cluster.stack_setup import right_answers

TIMES: Final = 3
AROUND_S: Final = 90.0
"""Duration of what surrounds a fault, in seconds: new pools, the traffic's start, the recovery."""

Todo = list[tuple[str, Mode, int]]


def pending(names: Sequence[str], modes: Sequence[Mode], runs: Sequence[Run], times: int) -> Todo:
    """Return the runs that are still to be played: the first of every scenario before the second of any."""
    played = Counter((run.scenario, run.mode) for run in runs)
    return [
        (name, mode, number)
        for number in range(1, times + 1)
        for mode in modes
        for name in names
        if played[name, mode] < number
    ]


def play_all(wanted: Mapping[str, Expectation], todo: Todo, results: Results[Run], end: float) -> None:
    """Play until all is done or `end`, a time of the monotonic clock, would be passed."""
    if not todo:
        return
    clock = Clock("faults")
    lasts = {name: one.lasts_s + AROUND_S for name, one in PLAYS.items()}
    with session(clock) as (stack, state):
        stage, answers = Stage(stack, state, routers=1), right_answers()
        for done, (name, mode, number) in enumerate(todo):
            if time.monotonic() + lasts[name] > end:
                clock.say(f"no time for {name} {mode} #{number} within --minutes")
                return
            rest = sum(lasts[left] for left, _, _ in todo[done:])
            clock.say(f"{done + 1} of {len(todo)}, about {rest / 60:.0f} min left: {name} {mode}: {wanted[name].about}")
            run = play(name, wanted[name], mode, number, stage, answers, clock)
            results.add(run)
            clock.say(line(wanted[name], run))


@click.command(help=__doc__)
@session_options("scenario", list(PLAYS), TIMES)
@click.option("--mode", type=click.Choice([str(one) for one in Mode]), help="Of repair.  [default: both]")
def main(
    times: int,
    only: tuple[str, ...],
    mode: str | None,
    minutes: float | None,
    fresh: bool,
    results: Path | None,
    docs: Path | None,
    listing: bool,
) -> None:
    """Play faults, print the last line."""
    wanted = read()
    if listing:
        for name, one in wanted.items():
            click.echo(f"{name:18} {one.about}")
        return
    exit_on_sigterm()
    names = [name for name in PLAYS if not only or name in only]
    modes = [Mode(mode)] if mode else list(Mode)
    file = results or cache_dir() / "faults" / "results.jsonl"
    kept = Results(Run, file, sources_digest("proof/faults"), fresh=fresh)
    if kept.runs:
        click.echo(f"faults: continuing an interrupted session with {len(kept.runs)} runs")
    end = time.monotonic() + minutes * 60 if minutes else float("inf")
    try:
        play_all(wanted, pending(names, modes, kept.runs, times), kept, end)
    except (BuildError, RuntimeError, *FAILED) as error:
        click.echo(f"faults: {type(error).__name__}: {error}"[:600], err=True)
    of_these = [run for run in kept.runs if run.scenario in names and run.mode in modes]
    fine, last = summary(wanted, of_these, len(names) * len(modes) * times)
    for run in of_these:
        if wrong(wanted[run.scenario], run):
            click.echo(line(wanted[run.scenario], run))
    for row in matrix(wanted, of_these):
        click.echo(row)
    if docs and kept.runs:
        write(docs, "faults", table(wanted, kept.runs), summary(wanted, kept.runs, len(kept.runs))[1])
    if not pending(list(PLAYS), list(Mode), kept.runs, times):
        kept.finish()
    click.echo(last)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
