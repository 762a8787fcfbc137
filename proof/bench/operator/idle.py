"""`python -m proof.bench.operator.idle`: CPU of an operator at rest, by the number of instances, without a cluster.

The API server is that of the tests, in memory, and one process plays all engines. So neither etcd nor Kubernetes'
controllers share the processor with the operator, as they do in `make bench-operator`.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import os
import secrets
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Final

import click

from dev.shell import run, wait_for
from tests.fake_fleet import NAMESPACE, fleet
from tests.operator_process import write_kubeconfig
from tests.serving import serving

from .fleet import Size
from .measure import await_rest, unready
from .operator_process import OperatorProcess, Window

INSIDE: Final = "PDPOOL_BENCH_INSIDE"
"""Set in the network namespace that the benchmark has made for itself."""
WITHIN_S: Final = 300.0
ADDRESSES: Final = ipaddress.ip_network("127.1.0.0/16")


async def measure(size: Size, idle_s: float) -> Window:
    """Return what an operator of a fleet did in so many seconds at rest."""
    api = fleet(size.pools // 2, size.instances, map(str, ADDRESSES.hosts()))
    with tempfile.TemporaryDirectory(prefix="pdpool-bench-") as folder:
        async with serving(api.handle) as api.url:
            return await asyncio.to_thread(_at_rest, api.url, Path(folder), size, idle_s)


def _at_rest(url: str, folder: Path, size: Size, idle_s: float) -> Window:
    write_kubeconfig(folder / "kubeconfig", url)
    (folder / "seed").write_bytes(base64.b64encode(secrets.token_bytes(48)))
    operator = OperatorProcess(NAMESPACE, folder)
    try:
        operator.start()
        ready = partial(unready, operator, size.pods)
        wait_for("all instances are ready", ready, deadline_s=WITHIN_S, interval_s=3.0)
        await_rest(operator, WITHIN_S)
        before = operator.read()
        time.sleep(idle_s)  # the length of the window, not a wait for a condition
        return operator.read().between(before)
    finally:
        operator.stop()


@click.command(help=__doc__)
@click.option("--size", "sizes", nargs=2, default=("20x5", "100x10"), show_default=True, help="Two of POOLSxINSTANCES.")
@click.option("--idle", "idle_s", default=60.0, show_default=True, help="Seconds of each measurement.")
def main(sizes: tuple[str, str], idle_s: float) -> None:
    """Measure both sizes, print a line for each and the ratio."""
    if INSIDE not in os.environ:
        command = ["unshare", "--net", sys.executable, "-m", "proof.bench.operator.idle", *sys.argv[1:]]
        os.execvpe(command[0], command, os.environ | {INSIDE: "1"})
    run("ip", "link", "set", "lo", "up")
    small, large = map(Size.parse, sizes)
    engines = subprocess.Popen(
        [sys.executable, "-m", "proof.bench.operator.engines"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    found = []
    try:
        assert engines.stdout is not None
        engines.stdout.readline()
        for size in (small, large):
            print(f"{size}: starting an operator, then {idle_s:.0f} s at rest", flush=True)
            found.append(asyncio.run(measure(size, idle_s)))
            window = found[-1]
            print(f"{size}: {window.cpu:.3f} cores, {window.samples_per_s:.0f} samples a second", flush=True)
    finally:
        engines.terminate()
        engines.wait(10)
    growth = (found[1].cpu / large.pods) / (found[0].cpu / small.pods)
    print(
        f"bench-operator-idle: instances={small.pods}/{large.pods} cpu={found[0].cpu:.3f}/{found[1].cpu:.3f} "
        f"per_instance={growth:.2f}"
    )


if __name__ == "__main__":
    main()
