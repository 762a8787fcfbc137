"""A rank other than rank 0: a process with a shard of the cache and a connector of its own, which follows orders.

Two threads follow orders. The thread that reads them opens and aborts hand-offs itself: a rank that hangs in a step
does not delay these. The main thread follows all other orders, one after the other.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from functools import singledispatchmethod
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from pdpool_connector import DecodeConnector, DecodeTransfer, PrefillConnector, PrefillTransfer

from pdpool_reference import weights
from pdpool_reference.frame_faults import FrameFault, FrameFaults
from pdpool_reference.kv import PagedKV
from pdpool_reference.model import Model
from pdpool_reference.process_setup import set_up_process
from pdpool_reference.products import Floats
from pdpool_reference.rank_orders import (
    Abort,
    Alive,
    Changed,
    Compute,
    Connect,
    Drain,
    Freeze,
    Offer,
    Open,
    RankSpec,
    Send,
    Stop,
    Up,
)

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""A rank without orders reports this often that it lives."""
CLOSE_S = 5.0


def follow(spec: RankSpec, orders: Connection[Any, Any], rows: Connection[Any, Any]) -> None:
    """Run a rank until the order to stop, or until rank 0 ends. `orders`, `rows`: this end of the two pipes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 drains first, and then sends Stop
    set_up_process()
    Follower(spec, orders, rows).run()


class Follower:
    """See the module's docstring."""

    def __init__(self, spec: RankSpec, orders: Connection[Any, Any], rows: Connection[Any, Any]) -> None:
        self._spec, self._orders, self._rows = spec, orders, rows
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thawed = threading.Event()
        self._thawed.set()
        self._sending = threading.Lock()
        self._changed = threading.Event()
        self._opening = threading.Lock()
        self._transfers: dict[int, PrefillTransfer | DecodeTransfer] = {}
        self._handles: dict[PrefillTransfer | DecodeTransfer, int] = {}
        self._connector: PrefillConnector | DecodeConnector | None = None
        config, loaded = weights.open_model(spec.model_path)
        self._kv = PagedKV(config, spec.kv_pages, shard=spec.shard)
        self._model = Model(config, loaded, self._kv)

    def run(self) -> None:
        """Follow orders until one is Stop."""
        threading.Thread(target=self._read, name="orders", daemon=True).start()
        self._send(Up({}))
        try:
            while not isinstance(order := self._next(), Stop):
                if order is not None:
                    self._follow(order)
                self._beat()
        except (EOFError, ConnectionError):  # rank 0 has closed a pipe
            log.info("rank %d ends in the midst of a batch", self._spec.rank)
        if self._connector is not None:
            self._connector.close(CLOSE_S)

    def _next(self) -> object:
        try:
            order = self._inbox.get(timeout=BEAT_S)
        except queue.Empty:
            order = None
        self._thawed.wait()
        return order

    def _read(self) -> None:
        """Take orders in: a frozen rank can be thawed, and it ends when rank 0 does."""
        try:
            while True:
                order = self._orders.recv()
                match order:
                    case Freeze():
                        self._thawed.clear() if order.frozen else self._thawed.set()
                    case FrameFault():
                        self._set_fault(order)
                    case Open():
                        self._open(order)
                    case Abort(handle, message, cause):
                        if (transfer := self._transfers.get(handle)) is not None:
                            transfer.abort(message, cause)
                    case _:
                        self._inbox.put(order)
                if isinstance(order, Stop):
                    self._thawed.set()
                    return
        except (EOFError, OSError):
            os._exit(1)

    def _open(self, order: Open) -> None:
        assert self._connector is not None, "a rank without a connector gets no requests"
        with self._opening:  # a change of the transfer's status finds its handle
            transfer = _opened(self._connector, order)
            self._transfers[order.handle] = transfer
            self._handles[transfer] = order.handle

    def _set_fault(self, fault: FrameFault) -> None:
        frames = self._connector.config.frame_filter if self._connector is not None else None
        assert isinstance(frames, FrameFaults), "faults are asked for where they are enabled, of a rank that is up"
        frames.fault = fault

    def _send(self, message: object) -> None:
        with self._sending:
            self._orders.send(message)

    def _beat(self) -> None:
        if self._connector is not None:
            self._connector.beat()
            self._send(Alive(self._connector.stats()))

    def _report(self, connector: PrefillConnector | DecodeConnector) -> None:
        """Report changes of hand-offs. It has a thread of its own, as the connector of a frozen rank lives on."""
        while self._changed.wait():
            self._changed.clear()
            with self._opening:
                changed = [(transfer, transfer.status) for transfer in connector.poll()]
            for transfer, status in changed:
                # None: its final status came between `poll` and the line above, and has been reported.
                if (handle := self._handles.get(transfer)) is None:
                    continue
                self._send(Changed(handle, status))
                if status.over:
                    del self._handles[transfer], self._transfers[handle]

    @singledispatchmethod
    def _follow(self, order: object) -> None:
        raise TypeError(f"{type(order).__name__} is not an order")

    @_follow.register
    def _(self, order: Connect) -> None:
        kind = PrefillConnector if self._spec.mode == "prefill" else DecodeConnector
        self._connector = connector = kind(order.config, self._kv.memory, self._changed.set)
        connector.start()
        threading.Thread(target=self._report, args=(connector,), name="report", daemon=True).start()
        self._send(Up({"control": connector.control_address, "admin": connector.admin_address}))

    @_follow.register
    def _(self, order: Compute) -> None:
        first = self._spec.stage == 0
        hidden = self._model.embed(order.steps) if first else self._rows.recv()
        hidden = self._model.stage(order.steps, hidden, self._exchange)
        if not first:
            self._rows.send(hidden)

    def _exchange(self, own: Floats) -> Floats:
        self._rows.send(np.ascontiguousarray(own))
        heads: Floats = self._rows.recv()
        return heads

    @_follow.register
    def _(self, order: Offer) -> None:
        transfer = self._transfers.get(order.handle)
        if isinstance(transfer, DecodeTransfer):  # else it has ended here, and rank 0 knows
            transfer.offer(order.pages, aux_slot=order.aux_slot)

    @_follow.register
    def _(self, order: Send) -> None:
        transfer = self._transfers.get(order.handle)
        if not isinstance(transfer, PrefillTransfer):
            return  # it has ended here, and rank 0 knows
        if order.aux is not None and order.aux_slot is not None:
            self._kv.write_aux(order.aux_slot, order.aux)
        transfer.send(order.pages, start=order.start, last=order.last, aux_slot=order.aux_slot)

    @_follow.register
    def _(self, _order: Drain) -> None:
        assert self._connector is not None, "a rank without a connector is not drained"
        self._connector.drain()


def _opened(connector: PrefillConnector | DecodeConnector, order: Open) -> PrefillTransfer | DecodeTransfer:
    where = (order.room, order.request_id)
    if isinstance(connector, PrefillConnector):
        return connector.open(*where, prompt=order.prompt, deadline_s=order.deadline_s)
    assert order.prefill is not None, "rank 0 has opened at the same address"
    return connector.open(order.prefill, *where, prompt=order.prompt, deadline_s=order.deadline_s)
