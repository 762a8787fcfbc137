"""The calls of SGLang 0.5.23's scheduler on its KV sender and receiver, mapped onto our connectors one to one."""

import numpy as np
from pdpool_connector import DecodeConnector, DecodeTransfer, Phase, PrefillConnector, PrefillTransfer

FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING, SUCCESS = range(5)
"""SGLang's KVPoll."""
_SENDER = {
    Phase.WAITING: BOOTSTRAPPING,
    Phase.READY: WAITING_FOR_INPUT,
    Phase.TRANSFERRING: TRANSFERRING,
    Phase.DONE: SUCCESS,
    Phase.FAILED: FAILED,
}
_RECEIVER = _SENDER | dict.fromkeys((Phase.WAITING, Phase.READY, Phase.TRANSFERRING), WAITING_FOR_INPUT)
"""A receiver never says that it transfers."""
CLEARED = "the engine let go of it"


class TransferError(Exception):
    """What `failure_exception` raises."""


class Sender:
    """Prefill's side of a request; SGLang makes it when the request enters its bootstrap queue."""

    def __init__(self, connector: PrefillConnector, room: int) -> None:
        self.transfer: PrefillTransfer = connector.open(room, f"room-{room}")
        self._page_tokens = connector.memory.page_tokens
        self.pages = self.aux_slot = self.sent = 0

    def poll(self) -> int:
        return _SENDER[self.transfer.status.phase]

    def pop_decode_prefix_len(self) -> int:
        return self.transfer.status.prefix_pages

    def init(self, num_kv_indices: int, aux_index: int) -> None:
        self.pages, self.aux_slot = num_kv_indices, aux_index

    def get_max_transfer_tokens(self) -> None:
        """There is no such bound: chunks are as long as the scheduler likes."""

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return bool(num_pages) or last_chunk

    def send(self, kv_indices: np.ndarray, state_indices: list | None, num_kv_tokens: int) -> None:
        last = state_indices is not None
        full = len(kv_indices) * self._page_tokens
        assert full - self._page_tokens < num_kv_tokens <= full, "whole pages are sent, the last may not be full"
        self.transfer.send(kv_indices, start=self.sent, last=last, aux_slot=self.aux_slot if last else None)
        self.sent += len(kv_indices)
        assert (self.sent == self.pages) is last, "the last send ends where `init` said"

    def abort(self) -> None:
        self.transfer.abort("the client left")

    def failure_exception(self) -> None:
        self.clear()
        raise TransferError(f"{self.transfer.status.cause}: {self.transfer.status.message}")

    def get_transfer_metric(self) -> int:
        return self.transfer.status.bytes_moved

    def clear(self) -> None:
        """Let go of it. What has ended is in no table; what has not is given up, or it would live to its deadline."""
        if not self.transfer.status.ended:
            self.transfer.abort(CLEARED)


class Receiver:
    """Decode's side of a request."""

    def __init__(self, connector: DecodeConnector, prefill: str, room: int) -> None:
        self._connector, self._where = connector, (prefill, room, f"room-{room}")
        self._initialised = self._refused = False
        self.transfer: DecodeTransfer | None = None
        connector.expect(*self._where)

    def init(self, prefill_dp_rank: int) -> None:
        """Nothing of ours to do: the connector finds the ranks itself, and without blocking."""
        del prefill_dp_rank
        self._initialised = True

    def poll(self) -> int:
        if self._refused:
            return FAILED
        if self.transfer is None:
            return WAITING_FOR_INPUT if self._initialised else BOOTSTRAPPING
        return _RECEIVER[self.transfer.status.phase]

    def send_metadata(
        self, kv_indices: np.ndarray, aux_index: int, state_indices: list[int], decode_prefix_len: int
    ) -> None:
        self.transfer = self._connector.open(
            *self._where,
            pages=kv_indices,
            aux_slot=aux_index,
            state=np.array(state_indices, np.int32) if state_indices else None,
            prefix_pages=decode_prefix_len,
        )

    def abort(self) -> None:
        self._give_up("the client left")

    def _give_up(self, why: str) -> None:
        if self.transfer is not None:
            self.transfer.abort(why)
        elif not self._refused:
            self._refused = True
            self._connector.refuse(*self._where, why)

    def failure_exception(self) -> None:
        assert self.transfer is not None
        self.clear()
        raise TransferError(f"{self.transfer.status.cause}: {self.transfer.status.message}")

    def is_abort_release_safe(self) -> bool:
        assert self.transfer is not None
        return self.transfer.status.releasable

    def clear(self) -> None:
        """Let go of it: what has not ended is given up, and what was only announced is taken back."""
        if self.transfer is None or not self.transfer.status.ended:
            self._give_up(CLEARED)
