"""An engine of several ranks, as rank 0 sees it: the other ranks are processes that follow its orders.

Rank 0 schedules, answers HTTP and computes like any other rank. For each batch it passes the residual stream from stage
to stage. Within a stage it passes the heads of each attention between the ranks. All of that goes over pipes: this
engine is for tests, not for speed.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from pdpool_connector import ConnectorStats

from pdpool_reference.model import Model, Step
from pdpool_reference.products import Floats
from pdpool_reference.rank_orders import Alive, Changed, Compute, Connect, Freeze, RankSpec, Stop, Up
from pdpool_reference.rank_process import follow

log = logging.getLogger(__name__)

START_S = 60.0
"""A rank that has not started by then has failed."""
ANSWER_S = 300.0
"""A rank that does not answer for so long hangs, and the engine with it. Collectives of real engines wait as long by
default: the timeouts of torch.distributed are 5 to 10 minutes."""
LOOK_S = 0.2
STOP_S = 10.0


class RankLostError(RuntimeError):
    """A rank's process has ended, or does not answer: the engine cannot go on without it."""


@dataclass(slots=True, eq=False)
class _Rank:
    spec: RankSpec
    process: multiprocessing.process.BaseProcess
    orders: Connection[Any, Any]
    rows: Connection[Any, Any]
    up: threading.Event
    addresses: Mapping[str, str | None]
    sending: threading.Lock = field(default_factory=threading.Lock)
    stats: ConnectorStats | None = None

    @property
    def number(self) -> int:
        return self.spec.rank


class Ranks:
    """All ranks of one engine. `forward` is for the scheduler's thread; the other methods are for any thread.

    Args:
        model: Rank 0's shard.
        specs: The other ranks, in the order of ranks.
        stopping: Whether to stop waiting for a rank.
        lost: Called when a rank that was up has ended, on the thread that reads from it.
    """

    on_change: Callable[[int, Changed], None]
    """Takes the reports of a rank about its hand-offs; set before the first hand-off. Called on the reading thread."""

    def __init__(
        self,
        model: Model,
        specs: Sequence[RankSpec],
        stopping: Callable[[], bool],
        lost: Callable[[RankLostError], None],
    ) -> None:
        self._model = model
        self._stopping = stopping
        self._lost = lost
        self.frozen: frozenset[int] = frozenset()
        self._ranks = [self._start(spec) for spec in specs]

    def _start(self, spec: RankSpec) -> _Rank:
        context = multiprocessing.get_context("spawn")
        orders, their_orders = context.Pipe()
        rows, their_rows = context.Pipe()
        process = context.Process(
            target=follow, args=(spec, their_orders, their_rows), name=f"rank-{spec.rank}", daemon=True
        )
        process.start()
        their_orders.close()
        their_rows.close()
        rank = _Rank(spec, process, orders, rows, threading.Event(), {})
        threading.Thread(target=self._listen, args=(rank,), name=process.name, daemon=True).start()
        return rank

    @property
    def numbers(self) -> list[int]:
        """The ranks other than 0."""
        return [rank.number for rank in self._ranks]

    def addresses(self) -> dict[int, Mapping[str, str | None]]:
        """Return the addresses of the other ranks' connectors."""
        return {rank.number: rank.addresses for rank in self._ranks}

    def stats(self) -> list[ConnectorStats]:
        """Return the statistics of the other ranks' connectors, as of their last turn."""
        return [rank.stats for rank in self._ranks if rank.stats is not None]

    def connect(self, configs: Mapping[int, Connect]) -> None:
        """Start the other ranks' connectors, and block until they listen. Raises RankLostError."""
        for rank in self._ranks:
            rank.up.clear()
            self._send(rank, rank.orders, configs[rank.number])
        self.wait_up()

    def wait_up(self) -> None:
        """Block until all ranks are up. Raises RankLostError."""
        deadline = time.monotonic() + START_S
        for rank in self._ranks:
            while not rank.up.wait(LOOK_S):
                if not rank.process.is_alive():
                    raise RankLostError(f"rank {rank.number} ended with code {rank.process.exitcode} before it was up")
                if time.monotonic() > deadline:
                    raise RankLostError(f"rank {rank.number} was not up within {START_S:.0f} s")

    def forward(self, steps: Sequence[Step]) -> Floats:
        """As `Model.forward`, over all ranks. Raises RankLostError."""
        if not steps or not self._ranks:
            return self._model.forward(steps)
        self._model.check(steps)
        self.order_all(Compute(tuple(steps)))
        hidden = self._model.stage(steps, self._model.embed(steps), lambda own: self._exchange(0, [own]))
        for stage in range(1, 1 + max(rank.spec.stage for rank in self._ranks)):
            hidden = self._pass_through(stage, hidden)
        return self._model.logits(steps, hidden)

    def order_all(self, order: object) -> None:
        """Give every other rank an order. Raises RankLostError when one has ended."""
        for rank in self._ranks:
            self._send(rank, rank.orders, order)

    def freeze(self, numbers: frozenset[int]) -> None:
        """Freeze exactly these ranks, as if they hung. Their connectors live on."""
        for rank in self._ranks:
            self._send(rank, rank.orders, Freeze(rank.number in numbers))
        self.frozen = numbers

    def stop(self) -> None:
        """End the processes, by force if need be. Call it only when no batch is computed any more."""
        for rank in self._ranks:
            try:
                self._send(rank, rank.orders, Stop())
            except RankLostError:
                log.warning("rank %d had ended already", rank.number)
            rank.rows.close()  # a rank may wait for rows of a batch that was given up
        deadline = time.monotonic() + STOP_S
        for rank in self._ranks:
            rank.process.join(max(deadline - time.monotonic(), 0.0))
            if rank.process.is_alive():
                log.error("rank %d did not stop within %.0f s", rank.number, STOP_S)
                rank.process.kill()
                rank.process.join(STOP_S)

    def _listen(self, rank: _Rank) -> None:
        """Take the reports of a rank until its process ends."""
        try:
            while True:
                report = rank.orders.recv()
                match report:
                    case Up(addresses):
                        rank.addresses = addresses
                        rank.up.set()
                    case Alive(stats):
                        rank.stats = stats
                    case Changed():
                        self.on_change(rank.number, report)
        except (EOFError, OSError):
            log.info("rank %d has ended", rank.number)
            if rank.up.is_set():  # else `wait_up` finds it
                self._lost(RankLostError(f"rank {rank.number} has ended"))

    def _pass_through(self, stage: int, hidden: Floats) -> Floats:
        ranks = self._of_stage(stage)
        for rank in ranks:
            self._send(rank, rank.rows, hidden)
        for _ in range(ranks[0].spec.shard.layers):
            self._exchange(stage, [])
        ends = [self._take(rank) for rank in ranks]
        return ends[0]

    def _exchange(self, stage: int, parts: list[Floats]) -> Floats:
        """Send each rank of a stage the heads of all its ranks, side by side. `parts`: rank 0's own heads, if any."""
        ranks = self._of_stage(stage)
        heads = np.concatenate([*parts, *(self._take(rank) for rank in ranks)], axis=1)
        for rank in ranks:
            self._send(rank, rank.rows, heads)
        return heads

    def _of_stage(self, stage: int) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.spec.stage == stage]

    def _send(self, rank: _Rank, pipe: Connection[Any, Any], what: object) -> None:
        try:
            with rank.sending:
                pipe.send(what)
        except OSError as error:
            raise RankLostError(f"rank {rank.number} has ended: {error}") from error

    def _take(self, rank: _Rank) -> Floats:
        deadline = time.monotonic() + ANSWER_S
        try:
            while not rank.rows.poll(LOOK_S):
                if self._stopping():
                    raise RankLostError("the engine is shutting down")
                if time.monotonic() > deadline:
                    raise RankLostError(f"rank {rank.number} did not answer for {ANSWER_S:.0f} s")
            rows: Floats = rank.rows.recv()
        except (EOFError, OSError) as error:
            raise RankLostError(f"rank {rank.number} has ended") from error
        return rows
