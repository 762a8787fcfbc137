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
_RECEIVER = _SENDER | {Phase.WAITING: WAITING_FOR_INPUT}


class TransferError(Exception):
    """What `failure_exception` raises."""


class Sender:
    """Prefill's side of a request; SGLang makes it when the request enters its bootstrap queue."""

    def __init__(self, connector: PrefillConnector, room: int) -> None:
        self.transfer: PrefillTransfer = connector.open(room, f"room-{room}")
        self.pages = self.aux_slot = self.sent = 0

    def poll(self) -> int:
        return _SENDER[self.transfer.status.phase]

    def pop_decode_prefix_len(self) -> int:
        return self.transfer.status.prefix_pages

    def init(self, num_kv_indices: int, aux_index: int) -> None:
        self.pages, self.aux_slot = num_kv_indices, aux_index

    def get_max_transfer_tokens(self) -> None:
        return None

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return bool(num_pages) or last_chunk

    def send(self, kv_indices: np.ndarray, state_indices: list | None) -> None:
        last = state_indices is not None
        self.transfer.send(kv_indices, start=self.sent, last=last, aux_slot=self.aux_slot if last else None)
        self.sent += len(kv_indices)

    def abort(self) -> None:
        self.transfer.abort("the client left")

    def failure_exception(self) -> None:
        self.clear()
        raise TransferError(f"{self.transfer.status.cause}: {self.transfer.status.message}")

    def get_transfer_metric(self) -> int:
        return self.transfer.status.bytes_moved

    def clear(self) -> None:
        """Nothing to do: a transfer that has ended is in no table."""


class Receiver:
    """Decode's side of a request."""

    def __init__(self, connector: DecodeConnector, prefill: str, room: int) -> None:
        self._connector, self._prefill, self._room = connector, prefill, room
        self.transfer: DecodeTransfer | None = None
        connector.expect(prefill, room, f"room-{room}")

    def init(self, prefill_dp_rank: int) -> None:
        """Nothing to do: the connector finds the ranks itself, and without blocking."""

    def poll(self) -> int:
        return BOOTSTRAPPING if self.transfer is None else _RECEIVER[self.transfer.status.phase]

    def send_metadata(self, kv_indices: np.ndarray, aux_index: int, decode_prefix_len: int) -> None:
        self.transfer = self._connector.open(
            self._prefill,
            self._room,
            f"room-{self._room}",
            pages=kv_indices,
            aux_slot=aux_index,
            prefix_pages=decode_prefix_len,
        )

    def abort(self) -> None:
        if self.transfer is None:
            self._connector.refuse(self._prefill, self._room, f"room-{self._room}", "the client left")
        else:
            self.transfer.abort("the client left")

    def failure_exception(self) -> None:
        assert self.transfer is not None
        self.clear()
        raise TransferError(f"{self.transfer.status.cause}: {self.transfer.status.message}")

    def is_abort_release_safe(self) -> bool:
        assert self.transfer is not None
        return self.transfer.status.releasable

    def clear(self) -> None:
        """Nothing to do."""
