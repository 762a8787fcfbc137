"""The hand-offs of an engine of several ranks, under the interface of one connector.

The HTTP side opens hand-offs, rank 0's scheduler sends and offers. Every call goes to all ranks, and the status of a
hand-off is that of all ranks together.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pdpool_connector import (
    Cause,
    DecodeConnector,
    DecodeTransfer,
    Key,
    Phase,
    PrefillConnector,
    PrefillTransfer,
    TransferStatus,
    agree,
)
from pdpool_connector.runtime.validation import AbortCause

from pdpool_reference.kv import PagedKV
from pdpool_reference.rank_orders import Abort, Changed, Drain, Offer, Open, Send
from pdpool_reference.ranks import Ranks

AnyConnector = TypeVar("AnyConnector", PrefillConnector, DecodeConnector)
AnyTransfer = TypeVar("AnyTransfer", PrefillTransfer, DecodeTransfer)
_KEY: Final = Key(0, "")
"""`together` judges one hand-off at a time, so that any key does."""


class RankedTransfer(Generic[AnyTransfer]):
    """One hand-off: the transfer of rank 0, and the statuses that the other ranks report."""

    def __init__(self, handle: int, own: AnyTransfer, ranks: Ranks) -> None:
        self._handle, self._ranks = handle, ranks
        self._own: AnyTransfer = own
        self._others = dict.fromkeys(ranks.numbers, TransferStatus(Phase.WAITING))
        self._aborted = False

    @property
    def status(self) -> TransferStatus:
        """The status of all ranks together."""
        return together([self._own.status, *self._others.values()])

    def abort(self, message: str, cause: AbortCause = Cause.ABORTED) -> None:
        """See `Transfer`: given up at every rank."""
        if not self._aborted:
            self._aborted = True
            self._own.abort(message, cause)
            self._ranks.order_all(Abort(self._handle, message, cause))

    def changed(self, rank: int, status: TransferStatus) -> None:
        """Take the status that another rank reports."""
        self._others[rank] = status


class RankedPrefillTransfer(RankedTransfer[PrefillTransfer]):
    """See `PrefillTransfer`."""

    def __init__(self, handle: int, own: PrefillTransfer, ranks: Ranks, kv: PagedKV) -> None:
        super().__init__(handle, own, ranks)
        self._kv = kv

    def send(self, pages: NDArray[np.int32], *, start: int, last: bool, aux_slot: int | None = None) -> None:
        """See `PrefillTransfer`: each rank sends its shard of the same pages."""
        row = None if aux_slot is None else self._kv.read_aux(aux_slot)
        self._ranks.order_all(Send(self._handle, pages, start, last, aux_slot, row))
        self._own.send(pages, start=start, last=last, aux_slot=aux_slot)


class RankedDecodeTransfer(RankedTransfer[DecodeTransfer]):
    """See `DecodeTransfer`."""

    def offer(self, pages: NDArray[np.int32], *, aux_slot: int) -> None:
        """See `DecodeTransfer`: each rank offers the same pages of its shard."""
        self._ranks.order_all(Offer(self._handle, pages, aux_slot))
        self._own.offer(pages, aux_slot=aux_slot)


def together(statuses: Sequence[TransferStatus]) -> TransferStatus:
    """Return the status of a hand-off from those of its ranks, in the order of ranks."""
    verdict = agree([{_KEY: status} for status in statuses])[_KEY]
    return TransferStatus(
        phase=verdict.phase,
        cause=verdict.cause,
        message=verdict.message if verdict.rank is None else f"rank {verdict.rank}: {verdict.message}",
        prefix_pages=min(status.prefix_pages for status in statuses),
        bytes_moved=sum(status.bytes_moved for status in statuses),
        releasable=verdict.releasable,
    )


class _Ranked(Generic[AnyConnector]):
    """What both roles share."""

    def __init__(self, connector: AnyConnector, ranks: Ranks, kv: PagedKV, wake: Callable[[], None]) -> None:
        self._connector: AnyConnector = connector
        self._ranks, self._kv, self._wake = ranks, kv, wake
        self._live: dict[int, RankedPrefillTransfer | RankedDecodeTransfer] = {}
        self._handles = itertools.count(1)
        self._drains = False
        ranks.on_change = self._on_change

    def beat(self) -> None:
        """See `Connector`. A hand-off that failed at one rank is aborted at all ranks."""
        self._connector.beat()
        if self._connector.draining and not self._drains:
            self._drains = True
            self._ranks.order_all(Drain())
        for handle, transfer in list(self._live.items()):
            status = transfer.status
            if status.phase is Phase.FAILED:
                transfer.abort(status.message)
            if status.over:
                del self._live[handle]

    def set_queue(self, name: str, reqs: int, oldest_s: float | None, moved_total: int) -> None:
        """See `Connector`."""
        self._connector.set_queue(name, reqs, oldest_s, moved_total)

    def _on_change(self, rank: int, changed: Changed) -> None:
        """Take a rank's report, on the thread that reads from it."""
        if (transfer := self._live.get(changed.handle)) is not None:
            transfer.changed(rank, changed.status)
            self._wake()


class RankedPrefill(_Ranked[PrefillConnector]):
    """`PrefillConnector` for all ranks."""

    def open(
        self, room: int, request_id: str, *, prompt: bytes, deadline_s: float, traceparent: str | None = None
    ) -> RankedPrefillTransfer:
        """See `PrefillConnector`. Only rank 0's spans belong to the caller's trace."""
        own = self._connector.open(room, request_id, prompt=prompt, deadline_s=deadline_s, traceparent=traceparent)
        handle = next(self._handles)
        transfer = RankedPrefillTransfer(handle, own, self._ranks, self._kv)
        self._live[handle] = transfer
        self._ranks.order_all(Open(handle, None, room, request_id, prompt, deadline_s))
        return transfer


class RankedDecode(_Ranked[DecodeConnector]):
    """`DecodeConnector` for all ranks."""

    def open(
        self,
        prefill: str,
        room: int,
        request_id: str,
        *,
        prompt: bytes,
        deadline_s: float,
        traceparent: str | None = None,
    ) -> RankedDecodeTransfer:
        """See `DecodeConnector`. Only rank 0's spans belong to the caller's trace."""
        own = self._connector.open(
            prefill, room, request_id, prompt=prompt, deadline_s=deadline_s, traceparent=traceparent
        )
        handle = next(self._handles)
        transfer = RankedDecodeTransfer(handle, own, self._ranks)
        self._live[handle] = transfer
        self._ranks.order_all(Open(handle, prefill, room, request_id, prompt, deadline_s))
        return transfer
