"""An engine of several ranks, as rank 0 sees it: the other ranks are processes that follow its orders.

Rank 0 schedules, answers HTTP and computes like any other. For each batch it passes the residual stream from stage to
stage and, within a stage, the heads of each attention between the ranks. All of that goes over pipes: this engine is
to be real, not fast.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from pdpool_connector import ConnectorStats

from pdpool_reference.model import Model, Step
from pdpool_reference.products import Floats
from pdpool_reference.rank_orders import Alive, Compute, Connect, Freeze, RankSpec, Said, Stop, Up
from pdpool_reference.rank_process import follow

log = logging.getLogger(__name__)

START_S = 60.0
"""A rank that has not come up by then will not."""
ANSWER_S = 300.0
"""A rank that does not answer for so long has hung, and the engine with it; collectives of real engines wait as long
by default (torch.distributed's timeouts are 5 to 10 minutes)."""
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
    stats: ConnectorStats | None = None

    @property
    def number(self) -> int:
        return self.spec.rank


class Ranks:
    """All ranks of one engine, rank 0's own part among them.

    model: rank 0's part. specs: what each other rank is to be, in the order of ranks. stopping: whether to give up
    waiting for a rank. lost: called when one that was up has ended, on the thread that listens to it.
    """

    told: Callable[[int, Said], None]
    """Takes what a rank says of its hand-offs; set before the first one. Called on the thread that listens to it."""

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
        """The ranks but 0."""
        return [rank.number for rank in self._ranks]

    def addresses(self) -> dict[int, Mapping[str, str | None]]:
        """Where the other ranks' connectors can be reached."""
        return {rank.number: rank.addresses for rank in self._ranks}

    def stats(self) -> list[ConnectorStats]:
        """What the other ranks' connectors are at, as of their last turn."""
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
        """Have just these ranks stand still, as ranks that hang; their connectors live on."""
        for rank in self._ranks:
            self._send(rank, rank.orders, Freeze(rank.number in numbers))
        self.frozen = numbers

    def stop(self) -> None:
        """End the processes; those that do not end by themselves are killed. Nothing may be computed any more."""
        for rank in self._ranks:
            try:
                rank.orders.send(Stop())
            except OSError:
                log.warning("rank %d had ended already", rank.number)
            rank.rows.close()  # it may wait for those of a batch that was given up
        deadline = time.monotonic() + STOP_S
        for rank in self._ranks:
            rank.process.join(max(deadline - time.monotonic(), 0.0))
            if rank.process.is_alive():
                log.error("rank %d did not stop within %.0f s", rank.number, STOP_S)
                rank.process.kill()
                rank.process.join(STOP_S)

    def _listen(self, rank: _Rank) -> None:
        """Take what a rank tells until its process ends."""
        try:
            while True:
                told = rank.orders.recv()
                match told:
                    case Up(addresses):
                        rank.addresses = addresses
                        rank.up.set()
                    case Alive(stats):
                        rank.stats = stats
                    case Said():
                        self.told(rank.number, told)
        except (EOFError, OSError):
            log.info("rank %d has ended", rank.number)
            if rank.up.is_set():  # else `wait_up` finds it
                self._lost(RankLostError(f"rank {rank.number} has ended"))

    def _pass_through(self, stage: int, hidden: Floats) -> Floats:
        ranks = self._of_stage(stage)
        for rank in ranks:
            self._send(rank, rank.rows, hidden)
        for _ in range(ranks[0].spec.part.layers):
            self._exchange(stage, [])
        ends = [self._take(rank) for rank in ranks]
        return ends[0]

    def _exchange(self, stage: int, parts: list[Floats]) -> Floats:
        """The heads of all ranks of a stage side by side, told to each; `parts` begins with rank 0's own, if any."""
        ranks = self._of_stage(stage)
        heads = np.concatenate([*parts, *(self._take(rank) for rank in ranks)], axis=1)
        for rank in ranks:
            self._send(rank, rank.rows, heads)
        return heads

    def _of_stage(self, stage: int) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.spec.stage == stage]

    def _send(self, rank: _Rank, pipe: Connection[Any, Any], what: object) -> None:
        try:
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
