"""`python -m proof.bench.connector`: measure, print and write a table, draw plots, and end with a line for machines."""

from __future__ import annotations

import io
import os
import time
from contextlib import ExitStack
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from .figures import FIGURES
from .frames import frames
from .frozen import frozen
from .results import Results, short
from .rooms import rooms
from .stages import stages
from .startup import startup
from .watching import watching

MEASURED = FIGURES | {
    "frames": frames,
    "rooms": rooms,
    "startup": startup,
    "frozen": frozen,
    "watching": watching,
    "stages": stages,
}


def table(results: Results) -> Table:
    """What was measured, as a table."""
    shown = Table(title="bench-connector: medians [10th .. 90th percentile]", show_lines=False)
    for name in ("figure", "plane", "value", "spread", "target", "met", "remarks"):
        shown.add_column(name)
    for row in results.rows:
        met = "" if row.met is None else "[green]yes[/]" if row.met else "[red]no[/]"
        value = f"{short(row.value)} {row.unit}".strip()
        shown.add_row(row.what, row.plane, value, row.spread.replace("[", r"\["), row.target, met, row.note)
    return shown


def document(results: Results) -> str:
    """The table and where the time goes, as Markdown."""
    where = f"`make bench-connector` on {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}."
    lines = [
        "# The last whole run",
        "",
        f"{where} Medians [10th .. 90th percentile].",
        "",
        "| figure | plane | value | spread | target | met | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results.rows:
        met = "" if row.met is None else "yes" if row.met else "no"
        value = f"{short(row.value)} {row.unit}".strip()
        cells = (row.what, row.plane, value, row.spread, row.target, met, row.note)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    out = io.StringIO()
    missed(results, Console(file=out, width=10_000))
    lines += ["", "## Where the time goes", "", *(f"- {line}" for line in out.getvalue().splitlines())]
    return "\n".join([*lines, "", f"`{last_line(results)}`", ""])


def missed(results: Results, console: Console) -> None:
    """Where targets are missed: by how much; and where the time goes."""
    rows = [row for row in results.rows if row.met is False]
    for row in rows:
        console.print(f"missed: {row.plane}, {row.what}: {short(row.value)} {row.unit}, wanted {row.target}")
    for (what, plane), reached in results.series.get("stages", {}).items():
        steps = ", ".join(f"{stage} {when:.0f}" for stage, when in reached)
        console.print(f"{what} over {plane}, us after the last send: {steps}")
    for plane, threads in results.series.get("threads", {}).items():
        order = sorted(threads.items(), key=lambda entry: -entry[1])
        spent = ", ".join(f"{name} {used:.0f}" for name, used in order if used >= 1)
        console.print(f"CPU of one hand-off over {plane}, us by thread: {spent}")
    for plane, turns in results.series.get("turns", {}).items():
        for when, made_of in turns.items():
            console.print(f"the longest turn of prefill's loop in each second over {plane}, {when}: {made_of}")
    for (plane, layout), line in results.series.get("fit", {}).items():
        console.print(
            f"{plane}, {layout}: a request takes {line[0]:.2f} ms and {line[1]:.3f} ms for each MiB, "
            f"of the bare engine {line[2]:.2f} ms and {line[3]:.3f} ms"
        )


def last_line(results: Results) -> str:
    """The line that a check reads; nan for what was not measured."""
    worst = results.worst
    values = {
        "nixl_big": worst("big", "nixl", least=True),
        "mooncake_big": worst("big", "mooncake", least=True),
        "nixl_tiny_ms": worst("tiny", "nixl"),
        "mooncake_tiny_ms": worst("tiny", "mooncake"),
        "nixl_rps": worst("rate", "nixl", least=True),
        "mooncake_rps": worst("rate", "mooncake", least=True),
        "idle_cpu": worst("idle") / 100,
        "abort_p50_ms": worst("abort p50"),
        "abort_max_ms": worst("abort max"),
    }
    return "bench-connector: " + " ".join(f"{name}={value:.3f}" for name, value in values.items())


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(MEASURED)), help="Measure this figure; may be repeated.")
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), help="Directory for plots (SVG).")
def main(only: tuple[str, ...], plots: Path | None) -> None:
    """Measure the connector over NIXL and Mooncake, beside the bare engines."""
    console = Console(width=200)
    results = Results(say=console.print)
    chosen = only or tuple(MEASURED)
    for number, name in enumerate(chosen, 1):
        begun = time.monotonic()
        console.print(f"{number} of {len(chosen)}, {name}: {(MEASURED[name].__doc__ or '').splitlines()[0]}")
        with ExitStack() as stack:
            MEASURED[name](results, stack)
        console.print(f"  ({time.monotonic() - begun:.0f} s)")
    console.print(table(results))
    missed(results, console)
    if plots is not None:
        from .plots import draw

        draw(results, plots)
        if not only:
            (plots / "connector.md").write_text(document(results), encoding="utf-8")
    console.print(last_line(results), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
