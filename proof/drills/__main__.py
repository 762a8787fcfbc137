"""Drills on the local cluster: faults and changes under steady traffic, the words that pdpool gives, what is lost.

All of them three times take about 65 minutes. An interrupted session is continued by the next one, unless the code has
changed. Exit code 1: a run was not right, or not all were played.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from dev.images.build import IMAGES
from dev.paths import cache_dir
from dev.prometheus import deploy
from dev.shell import Clock, run
from dev.tools.build import BuildError, binary
from proof.cluster import dashboard
from proof.cluster.options import session_options
from proof.cluster.page import write
from proof.cluster.results import Results, sources_digest
from proof.cluster.session import exit_on_sigterm, session
from proof.cluster.stage import Stage, thaw
from proof.cluster.witness import prometheus_url
from proof.cluster.words import Expected
from proof.drills.catalogue import DRILLS
from proof.drills.play import FAILED, play, shortened
from proof.drills.report import lines, table
from proof.drills.scenario import Scenario
from proof.drills.verdict import Run, faults, summary
from tests.cluster.stack_setup import right_answers

TIMES: Final = 3
AROUND_S: Final = 60.0
"""Duration of what surrounds each deed, in seconds: the first state, the traffic's start, empty queues."""
WINDOWS: Final = {
    "noProgress": "12s",
    "bootstrapQueueStuck": "15s",
    "instanceStuck": "10s",
    "instanceFailing": "10s",
    "cannotServe": "10s",
    "operatorDown": "1m",
}
"""Shorter than the chart's, so that a drill takes minutes. Prometheus scrapes every 3 s here."""
VALUES: Final = {"rules": {"configMap": {"namespace": deploy.NAMESPACE}, "windows": WINDOWS}}


def pending(drills: Sequence[Scenario], results: Results[Run], times: int) -> list[tuple[Scenario, int]]:
    """Return the runs that are still to be played: the first of every drill before the second of any."""
    return [
        (one, number)
        for number in range(1, times + 1)
        for one in drills
        if sum(run.drill == one.name for run in results.runs) < number
    ]


def play_all(
    drills: Sequence[Scenario], results: Results[Run], times: int, end: float, picture: Path | None = None
) -> None:
    """Play what is pending until all is done or `end`, a time of the monotonic clock, would be passed.

    `picture`: the file for what the dashboard then shows of this time.
    """
    clock = Clock("drills")
    todo = pending(drills, results, times)
    if not todo:
        return
    with session(clock, deploy.NAMESPACE, more_images=("prometheus",), values=VALUES) as (stack, state):
        stage = Stage(stack, state)
        try:
            deploy.deploy(stack.kubectl, IMAGES["prometheus"].tag, IMAGES["operator"].tag)
            expected = right_answers()
            began = time.time()
            while todo:
                scenario, number = todo.pop(0)
                if time.monotonic() + scenario.lasts_s + AROUND_S > end:
                    clock.say(f"no time for {scenario.name} #{number} within --minutes")
                    return
                rest = sum(one.lasts_s + AROUND_S for one, _ in todo) + scenario.lasts_s + AROUND_S
                clock.say(f"{scenario.name} #{number} of {times}: {scenario.about}")
                done = play(scenario, number, stage, expected, clock, f"about {rest / 60:.0f} min left in all")
                results.add(done)
                for line in lines(scenario, done):
                    clock.say(line)
            if picture:
                dashboard.draw(dashboard.read(prometheus_url(stack), began, time.time()), began, picture)
        finally:
            thaw(state)  # kubectl needs the API server
            kinds = "clusterrole,clusterrolebinding"
            run(binary("kubectl"), "delete", kinds, "pdpool-dev-prometheus", "--ignore-not-found")


@click.command(help=__doc__)
@session_options("drill", [one.name for one in DRILLS], TIMES)
@click.option(
    "--dashboard", "picture", type=click.Path(path_type=Path, dir_okay=False), help="Draw the dashboard here."
)
def main(
    times: int,
    only: tuple[str, ...],
    minutes: float | None,
    fresh: bool,
    results: Path | None,
    docs: Path | None,
    listing: bool,
    picture: Path | None,
) -> None:
    """Play drills, print the last line."""
    if listing:
        for one in DRILLS:
            click.echo(f"{one.name:20} {one.about} (about {one.lasts_s:.0f} s)")
        return
    exit_on_sigterm()
    drills = [one for one in DRILLS if not only or one.name in only]
    kept = Results(
        Run, results or cache_dir() / "drills" / "results.jsonl", sources_digest("proof/drills"), fresh=fresh
    )
    if kept.runs:
        click.echo(f"drills: continuing an interrupted session with {len(kept.runs)} runs")
    end = time.monotonic() + minutes * 60 if minutes else float("inf")
    try:
        play_all(drills, kept, times, end, picture)
    except (BuildError, RuntimeError, *FAILED) as error:
        click.echo(f"drills: {shortened(error)}", err=True)
    expected: dict[str, Expected] = {one.name: one.expected for one in drills}
    fine, line = summary(expected, kept.runs, times)
    for done in kept.runs:
        for reason in faults(expected[done.drill], done) if done.drill in expected else ():
            click.echo(f"{done.drill} #{done.number}: {reason}")
    if docs and kept.runs:
        write(docs, "drills", table(DRILLS, kept.runs), line)
    if not pending(DRILLS, kept, times):
        kept.finish()
    click.echo(line)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
