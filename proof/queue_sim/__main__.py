"""Judge 1 000 simulated hours of traffic: the last line says `queue-sim ok` if every verdict was right."""

import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import click

from proof.queue_sim import score
from proof.queue_sim.faults import incidents
from proof.queue_sim.plot import draw
from proof.queue_sim.run import Picture, Run

HOURS_OF_A_SEED = 25.0
SHOWN = 3


@click.command(help=__doc__)
@click.option("--hours", default=1000.0, show_default=True, help="Simulated hours, half of them with faults.")
@click.option("--first", default=0, show_default=True, help="The first seed. Each seed plays 25 hours.")
@click.option("--workers", default=2, show_default=True, help="Processes.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw one day with faults into this file, and stop.")
def main(hours: float, first: int, workers: int, plot: Path | None) -> None:
    if plot is not None:
        picture = Picture(every_s=60.0)
        play(first, 24.0, faults=True, picture=picture)
        draw(picture, plot)
        return
    begun = time.monotonic()
    jobs = [(first + number, min(HOURS_OF_A_SEED, hours - start)) for number, start in enumerate(_starts(hours))]
    scores = {}
    with ProcessPoolExecutor(workers) as pool:
        waiting = {pool.submit(play, seed, length, faults=seed % 2 == 0): seed for seed, length in jobs}
        for future in as_completed(waiting):
            scores[waiting[future]] = future.result()
            click.echo(f"seed {waiting[future]}: {future.result()}, {time.monotonic() - begun:.0f} s")
    result = score.total(scores[seed] for seed in sorted(scores))
    click.echo(f"faults found: {result.faults}; errors by kind: {dict(result.said) or 'none'}")
    for text in result.examples[:SHOWN]:
        click.echo(f"COUNTEREXAMPLE {text}")
    click.echo(str(result))
    sys.exit(0 if result.ok else 1)


def _starts(hours: float) -> list[float]:
    return [number * HOURS_OF_A_SEED for number in range(int(-(-hours // HOURS_OF_A_SEED)))]


def play(seed: int, hours: float, *, faults: bool, picture: Picture | None = None) -> score.Score:
    """Play one seed and return its score."""
    return Run(seed, incidents(seed, hours, faults=faults, instances=2), picture).play(hours)


if __name__ == "__main__":
    main()
