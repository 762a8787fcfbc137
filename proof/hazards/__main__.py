"""Try each hazard of the catalogue on real processes and transfer backends; the last line counts the verdicts."""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import click
import httpx2 as httpx
from pdpool_reference.demo.launch import LaunchError

from proof.hazards import abort_by_name, corruption, leaks, lifecycle, losses, ranks, served, wedges
from proof.hazards.stage import CATALOGUE, PLANES, Hazard, NotApplicableError, Stage

HAZARDS = 37
assert sorted(CATALOGUE) == list(range(1, HAZARDS + 1)), (
    abort_by_name,
    corruption,
    leaks,
    lifecycle,
    losses,
    ranks,
    served,
    wedges,
)


@dataclass(frozen=True)
class Finding:
    """The verdict on one hazard on one data plane."""

    verdict: str
    """absent, present, or not applicable."""
    detail: str
    seconds: float


def judge(hazard: Hazard, stage: Stage) -> Finding:
    """Run one scenario."""
    begun = time.monotonic()
    try:
        with stage.act(hazard.number):
            detail, verdict = hazard.scenario(stage), "absent"
    except NotApplicableError as reason:
        detail, verdict = str(reason), "not applicable"
    except (AssertionError, OSError, subprocess.TimeoutExpired, httpx.HTTPError, LaunchError) as fault:
        detail, verdict = f"{type(fault).__name__}: {fault}", "present"
    return Finding(verdict, detail, time.monotonic() - begun)


@click.command(help=__doc__)
@click.option("--plane", "planes", type=click.Choice(tuple(PLANES)), multiple=True, help="Only these data planes.")
@click.option("--only", type=click.IntRange(1, HAZARDS), multiple=True, help="Only these hazards, by number.")
@click.option("--seed", type=int, help="Draw the points of aborts and stops as in the run that printed this seed.")
def main(planes: tuple[str, ...], only: tuple[int, ...], seed: int | None) -> None:
    """Print a table and the count."""
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    wanted = sorted(only) or sorted(CATALOGUE)
    verdicts: dict[int, set[str]] = {number: set() for number in wanted}
    log = tempfile.NamedTemporaryFile(prefix="pdpool-hazards-", suffix=".log", delete=False)  # noqa: SIM115
    # Logs of the processes and libraries would mix with the rows.
    os.dup2(log.fileno(), 2)
    click.echo(f"what the processes log: {log.name}; the same points of aborts and stops again: --seed {seed}")
    click.echo("| hazard | what goes wrong in such systems | data plane | here | seconds | observed |")
    click.echo("|---|---|---|---|---|---|")
    for plane in planes or tuple(PLANES):
        stage = Stage(plane, seed)
        try:
            for number in wanted:
                hazard = CATALOGUE[number]
                found = judge(hazard, stage)
                verdicts[number].add(found.verdict)
                detail = " ".join(found.detail.split())[:400]
                click.echo(
                    f"| H{number} | {hazard.name} | {plane} | {found.verdict} | {found.seconds:.1f} | {detail} |"
                )
        finally:
            stage.close()
    present = sum("present" in found for found in verdicts.values())
    unfit = sum(found == {"not applicable"} for found in verdicts.values())
    absent = len(verdicts) - present - unfit
    verdict = "ok" if not present else "failed"
    click.echo(f"hazards {verdict}: absent={absent} not_applicable={unfit} present={present}")
    sys.exit(bool(present))


if __name__ == "__main__":
    main()
