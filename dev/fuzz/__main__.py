"""Fuzz every decoder and all machines for a while: the last line says `fuzz ok` only if nothing was found."""

import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import click

TARGETS = {
    "frames": "every frame of the control channel, v1 and v2",
    "memory": "a peer's description of its memory",
    "json": "bootstrap registry and admin endpoint",
    "tokens": "tokens of operator and ranks",
    "flight": "records of flights, and their replay",
    "prefill": "prefill's machine, WRITE",
    "decode": "decode's machine, WRITE",
    "prefill_read": "prefill's machine, READ",
    "decode_read": "decode's machine, READ",
}
LEAST_INPUTS = 1_000_000
"""So many inputs in ten minutes or more; less time is asked for less."""
OPTIONS = ("-rss_limit_mb=768", "-timeout=10", "-print_final_stats=1", "-max_len=4096", "-verbosity=1")
SPARE_S = 300
"""Starting takes a while on a busy machine: every module of ours is instrumented."""


class Fuzzed(NamedTuple):
    """What became of a target. `coverage`: edges seen, where libFuzzer told; `finding`: "" when there is none."""

    name: str
    inputs: int
    coverage: int
    finding: str


@click.command(help=__doc__)
@click.option("--minutes", default=10.0, show_default=True, help="Wall clock for all targets together.")
@click.option("--workers", default=2, show_default=True, help="Targets at a time.")
@click.option("--corpus", type=click.Path(path_type=Path), help="Kept between runs; by default a new one each time.")
@click.option("--only", type=click.Choice(list(TARGETS)), help="One target.")
def main(minutes: float, workers: int, corpus: Path | None, only: str | None) -> None:
    names = [only] if only else list(TARGETS)
    each = max(int(60 * minutes * min(workers, len(names)) / len(names)), 1)
    click.echo(f"{len(names)} targets, {each} s each, {workers} at a time")
    with tempfile.TemporaryDirectory(prefix="pdpool-fuzz-") as scratch, ThreadPoolExecutor(workers) as pool:
        place = corpus or Path(scratch)
        ticking = threading.Event()
        threading.Thread(target=tick, args=(ticking, time.monotonic(), 60 * minutes), daemon=True).start()
        done = [
            future.result() for future in as_completed(pool.submit(fuzz, name, place / name, each) for name in names)
        ]
        ticking.set()
    for one in sorted(done, key=lambda one: names.index(one.name)):
        result = f"FOUND\n{one.finding}" if one.finding else "nothing found"
        click.echo(f"  {one.name:13} {TARGETS[one.name]:38} {one.inputs:>9} inputs, {one.coverage:>5} edges: {result}")
    inputs, findings = sum(one.inputs for one in done), sum(bool(one.finding) for one in done)
    enough = inputs >= LEAST_INPUTS or minutes < 10 or only is not None
    if not enough:
        click.echo(
            f"only {inputs} inputs in {minutes:.0f} minutes; at least {LEAST_INPUTS} are wanted: give it more time"
        )
    ok = not findings and enough
    click.echo(f"fuzz {'ok' if ok else 'failed'}: inputs={inputs} findings={findings}")
    sys.exit(0 if ok else 1)


def fuzz(name: str, corpus: Path, seconds: int) -> Fuzzed:
    """Run one target in a process of its own; that process ends by libFuzzer's clock, or at a finding."""
    corpus.mkdir(parents=True, exist_ok=True)
    artifacts = f"-artifact_prefix={corpus}/found-"
    command = [sys.executable, "-m", "dev.fuzz.target", name, str(corpus / "inputs"), *OPTIONS, artifacts]
    try:
        ran = subprocess.run(
            [*command, f"-max_total_time={seconds}"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds + SPARE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Fuzzed(name, 0, 0, f"it did not end within {seconds + SPARE_S} s")
    said = ran.stderr + ran.stdout
    counted = [int(found) for found in re.findall(r"stat::number_of_executed_units: (\d+)", said)]
    coverage = [int(found) for found in re.findall(r"\bcov: (\d+)", said)]
    finding = "" if ran.returncode == 0 and counted else f"ended with {ran.returncode}:\n{said[-3000:]}"
    return Fuzzed(name, sum(counted), max(coverage, default=0), finding)


def tick(ended: threading.Event, begun: float, whole: float) -> None:
    """Say now and then how far it is."""
    while not ended.wait(15):
        click.echo(f"  {time.monotonic() - begun:.0f} of about {whole:.0f} s", err=True)


if __name__ == "__main__":
    main()
