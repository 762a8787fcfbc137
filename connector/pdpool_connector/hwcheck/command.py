"""`pdpool hwcheck`."""

import sys
from importlib.metadata import version
from pathlib import Path

import click

from pdpool_connector.backends import open_backend
from pdpool_connector.backends.base import BackendError
from pdpool_connector.hwcheck.cuda import CudaError, device_count, load
from pdpool_connector.hwcheck.machine import look
from pdpool_connector.hwcheck.page import render
from pdpool_connector.hwcheck.trials import plan, run

TRIED = ("nixl", "mooncake")


@click.command()
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write the page to this file, too."
)
def hwcheck(output: Path | None) -> None:
    """Move pages over this machine's hardware, and write what was proved and what was skipped, and why.

    Each trial takes a few seconds and starts two processes on loopback. Exit code 0: nothing failed; trials without
    hardware are skipped. 1: a trial failed.
    """
    machine = look()
    devices, no_devices = _devices()
    trials = plan(machine, {name: _unavailable(name) for name in TRIED}, devices, no_devices)
    outcomes = []
    for number, trial in enumerate(trials, 1):
        prefix = f"[{number}/{len(trials)}] {trial.name}"
        outcome = run(trial, lambda step, prefix=prefix: click.echo(f"{prefix}: {step} ...", err=True))  # type: ignore[misc]
        click.echo(f"{prefix}: {outcome.word}", err=True)
        outcomes.append(outcome)
    page = render(machine, outcomes, version("pdpool"))
    if output is not None:
        output.write_text(page, encoding="utf-8")
    click.echo(page)
    sys.exit(any(outcome.word == "failed" for outcome in outcomes))


def _devices() -> tuple[int, str]:
    """How many CUDA devices there are, and why there are none."""
    try:
        return device_count(load()), ""
    except CudaError as error:
        return 0, f"no GPU: {error}"


def _unavailable(backend: str) -> str:
    """Why a backend cannot be loaded here; "" if it can."""
    try:
        open_backend(backend, "0" * 32, target=False, host="127.0.0.1").close()
    except BackendError as error:
        return str(error)
    return ""
