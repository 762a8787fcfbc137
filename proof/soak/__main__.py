"""Aborted hand-offs in great number over real transfer backends; the last line counts what was out of place."""

import math
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import click

from proof.soak.fleet import ABORTS, GROWN_FDS, GROWN_RSS_KIB, PLANES, WARM_UP, Fleet, Plane, SoakError, Total, grown
from proof.soak.process import Usage

SHARES = {"nixl-cma": 70_000, "nixl-tcp": 32_000, "mooncake": 20_500}
"""Aborted hand-offs by data plane: together at least 100 000 over NIXL, and 20 000 over Mooncake."""
PROGRESS_S = 5.0
LATE_SHARE = 0.01
"""Share of aborts during a write, whose bytes come afterwards: with fewer nothing is proved."""
SEED = 20_261_122


def show(plane: Plane, aborts: int, begun: float, totals: Iterable[Total]) -> None:
    """Print where a round stands, at its start and every few seconds, until it is over."""
    printed = -math.inf
    for total in totals:
        if time.monotonic() - printed >= PROGRESS_S:
            printed = time.monotonic()
            click.echo(
                f"{plane.name:9} {printed - begun:5.0f} s  aborted={total.aborted}/{aborts} "
                f"done={total.outcomes['done']} "
                f"other={sum(total.outcomes.values()) - total.aborted - total.outcomes['done']} "
                f"landed_after_abort={total.late} stale_bytes={total.stale_bytes} rows={total.rows}"
            )


def soak(plane: Plane, aborts: int, seed: int, fleet: Fleet) -> tuple[Total, int]:
    """One data plane; the sums and the rows that were left behind."""
    begun = time.monotonic()
    before: list[Usage] = []
    if aborts >= 10 * WARM_UP:
        show(plane, aborts, begun, fleet.round(WARM_UP))
        before = fleet.usages()
    show(plane, aborts, begun, fleet.round(max(aborts - fleet.total().aborted, 1)))
    total, seconds = fleet.total(), time.monotonic() - begun
    fds, rss, tables = grown(before or fleet.usages(), fleet.usages())
    leaked = total.rows + sum(tables.values()) + max(fds - GROWN_FDS, 0)
    click.echo(
        f"{plane.name}: {total.aborted} aborted hand-offs in {seconds:.0f} s (seed {seed}); "
        f"all outcomes {dict(total.outcomes)}; bytes came after the abort in {total.late}; "
        f"{total.pages_reused} pages handed out; grown between two idle moments: fds {fds:+d}, "
        f"RSS {rss / 1024:+.1f} MiB, tables {tables or 'none'}; faults {total.faults}"
    )
    check_power(total)
    if rss > GROWN_RSS_KIB:
        raise SoakError(f"a process grew by {rss} KiB, more than {GROWN_RSS_KIB} KiB is a leak")
    if total.faults:
        raise SoakError(f"{total.faults} faults inside the connectors, see their logs")
    return total, leaked


def check_power(total: Total) -> None:
    """Raise SoakError where a hand-off ended as none may, or where a long run had too few aborts during a write."""
    if others := total.outcomes.keys() - {*ABORTS, "done"}:
        raise SoakError(f"hand-offs that no side aborted ended as {', '.join(sorted(others))}")
    long = total.aborted >= 10 * WARM_UP
    wanted = int(total.aborted * LATE_SHARE) if long else 0
    if total.late < wanted:
        raise SoakError(f"bytes came after {total.late} of {total.aborted} aborts, at least {wanted} must be so")
    if long and not total.outcomes["done"]:
        raise SoakError("no hand-off was done: the aborts came all too early")


@click.command(help=__doc__)
@click.option(
    "--aborts",
    type=click.IntRange(1),
    help="Aborted hand-offs for each data plane.  [default: 102 000 over NIXL, 20 500 over Mooncake]",
)
@click.option("--plane", "names", type=click.Choice(tuple(PLANES)), multiple=True, help="Only these data planes.")
@click.option("--seed", type=int, default=SEED, show_default=True)
@click.option("--decode-module", default="proof.soak.decode", hidden=True)
def main(aborts: int | None, names: tuple[str, ...], seed: int, decode_module: str) -> None:
    """Run the planes one after the other."""
    aborted = stale = leaked = 0
    with tempfile.NamedTemporaryFile(prefix="pdpool-soak-", suffix=".log", delete=False) as log:
        click.echo(f"what the processes log: {log.name}")
        try:
            for name in names or tuple(SHARES):
                plane = PLANES[name]
                with Fleet(plane, seed, log.fileno(), decode_module=decode_module) as fleet:
                    total, left = soak(plane, aborts or SHARES.get(name, 20_000), seed, fleet)
                aborted, stale, leaked = aborted + total.aborted, stale + total.stale_bytes, leaked + left
        except SoakError as error:
            tail = Path(log.name).read_text(errors="replace").splitlines()[-20:]
            click.echo("\n".join(tail), err=True)
            click.echo(f"soak failed: {error}", err=True)
            sys.exit(1)
    verdict = "ok" if aborted and not stale and not leaked else "failed"
    click.echo(f"soak {verdict}: aborted={aborted} stale_bytes={stale} leaked_rows={leaked}")
    sys.exit(verdict != "ok")


if __name__ == "__main__":
    main()
