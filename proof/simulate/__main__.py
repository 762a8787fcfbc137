"""Search small worlds, run random ones, and put faults back: the last line says `simulate ok` if nothing broke."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

import click

from proof.simulate import jobs, verdict
from tests.simulation.explore import SCENARIOS
from tests.simulation.machine_mutants import MUTANTS, NOT_APPLICABLE
from tests.simulation.random_world import FAULTS
from tests.simulation.wiring import WIRING

Result = TypeVar("Result")
TELL_S = 10.0
RUNS_OF_A_SEED = 50


@click.command(help=__doc__)
@click.option("--runs", default=1500, show_default=True, help="Random runs.")
@click.option("--first", default=0, show_default=True, help="The seed of the first runs; each seed has a few.")
@click.option("--seed", type=int, help="Play this seed only, show the shortest run that breaks something, and stop.")
@click.option(
    "--cpu-seconds",
    default=200.0,
    show_default=True,
    help="CPU time of the exhaustive search; each scenario takes more where it has not come to its least depth.",
)
@click.option("--mutant-runs", default=1000, show_default=True, help="Runs within which a mutant must be caught.")
@click.option("--wiring/--no-wiring", default=True, help="Run tests on real connectors against a broken runtime.")
@click.option("--workers", default=2, show_default=True, help="Processes.")
def main(
    runs: int, first: int, seed: int | None, cpu_seconds: float, mutant_runs: int, wiring: bool, workers: int
) -> None:
    if seed is not None:
        sys.exit(play_one(seed))
    begun = time.monotonic()
    with ProcessPoolExecutor(workers) as pool:
        explored = explore(pool, cpu_seconds)
        played = play(pool, first, runs)
        mutants = catch(pool, mutant_runs)
    if wiring:
        # One at a time: they run processes and clocks of their own.
        with ProcessPoolExecutor(1) as pool:
            mutants += break_wiring(pool)
    cover(mutants)
    states = sum(one.states for one in explored)
    violations = verdict.violations(explored, played)
    shortcomings = verdict.shortcomings(explored, played, mutants)
    caught = sum(mutant.caught for mutant in mutants)
    for text in violations:
        click.echo(f"\nVIOLATION {text}")
    for text in shortcomings:
        click.echo(f"NOT SHOWN {text}")
    ok = not violations and not shortcomings
    click.echo(f"took {time.monotonic() - begun:.0f} s")
    click.echo(
        f"simulate {'ok' if ok else 'failed'}: states={states} runs={played.runs} violations={len(violations)} "
        f"mutants={caught}/{len(mutants)}"
    )
    sys.exit(0 if ok else 1)


def play_one(seed: int) -> int:
    """Show what the runs of one seed break."""
    played = jobs.play(seed, RUNS_OF_A_SEED)
    click.echo("\n".join(played.violations) or f"seed {seed} breaks nothing in {played.runs} runs")
    return 1 if played.violations else 0


def explore(pool: ProcessPoolExecutor, cpu_seconds: float) -> list[jobs.Explored]:
    click.echo("Exhaustive, prefill x decode ranks: each state once, and from each all must come to an end by itself")
    each = cpu_seconds / len(SCENARIOS)
    found = list(run(pool, jobs.explore, [(number, each) for number in range(len(SCENARIOS))], "scenarios"))
    for one in sorted(found, key=lambda one: one.number):
        reached = "all states there are" if one.complete else f"all interleavings of {one.depth} steps"
        depth = f"{reached}, {one.least_depth} promised"
        click.echo(f"  {one.name}: {one.states} states, {depth}; {one.machines} states of machines")
    return found


def play(pool: ProcessPoolExecutor, first: int, runs: int) -> jobs.Played:
    click.echo("\nRandom: up to 3 prefill and 3 decode ranks")
    seeds = range(first, first + -(-runs // RUNS_OF_A_SEED))
    total = jobs.Played()
    for one in run(pool, jobs.play, [(seed, RUNS_OF_A_SEED) for seed in seeds], "seeds"):
        total.add(one)
    done = total.happened["d done"]
    click.echo(f"  {total.runs} runs, {total.happened['requests']} requests, {done} halves of decode handed over")
    show("  faults", total.happened, FAULTS)
    show("  ends", total.happened, [kind for kind in total.happened if " " in kind])
    return total


def catch(pool: ProcessPoolExecutor, most: int) -> list[jobs.Mutant]:
    click.echo(f"\nMutants of the machines, each to be caught within {most} runs or by the search")
    rows = {one.name: one for one in run(pool, jobs.catch, [(name, most) for name in MUTANTS], "mutants")}
    for name in MUTANTS:
        table_row(rows[name])
    return [rows[name] for name in MUTANTS]


def break_wiring(pool: ProcessPoolExecutor) -> list[jobs.Mutant]:
    click.echo("\nMutants of the runtime's wiring, each to be caught by a test on real connectors")
    sound = next(iter(run(pool, jobs.wiring_without_fault, [()], "run without a fault")))
    if sound:
        click.echo(f"  these tests fail without a mutant, so they prove nothing: {sound}")
        return [jobs.Mutant(mutant.name, mutant.hazard, "", sound) for mutant in WIRING.values()]
    rows = list(run(pool, jobs.break_wiring, [(name,) for name in WIRING], "mutants"))
    for row in rows:
        table_row(row)
    return rows


def cover(mutants: list[jobs.Mutant]) -> None:
    """Which hazards of the catalogue the mutants have brought back, and how many of each."""
    counts = Counter(mutant.hazard for mutant in mutants)
    tried = ", ".join(f"{hazard} {counts[hazard]}" for hazard in sorted(counts, key=lambda hazard: int(hazard[1:])))
    click.echo(f"\n{len(counts)} hazards of the catalogue are among the mutants: {tried}")
    for hazard, why in NOT_APPLICABLE.items():
        click.echo(f"  {hazard} is not: {why}")


def table_row(mutant: jobs.Mutant) -> None:
    how = mutant.how if mutant.caught else "SURVIVED"
    click.echo(
        f"  {mutant.hazard:4} {mutant.name:44.44} {how:22} {mutant.what.splitlines()[0] if mutant.what else '':.90}"
    )


def show(title: str, counts: Counter[str], kinds: Iterable[str]) -> None:
    click.echo(f"{title}: " + ", ".join(f"{kind} {counts[kind]}" for kind in sorted(kinds) if counts[kind]))


def run(
    pool: ProcessPoolExecutor, call: Callable[..., Result], arguments: list[tuple[Any, ...]], what: str
) -> Iterator[Result]:
    """Results as they come, with a bar on a terminal, and with a line now and then elsewhere."""
    futures: list[Future[Result]] = [pool.submit(call, *args) for args in arguments]
    told = time.monotonic()
    with click.progressbar(length=len(futures), label=f"  {what}", file=sys.stderr) as bar:
        for done, future in enumerate(as_completed(futures), start=1):
            bar.update(1)
            if not sys.stderr.isatty() and time.monotonic() - told > TELL_S:
                told = time.monotonic()
                click.echo(f"  {what}: {done}/{len(futures)}", err=True)
            yield future.result()


if __name__ == "__main__":
    main()
