"""Run real SGLang 0.5.23 on CPU with pdpool: tokens, aborts, faults, and beside SGLang's own NIXL backend.

The first run makes an environment of about 6 GB. An interrupted run is continued by the next one.
"""

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Final, NoReturn

import click

from dev.paths import cache_dir
from proof.engines import bench, faults, report, storm, tokens
from proof.engines.environment import EnginesError, ensure
from proof.engines.play import Play
from proof.engines.record import Record, sources_digest, summary
from proof.engines.servers import Stage

PARTS: Final = ("tokens", "aborts", "faults", "bench")
PROMPTS: Final = 52
"""For each topology."""
ABORTS: Final = 500
TIMES: Final = 5
SMOKE_PROMPTS: Final = 44
SMOKE_ABORTS: Final = 60
DURATIONS: Final = {
    "tokens": "8 minutes",
    "aborts": "4 minutes",
    "faults": "45 minutes",
    "bench": "25 minutes",
    "smoke": "6 minutes",
}
"""On two idle cores, without the installation."""


async def play_parts(play: Play, parts: tuple[str, ...], prompts: int, aborts: int, times: int) -> None:
    """Run parts one after the other."""
    for part in parts:
        click.echo(f"engines: {part}, about {DURATIONS[part]}")
        if part == "smoke":
            await tokens.run(play, tokens.SETUPS[:1], SMOKE_PROMPTS)
            await storm.run(play, SMOKE_ABORTS)
            await faults.run(play, 1, faults.SMOKE)
        elif part == "tokens":
            await tokens.run(play, tokens.SETUPS, prompts)
        elif part == "aborts":
            await storm.run(play, aborts)
        elif part == "faults":
            await faults.run(play, times, tuple(faults.FAULTS))
        else:
            await bench.run(play)


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(143)


@click.command(help=__doc__)
@click.option(
    "--part",
    "only",
    type=click.Choice([*PARTS, "smoke"]),
    multiple=True,
    help="Only this part.  [default: all but smoke]",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Logs and results.  [default: the cache]")
@click.option("--docs", type=click.Path(path_type=Path, file_okay=False), help="Write the benchmark's page here.")
@click.option("--fresh", is_flag=True, help="Start from the beginning where an earlier run was interrupted.")
@click.option("--prompts", default=PROMPTS, show_default=True, help="Prompts of each topology.")
@click.option("--aborts", default=ABORTS, show_default=True, help="Aborted requests.")
@click.option("--times", default=TIMES, show_default=True, help="How often each fault is tried.")
def main(
    only: tuple[str, ...], out: Path | None, docs: Path | None, fresh: bool, prompts: int, aborts: int, times: int
) -> None:
    """Run the parts, print the last line."""
    signal.signal(signal.SIGTERM, _terminated)
    begun = time.monotonic()
    parts = only or PARTS
    try:
        environment = ensure()
        folder = out or cache_dir() / "engines" / "runs" / ("-".join(only) or "all")
        click.echo(f"engines: logs and results are in {folder}")
        settings = f"{sources_digest()} {parts} {prompts} {aborts} {times}"
        record = Record(folder / "results.json", settings, fresh=fresh)
        if record.steps:
            click.echo(f"engines: continuing an interrupted run, done before: {', '.join(record.steps)}")
        with Stage(environment, folder) as stage:
            asyncio.run(play_parts(Play(stage, record), parts, prompts, aborts, times))
    except EnginesError as error:
        click.echo(f"engines: {error}", err=True)
        sys.exit(1)
    record.finish()
    if docs and "bench ratios" in record.steps:
        report.write(docs, bench.figures_of(record.steps), record.steps["bench ratios"])
    click.echo(f"engines: {time.monotonic() - begun:.0f} s in this run")
    fine, line = summary(record.steps)
    click.echo(line)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
