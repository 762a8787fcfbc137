"""The hand-offs of an engine of several ranks: to rank 0's scheduler they look like those of one connector."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pdpool_connector import DecodeConnector, DecodeTransfer, Phase, PrefillConnector, PrefillTransfer, TransferStatus
from pdpool_connector.protocol.rank_consensus import Key, agree

from pdpool_reference.kv import PagedKV
from pdpool_reference.rank_orders import Abort, Drain, Offer, Request, Said, Send
from pdpool_reference.ranks import Ranks


class RankedTransfer:
    """One hand-off: the transfer of rank 0, and what the other ranks say of theirs."""

    def __init__(
        self, handle: int, own: PrefillTransfer | DecodeTransfer, sibling: int, ranks: Ranks, kv: PagedKV
    ) -> None:
        self._key = Key(own.room, sibling, own.request_id)
        self._handle, self._own, self._ranks, self._kv = handle, own, ranks, kv
        self._others = dict.fromkeys(ranks.numbers, TransferStatus(Phase.WAITING))
        self._aborted = False

    @property
    def status(self) -> TransferStatus:
        """What all ranks together have come to."""
        return together(self._key, [self._own.status, *self._others.values()])

    def send(self, pages: NDArray[np.int32], *, start: int, last: bool = False, aux_slot: int | None = None) -> None:
        """See `PrefillTransfer`: each rank sends its part of the same pages."""
        assert isinstance(self._own, PrefillTransfer), "decode sends nothing"
        row = None if aux_slot is None else self._kv.read_aux(aux_slot)
        self._ranks.order_all(Send(self._handle, pages, start, last, aux_slot, row))
        self._own.send(pages, start=start, last=last, aux_slot=aux_slot)

    def abort(self, message: str = "") -> None:
        """See `Transfer`: given up at every rank."""
        if not self._aborted:
            self._aborted = True
            self._own.abort(message)
            self._ranks.order_all(Abort(self._handle, message))

    def hear(self, rank: int, status: TransferStatus) -> None:
        """A rank has said how its part stands."""
        self._others[rank] = status


def together(key: Key, statuses: Sequence[TransferStatus]) -> TransferStatus:
    """The status of a hand-off from those of its ranks, in the order of ranks."""
    verdict = agree([{key: status} for status in statuses])[key]
    return TransferStatus(
        phase=verdict.phase,
        cause=verdict.cause,
        message=verdict.message if verdict.rank is None else f"rank {verdict.rank}: {verdict.message}",
        prefix_pages=min(status.prefix_pages for status in statuses),
        bytes_moved=sum(status.bytes_moved for status in statuses),
        releasable=verdict.releasable,
    )


AnyConnector = TypeVar("AnyConnector", PrefillConnector, DecodeConnector)


class _Ranked(Generic[AnyConnector]):
    """What both roles share. All methods but `told` are for the scheduler's thread."""

    def __init__(self, connector: AnyConnector, ranks: Ranks, kv: PagedKV, wake: Callable[[], None]) -> None:
        self._connector: AnyConnector = connector
        self._ranks, self._kv, self._wake = ranks, kv, wake
        self._live: dict[int, RankedTransfer] = {}
        self._handles = 0
        ranks.told = self.told

    def told(self, rank: int, said: Said) -> None:
        """A rank has said how a part of a hand-off stands; from the thread that listens to it."""
        transfer = self._live.get(said.handle)
        if transfer is not None:
            transfer.hear(rank, said.status)
            self._wake()

    def beat(self) -> None:
        """See `Connector`."""
        self._connector.beat()
        self._tend()

    def drain(self) -> None:
        """See `Connector`."""
        self._connector.drain()
        self._ranks.order_all(Drain())

    def _add(self, own: PrefillTransfer | DecodeTransfer, sibling: int) -> RankedTransfer:
        self._handles += 1
        transfer = RankedTransfer(self._handles, own, sibling, self._ranks, self._kv)
        self._live[self._handles] = transfer
        return transfer

    def _tend(self) -> None:
        """What has failed at one rank is given up at all; what is over everywhere is forgotten."""
        for handle, transfer in list(self._live.items()):
            status = transfer.status
            if status.phase is Phase.FAILED:
                transfer.abort(status.message)
            if status.ended and status.releasable:
                del self._live[handle]


class RankedPrefill(_Ranked[PrefillConnector]):
    """`PrefillConnector` as the scheduler uses it, for all ranks."""

    def open(
        self,
        room: int,
        request_id: str,
        *,
        sibling: int = 0,
        prompt: bytes = b"",
        deadline_s: float | None = None,
        traceparent: str | None = None,
    ) -> RankedTransfer:
        """See `PrefillConnector`. The other ranks' spans are found by room and attempt."""
        own = self._connector.open(
            room, request_id, sibling=sibling, prompt=prompt, deadline_s=deadline_s, traceparent=traceparent
        )
        transfer = self._add(own, sibling)
        self._ranks.order_all(Request(self._handles, room, request_id, sibling, prompt, deadline_s))
        return transfer


class RankedDecode(_Ranked[DecodeConnector]):
    """`DecodeConnector` as the scheduler uses it, for all ranks."""

    def open(
        self,
        prefill: str,
        room: int,
        request_id: str,
        *,
        pages: NDArray[np.int32],
        aux_slot: int,
        sibling: int = 0,
        prompt: bytes = b"",
        deadline_s: float | None = None,
        traceparent: str | None = None,
    ) -> RankedTransfer:
        """See `DecodeConnector`. The other ranks' spans are found by room and attempt."""
        own = self._connector.open(
            prefill,
            room,
            request_id,
            pages=pages,
            aux_slot=aux_slot,
            sibling=sibling,
            prompt=prompt,
            deadline_s=deadline_s,
            traceparent=traceparent,
        )
        transfer = self._add(own, sibling)
        offer = Offer(self._handles, prefill, room, request_id, pages, aux_slot, sibling, prompt, deadline_s)
        self._ranks.order_all(offer)
        return transfer

    def refuse(
        self, prefill: str, room: int, request_id: str, message: str, *, sibling: int = 0, prompt: bytes = b""
    ) -> None:
        """See `DecodeConnector`. One rank's word ends the request at all of prefill's."""
        self._connector.refuse(prefill, room, request_id, message, sibling=sibling, prompt=prompt)

    def set_queue(self, name: str, reqs: int, oldest_s: float | None, moved_total: int) -> None:
        """See `Connector`."""
        self._connector.set_queue(name, reqs, oldest_s, moved_total)
