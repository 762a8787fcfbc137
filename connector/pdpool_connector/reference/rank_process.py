"""A rank that is not the first: a process with a part of the cache and a connector of its own, which follows orders."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pdpool_connector.layout.pairing import Part
from pdpool_connector.reference import weights
from pdpool_connector.reference.kv import PagedKV
from pdpool_connector.reference.model import Model, Step
from pdpool_connector.reference.products import Floats

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank is to be. `model_path` and `kv_pages` as the engine's options have them."""

    rank: int
    stage: int
    part: Part
    model_path: str
    kv_pages: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Order: run the rank's layers over these steps, exchanging rows with rank 0."""

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Freeze:
    """Order: follow no others until it is taken back."""

    frozen: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Order: end."""


@dataclass(frozen=True, slots=True)
class Up:
    """Told: the rank is ready to compute; where its connector can be reached."""

    addresses: Mapping[str, str]


def follow(spec: RankSpec, orders: Connection[Any, Any], rows: Connection[Any, Any]) -> None:
    """Be a rank until told to stop, or until rank 0 is gone. `orders`, `rows`: this end of the two pipes."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _Follower(spec, orders, rows).run()


class _Follower:
    def __init__(self, spec: RankSpec, orders: Connection[Any, Any], rows: Connection[Any, Any]) -> None:
        self._orders, self._rows = orders, rows
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._running = threading.Event()
        self._running.set()
        config, loaded = weights.tiny() if spec.model_path == "tiny" else weights.load(spec.model_path)
        self._stage = spec.stage
        self._kv = PagedKV(config, spec.kv_pages, part=spec.part)
        self._model = Model(config, loaded, self._kv)

    def run(self) -> None:
        threading.Thread(target=self._read, name="orders", daemon=True).start()
        self._orders.send(Up({}))
        while not isinstance(order := self._inbox.get(), Stop):
            self._running.wait()
            if isinstance(order, Compute):
                self._compute(order.steps)

    def _read(self) -> None:
        """Take orders in. Apart from following them, so that a frozen rank can be thawed, and ends with rank 0."""
        try:
            while not isinstance(order := self._orders.recv(), Stop):
                if isinstance(order, Freeze):
                    self._running.clear() if order.frozen else self._running.set()
                else:
                    self._inbox.put(order)
            self._running.set()
            self._inbox.put(order)
        except (EOFError, OSError):
            os._exit(1)

    def _compute(self, steps: tuple[Step, ...]) -> None:
        first = self._stage == 0
        hidden = self._model.embed(steps) if first else self._rows.recv()
        hidden = self._model.stage(steps, hidden, self._exchange)
        if not first:
            self._rows.send(hidden)

    def _exchange(self, own: Floats) -> Floats:
        self._rows.send(np.ascontiguousarray(own))
        heads: Floats = self._rows.recv()
        return heads
