"""What the processes of both sides share: set-up, orders and reports as lines of JSON, what they leave behind."""

import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from pdpool_connector import ConnectorConfig, DecodeConnector, PrefillConnector
from pdpool_connector.protocol.frames import PROMPT_BYTES
from pdpool_connector.protocol.timeouts import Timeouts

from dev import inside
from proof.soak.pool import Pool

TIMEOUTS = Timeouts(
    quiesce_s=2.0, match_s=15.0, retry_first_s=0.05, retry_max_s=0.5, query_s=1.0, result_s=15.0, acked_s=2.0
)
"""Shorter than by default, so that what is remembered of ended attempts has gone soon after the last of them.

What an ended half leaves for its other half must outlive the longest queue at prefill: on a machine with other work
that is seconds. With 3 s here the queue once outlived it, and nothing but timeouts came of the rest of the run."""
REQUEST_DEADLINE_S = 20.0
QUIESCE_S = 20.0
"""Everything has ended and been forgotten by then, or is a leak."""
WATCH_S = TIMEOUTS.result_s + 1.0
"""How long after the last hand-off pages are still watched for late bytes. Everything remembered goes meanwhile."""
REPORT_S = 1.0

AnyConnector = TypeVar("AnyConnector", PrefillConnector, DecodeConnector)


class Order(msgspec.Struct, frozen=True):
    """First line that a process gets: its place in the run."""

    side: int
    """Its number among all processes of the run; decodes are numbered first."""
    backend: Literal["nixl", "mooncake", "local"]
    seed: int
    window: int = 0
    """Decode only: hand-offs under way at a time."""
    prefills: tuple[tuple[str, str], ...] = ()
    """Decode only: bootstrap address and order socket of every prefill."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """What decode, in the router's place, sends to prefill: what to compute, and how to fail."""

    room: int
    owner: int
    pages: int
    delay_s: float
    """Until prefill's engine has it."""
    sends: int
    gap_s: float
    """Between sends."""
    abort_after: int | None
    """Prefill aborts it after so many sends (0: at once); None: it does not."""
    abort_s: float
    """and so many seconds."""

    @property
    def id(self) -> str:
        """The request id at both engines."""
        return f"r{self.owner}"

    @property
    def prompt(self) -> bytes:
        """The digest of its prompt: no two requests have the same, because their pages differ."""
        return self.owner.to_bytes(PROMPT_BYTES)


class Usage(msgspec.Struct):
    """What a process uses: file descriptors, resident memory that is its own, rows in the connector's own tables."""

    fds: int
    rss_kib: int
    tables: dict[str, int]


class Report(msgspec.Struct):
    """What a process reports of itself; totals since it began."""

    side: int
    outcomes: dict[str, int]
    """Hand-offs that have ended, by cause; "done" where there is none."""
    stale_bytes: int
    pages_reused: int
    rows: int
    faults: int
    late: int = 0
    """Aborted hand-offs into which bytes came after the abort."""
    usage: Usage | None = None
    """Only at the end of a round, when nothing is under way."""


def configuration(order: Order) -> ConnectorConfig:
    """The same for both sides."""
    return ConnectorConfig(
        "127.0.0.1",
        backend=order.backend,
        request_deadline_s=REQUEST_DEADLINE_S,
        allowed_networks=("127.0.0.0/8",),
        timeouts=TIMEOUTS,
    )


def usage(connector: PrefillConnector | DecodeConnector) -> Usage:
    """As of now."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Usage(
        fds=len(list(Path("/proc/self/fd").iterdir())),
        rss_kib=int(fields["RssAnon"].split()[0]),
        tables=inside.tables(connector),
    )


class Process:
    """Input and output of a process under test, and the wait until everything has ended."""

    def __init__(self) -> None:
        # Libraries write to stdout, too: the reports get a descriptor of their own.
        self._out = os.dup(1)
        os.dup2(2, 1)
        self.order = msgspec.json.decode(self._line(), type=Order)

    def send(self, message: object) -> None:
        """Write one line."""
        os.write(self._out, msgspec.json.encode(message) + b"\n")

    def has_order(self) -> bool:
        """Whether the parent has sent another line (or has gone)."""
        return bool(select.select([sys.stdin], [], [], 0)[0])

    def next_order(self) -> str:
        """Wait for the next line of the parent."""
        return self._line().strip()

    def finish_round(
        self, connector: PrefillConnector | DecodeConnector, pool: Pool, report: Callable[[], Report]
    ) -> None:
        """All work has ended: wait until the connector has nothing left, watch the pages meanwhile, and report."""
        self.next_order()
        deadline, until = time.monotonic() + QUIESCE_S, time.monotonic() + WATCH_S
        while time.monotonic() < deadline and (rows(connector) or time.monotonic() < until):
            pool.check_free()
            self.send(report())
            time.sleep(REPORT_S / 2)  # the pace of the watch
        final = report()
        final.usage = usage(connector)
        self.send(final)

    @staticmethod
    def _line() -> str:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit("the parent has gone")
        return line


def rows(connector: PrefillConnector | DecodeConnector) -> int:
    """What the connector keeps of hand-offs: machine, transfers, holds."""
    return inside.rows(connector) + inside.kept(connector) + connector.stats().holds


def started(make: Callable[..., AnyConnector], order: Order, pool: Pool) -> tuple[AnyConnector, threading.Event]:
    """A running connector over the pool's memory, and the event that it sets when something has changed."""
    changed = threading.Event()
    connector = make(configuration(order), pool.memory, changed.set)
    connector.start()
    return connector, changed
