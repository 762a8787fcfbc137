"""Fuzz every decoder and all machines for a while: the last line says `fuzz ok` only if nothing was found."""

import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import click

TARGETS = {
    "frames": "every frame of the control channel",
    "memory": "a peer's description of its memory",
    "json": "bootstrap registry and admin endpoint",
    "tokens": "tokens of operator and ranks",
    "flight": "records of flights, and their replay",
    "descriptors": "a peer's descriptor, at every engine",
    "door": "the answer at Mooncake's door",
    "state": "what `pdpool connector top` reads",
    "prefill": "prefill's machine",
    "decode": "decode's machine",
}
LEAST_INPUTS = 1_000_000
"""So many inputs in ten minutes or more; less time is asked for less."""
MAX_LEN = 4096
OPTIONS = ("-rss_limit_mb=768", "-timeout=10", "-print_final_stats=1", f"-max_len={MAX_LEN}", "-verbosity=1")
TICK_S = 15.0
SPARE_S = 300
"""Starting takes a while on a busy machine: every module of ours is instrumented."""


class Fuzzed(NamedTuple):
    """What became of a target. `coverage`: edges seen, if libFuzzer reports them; `finding`: "" when there is none."""

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
    with tempfile.TemporaryDirectory(prefix="pdpool-fuzz-") as scratch:
        place = corpus or Path(scratch)
        with Fuzzers(place, each) as fuzzers, ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(fuzzers.fuzz, name) for name in names]
            try:
                done = wait_for(futures, fuzzers, 60 * minutes)
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would leave what the first is ending
                fuzzers.stop()
                pool.shutdown(wait=True, cancel_futures=True)
                click.echo(f"fuzz stopped: inputs={fuzzers.inputs()}")
                sys.exit(130)
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


class Fuzzers:
    """Targets that run, each in a process of its own that ends by libFuzzer's clock, or at a finding.

    Their sessions are their own as well: Ctrl-C reaches us alone, and we end them.
    """

    def __init__(self, place: Path, seconds: int) -> None:
        self._place, self._seconds = place, seconds
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def __enter__(self) -> "Fuzzers":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def fuzz(self, name: str) -> Fuzzed:
        """Run one target."""
        corpus = self._place / name
        corpus.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "proof.fuzz.target", name, str(corpus / "inputs"), *OPTIONS]
        command += [f"-artifact_prefix={corpus}/found-", f"-max_total_time={self._seconds}"]
        with self._log(name).open("wb") as log, self._lock:
            if self._stopped:
                return Fuzzed(name, 0, 0, "it was stopped before it began")
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            self._running[name] = process
        try:
            process.wait(self._seconds + SPARE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return Fuzzed(name, self._count(name), 0, f"it did not end within {self._seconds + SPARE_S} s")
        said = self._log(name).read_text(errors="replace")
        counted = [int(found) for found in re.findall(r"stat::number_of_executed_units: (\d+)", said)]
        coverage = [int(found) for found in re.findall(r"\bcov: (\d+)", said)]
        finding = "" if process.returncode == 0 and counted else f"ended with {process.returncode}:\n{said[-3000:]}"
        return Fuzzed(name, sum(counted), max(coverage, default=0), finding)

    def stop(self) -> None:
        """End what runs, and begin nothing more."""
        with self._lock:
            self._stopped = True
            for process in self._running.values():
                if process.poll() is None:
                    process.kill()

    def inputs(self) -> int:
        """How many there have been so far, as far as libFuzzer has reported."""
        with self._lock:
            return sum(map(self._count, self._running))

    def _log(self, name: str) -> Path:
        return self._place / name / "log"

    def _count(self, name: str) -> int:
        pulses = re.findall(rb"^#(\d+)\s", self._log(name).read_bytes(), re.MULTILINE)
        return int(pulses[-1]) if pulses else 0


def wait_for(futures: list[Future[Fuzzed]], fuzzers: Fuzzers, whole: float) -> list[Fuzzed]:
    """Results once all have ended; says now and then how far it is."""
    begun = time.monotonic()
    while wait(futures, timeout=TICK_S).not_done:
        ended = sum(future.done() for future in futures)
        click.echo(
            f"  {time.monotonic() - begun:.0f} of about {whole:.0f} s, {ended}/{len(futures)} targets, "
            f"{fuzzers.inputs()} inputs",
            err=True,
        )
    return [future.result() for future in futures]


if __name__ == "__main__":
    main()
