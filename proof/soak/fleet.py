"""The parent of a soak: starts the processes of one run, adds up what they report, and judges it."""

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

import msgspec

from dev.paths import CHECKOUT
from proof.soak.process import QUIESCE_S, REQUEST_DEADLINE_S, Order, Report, Usage

DECODES, PREFILLS = 2, 2
WINDOW = 24
WARM_UP = 400
"""Aborts before the run, whose end is what usage is compared with; runs shorter than 10 times this go without."""
READY_S = 60.0
SILENCE_S = 30.0
"""Every process reports each second: one that is silent for so long hangs."""
EXIT_S = 20.0
ABORTS = ("aborted", "peer_aborted")
GROWN_FDS = 8
GROWN_RSS_KIB = 64 << 10
"""Allocators keep what they had at the peak; a leak of one KiB for each of 100 000 hand-offs is above it."""

GROWN_TABLE = 16
"""Counters get an entry for each state or reason that first occurs after the warm-up: a handful. A leak of one entry
in 1000 hand-offs is far above it."""


@dataclass(frozen=True)
class Plane:
    """A data plane under soak: its name here, the connector's name of it, and its environment."""

    name: str
    backend: Literal["nixl", "mooncake", "local"]
    environment: Mapping[str, str] = field(default_factory=dict)


PLANES = {
    plane.name: plane
    for plane in (
        Plane("nixl-cma", "nixl", {"UCX_NET_DEVICES": "lo"}),
        Plane("nixl-tcp", "nixl", {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp"}),
        Plane("mooncake", "mooncake"),
        Plane("local", "local"),
    )
}


class SoakError(Exception):
    """A process has ended, or it hangs, or a run has failed."""


class Worker:
    """One process under test."""

    def __init__(self, module: str, environment: Mapping[str, str], log: int) -> None:
        self.module = module
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=CHECKOUT,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(("connector", "."))},
        )
        self._buffer = b""
        self.reported_at = time.monotonic()
        self.report: Report | None = None

    @property
    def pipe(self) -> int:
        """Descriptor on which it reports."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def order(self, line: bytes) -> None:
        """Write one line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def lines(self) -> Iterator[bytes]:
        """Read what is there. Raises SoakError when the process has ended."""
        piece = os.read(self.pipe, 1 << 20)
        if not piece:
            raise SoakError(f"{self.module} (process {self.process.pid}) ended with {self.process.wait(EXIT_S)}")
        self.reported_at = time.monotonic()
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        yield from lines

    def line(self, within_s: float) -> bytes:
        """Wait for one line. Raises SoakError."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            while selector.select(within_s):
                for line in self.lines():
                    return line
        raise SoakError(f"{self.module} (process {self.process.pid}) sent nothing for {within_s} s")

    def end(self) -> None:
        """Let it close its connector and exit; kill it if it does not."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(EXIT_S)
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()


@dataclass
class Total:
    """The sum over all processes."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Of the hand-offs, as decode saw them end."""
    stale_bytes: int = 0
    rows: int = 0
    faults: int = 0
    late: int = 0
    pages_reused: int = 0

    @property
    def aborted(self) -> int:
        """Hand-offs that one of the sides aborted."""
        return sum(self.outcomes[cause] for cause in ABORTS)


class Fleet:
    """Two prefills and two decodes, each decode with both prefills."""

    def __init__(
        self,
        plane: Plane,
        seed: int,
        log: int,
        *,
        decode_module: str = "proof.soak.decode",
        prefill_module: str = "proof.soak.prefill",
    ) -> None:
        self._workers: list[Worker] = []
        self._decodes: list[Worker] = []
        try:
            orders = [
                Order(side, plane.backend, seed + side, window=WINDOW if side < DECODES else 0)
                for side in range(DECODES + PREFILLS)
            ]
            prefills = [Worker(prefill_module, plane.environment, log) for _ in range(PREFILLS)]
            self._workers += prefills
            addresses = []
            for worker, order in zip(prefills, orders[DECODES:], strict=True):
                worker.order(msgspec.json.encode(order))
                ready = msgspec.json.decode(worker.line(READY_S), type=dict[str, str])
                addresses.append((ready["bootstrap"], ready["orders"]))
            for order in orders[:DECODES]:
                worker = Worker(decode_module, plane.environment, log)
                self._workers.append(worker)
                self._decodes.append(worker)
                worker.order(msgspec.json.encode(msgspec.structs.replace(order, prefills=tuple(addresses))))
                worker.line(READY_S)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end()
        codes = {worker.process.pid: worker.process.returncode for worker in self._workers}
        if kind is None and any(code < 0 for code in codes.values()):
            raise SoakError(f"processes did not end by themselves; their exit codes: {codes}")

    def end(self) -> None:
        """End all processes."""
        for worker in reversed(self._workers):
            worker.end()

    def round(self, aborts: int) -> Iterator[Total]:
        """Run until so many more hand-offs were aborted, then until nothing is left; the sums after each report."""
        for worker in self._workers:
            worker.order(b"go")
            worker.report = None
            worker.reported_at = time.monotonic()
        wanted: int | None = None
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.pipe, selectors.EVENT_READ, worker)
            while wanted is None or (total := self.total()).aborted < wanted:
                self._listen(selector)
                if wanted is None and all(worker.report for worker in self._workers):
                    wanted = self.total().aborted + aborts
                yield self.total()
            del total
            # Decodes end first: prefills must be alive to answer them.
            for group in (self._decodes, [one for one in self._workers if one not in self._decodes]):
                for worker in group:
                    worker.order(b"stop")
                deadline = time.monotonic() + REQUEST_DEADLINE_S + QUIESCE_S
                while any(worker.report is None or worker.report.usage is None for worker in group):
                    if time.monotonic() > deadline:
                        raise SoakError(
                            f"hand-offs have not ended within {REQUEST_DEADLINE_S + QUIESCE_S:.0f} s: {self.total()}"
                        )
                    self._listen(selector)
                    yield self.total()

    def total(self) -> Total:
        """Sums of the last reports."""
        total = Total()
        for worker in self._workers:
            report = worker.report
            if report is None:
                continue
            if worker in self._decodes:
                total.outcomes.update(report.outcomes)
            total.stale_bytes += report.stale_bytes
            total.rows += report.rows
            total.faults += report.faults
            total.late += report.late
            total.pages_reused += report.pages_reused
        return total

    def usages(self) -> list[Usage]:
        """What each process used at the end of the last round."""
        found = [worker.report.usage for worker in self._workers if worker.report is not None]
        return [usage for usage in found if usage is not None]

    def _listen(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(1.0):
            for line in key.data.lines():
                key.data.report = msgspec.json.decode(line, type=Report)
        for worker in self._workers:
            silent = time.monotonic() - worker.reported_at
            if silent > SILENCE_S and (worker.report is None or worker.report.usage is None):
                raise SoakError(f"{worker.module} (process {worker.process.pid}) sent nothing for {silent:.0f} s")


def grown(before: list[Usage], after: list[Usage]) -> tuple[int, int, dict[str, int]]:
    """Most that one process grew between two idle moments: descriptors, RSS in KiB, and entries by table (the sum)."""
    tables: Counter[str] = Counter()
    for old, new in zip(before, after, strict=True):
        gains = {path: count - old.tables.get(path, 0) for path, count in new.tables.items()}
        tables.update({path: gain for path, gain in gains.items() if gain > GROWN_TABLE})
    fds = max(new.fds - old.fds for old, new in zip(before, after, strict=True))
    rss = max(new.rss_kib - old.rss_kib for old, new in zip(before, after, strict=True))
    return fds, rss, dict(tables)
