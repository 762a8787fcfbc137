"""One operator process under measurement, and what it reports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from dev.paths import CHECKOUT
from dev.shell import wait_for

READS = frozenset({"get", "list", "watch"})
PORT = 18080


@dataclass(frozen=True)
class Reading:
    """Totals of one process at one time."""

    at: float
    cpu_s: float
    rss_mb: float
    peak_mb: float
    calls: dict[tuple[str, str], float]
    """Calls of the API by verb and resource, without the Lease's."""
    samples: float
    """Requests to engines that were answered."""
    unanswered: float
    ready: float
    """Instances that are ready, of all pools."""
    reconciles: int
    waiting: float
    load: float
    """Load of the machine."""

    def between(self, before: Reading) -> Window:
        """Return what happened since `before`."""
        minutes = (self.at - before.at) / 60
        calls = {key: count - before.calls.get(key, 0.0) for key, count in self.calls.items()}
        writes = {f"{verb} {what}": count for (verb, what), count in calls.items() if verb not in READS and count}
        return Window(
            seconds=self.at - before.at,
            calls_per_min=sum(calls.values()) / minutes,
            writes_per_min=sum(writes.values()) / minutes,
            writes=writes,
            samples_per_s=(self.samples - before.samples) / (self.at - before.at),
            unanswered=self.unanswered - before.unanswered,
            cpu=(self.cpu_s - before.cpu_s) / (self.at - before.at),
            reconciles=self.reconciles - before.reconciles,
            rss_mb=self.rss_mb,
            load=self.load,
        )


@dataclass(frozen=True)
class Window:
    """What one process did in a span of time. `cpu` is in cores, `load` the machine's load at the end."""

    seconds: float
    calls_per_min: float
    writes_per_min: float
    writes: dict[str, float]
    samples_per_s: float
    unanswered: float
    cpu: float
    reconciles: int
    rss_mb: float
    load: float


@dataclass
class OperatorProcess:
    """The operator for one namespace. `folder` has its kubeconfig and seed."""

    namespace: str
    folder: Path
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def times(self) -> Path:
        """File with the seconds of each reconcile."""
        return self.folder / "times"

    def start(self) -> None:
        """Start it and wait until it leads.

        Raises:
            TimeoutError: it did not.
        """
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join((str(CHECKOUT / "operator"), str(CHECKOUT))),
            "KUBECONFIG": str(self.folder / "kubeconfig"),
            "PDPOOL_NAMESPACE": self.namespace,
            "PDPOOL_LEASE": "pdpool-operator",
            "PDPOOL_WATCH_NAMESPACES": self.namespace,
            "PDPOOL_ENGINE_IMAGE": "localhost/pdpool-engine:bench",
            "PDPOOL_ROUTER_IMAGE": "localhost/pdpool-router:bench",
            "PDPOOL_ROUTER_SEED_FILE": str(self.folder / "seed"),
            "PDPOOL_LISTEN": f"127.0.0.1:{PORT}",
            "PDPOOL_BENCH_TIMES": str(self.times),
        }
        command = [sys.executable, "-m", "proof.bench.operator.timed_process"]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, env=env, stderr=log, stdout=log, cwd=CHECKOUT)
        wait_for("the operator leads", self._not_leading, deadline_s=90)

    def _not_leading(self) -> str | None:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"the operator ended: {(self.folder / 'log').read_text()[-2000:]}")
        try:
            return None if self._get("/readyz").strip() == "leader" else "it does not lead"
        except urllib.error.URLError as error:
            return str(error.reason)

    def stop(self) -> None:
        """End it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)

    def read(self) -> Reading:
        """Return the totals now."""
        assert self.process is not None
        series = [
            sample for family in text_string_to_metric_families(self._get("/metrics")) for sample in family.samples
        ]
        calls: dict[tuple[str, str], float] = {}
        totals = {"ok": 0.0, "other": 0.0}
        ready = waiting = 0.0
        for name, labels, value, *_ in series:
            if name == "pdpool_api_calls_total" and labels["resource"] != "leases":
                key = (labels["verb"], labels["resource"])
                calls[key] = calls.get(key, 0.0) + value
            elif name == "pdpool_samples_total":
                totals["ok" if labels["outcome"] == "ok" else "other"] += value
            elif name == "pdpool_pool_ready":
                ready += value
            elif name == "pdpool_reconcile_waiting":
                waiting = value
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        memory = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Vm")}
        return Reading(
            at=time.monotonic(),
            cpu_s=_cpu_s(self.process.pid),
            rss_mb=int(memory["VmRSS"]) / 1024,
            peak_mb=int(memory["VmHWM"]) / 1024,
            calls=calls,
            samples=totals["ok"],
            unanswered=totals["other"],
            ready=ready,
            reconciles=len(self.reconcile_s()),
            waiting=waiting,
            load=os.getloadavg()[0],
        )

    def reconcile_s(self) -> list[float]:
        """Return the seconds of each reconcile so far."""
        return [float(line.split()[1]) for line in self.times.read_text().splitlines() if len(line.split()) == 2]

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=20) as answer:
            text: str = answer.read().decode()
            return text


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
