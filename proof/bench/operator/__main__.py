"""`python -m proof.bench.operator`: measure each size, print and write a table and a plot, end with a line."""

from __future__ import annotations

from pathlib import Path

import click

from dev.cluster import bringup
from dev.cluster.layout import state_at
from dev.shell import Clock

from .fleet import Size
from .measure import Figures, Plan, measure
from .network import engines
from .report import document, draw, last_line, rows, targets

PODS_PER_NODE = 100
"""A simulated node takes 110."""


def _sizes(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[Size]:
    try:
        return [Size.parse(value) for value in values]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.option(
    "--size", "sizes", multiple=True, callback=_sizes, default=("10x10", "30x10", "100x10"), help="POOLSxINSTANCES."
)
@click.option("--idle", default=60.0, help="Seconds without changes.")
@click.option("--within", default=600.0, help="Longest wait for a fleet, in seconds.")
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), help="Directory for the page and the plot.")
def main(sizes: list[Size], idle: float, within: float, plots: Path | None) -> None:
    """Measure one operator with fleets of simulated engines on the local cluster."""
    clock, state, results = Clock("bench-operator"), state_at(None), list[Figures]()
    found = bringup.status(state)
    if found is None:
        raise click.ClickException("there is no local cluster; `make cluster` makes one")
    before = int(found["simulated_nodes"])
    try:
        bringup.up(state, max(before, 1 + max(size.pods + size.pools for size in sizes) // PODS_PER_NODE), clock)
        with engines():
            for size in sizes:
                results.append(measure(state, size, Plan(idle_s=idle, within_s=within), clock.say))
                for name, value in rows(results[-1]).items():
                    clock.say(f"  {name}: {value}")
    finally:
        bringup.up(state, before, clock)
        if results and plots is not None:
            plots.mkdir(parents=True, exist_ok=True)
            draw(results, plots / "operator.svg")
            (plots / "operator.md").write_text(document(results), encoding="utf-8")
    for line in targets(results):
        print(line)
    print(last_line(results[-1]))


if __name__ == "__main__":
    main()
