"""The calls of SGLang 0.5.23's scheduler on its KV sender and receiver, mapped onto our connectors one to one.

SGLang counts a prefix that decode holds in tokens, and the connector counts it in pages.
"""

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
_RECEIVER = _SENDER | {Phase.TRANSFERRING: WAITING_FOR_INPUT}
"""A receiver never shows that it transfers."""
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
        return self.transfer.status.prefix_pages * self._page_tokens

    def init(self, num_kv_indices: int, aux_index: int) -> None:
        self.sent = self.transfer.status.prefix_pages
        self.pages, self.aux_slot = self.sent + num_kv_indices, aux_index

    def get_max_transfer_tokens(self) -> None:
        """There is no such bound: chunks are as long as the scheduler likes."""

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return bool(num_pages) or last_chunk

    def send(self, kv_indices: np.ndarray | list[int], state_indices: list | None, num_kv_tokens: int) -> None:
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
        """Let go of it. One that has ended is in no table; another is aborted, or it would live to its deadline."""
        if not self.transfer.status.ended:
            self.transfer.abort(CLEARED)


class Receiver:
    """Decode's side of a request; SGLang makes it when the request arrives, before it has memory for it."""

    def __init__(self, connector: DecodeConnector, prefill: str, room: int) -> None:
        self.transfer: DecodeTransfer = connector.open(prefill, room, f"room-{room}")
        self._page_tokens = connector.memory.page_tokens
        self._initialised = False

    def init(self, prefill_dp_rank: int) -> None:
        """The connector finds the ranks itself, and without blocking."""
        del prefill_dp_rank
        self._initialised = True

    def poll(self) -> int:
        if self.transfer.status.phase is Phase.WAITING and self._initialised:
            return WAITING_FOR_INPUT
        return _RECEIVER[self.transfer.status.phase]

    def send_metadata(
        self, kv_indices: np.ndarray | list[int], aux_index: int, state_indices: list[int], decode_prefix_len: int
    ) -> None:
        assert decode_prefix_len % self._page_tokens == 0, "decode holds whole pages of a prefix"
        assert not state_indices, "the recorded model has no state"
        self.transfer.offer(kv_indices, aux_slot=aux_index, prefix_pages=decode_prefix_len // self._page_tokens)

    def abort(self) -> None:
        self.transfer.abort("the client left")

    def failure_exception(self) -> None:
        self.clear()
        raise TransferError(f"{self.transfer.status.cause}: {self.transfer.status.message}")

    def is_abort_release_safe(self) -> bool:
        return self.transfer.status.releasable

    def clear(self) -> None:
        """Let go of it, as the sender does."""
        if not self.transfer.status.ended:
            self.transfer.abort(CLEARED)
