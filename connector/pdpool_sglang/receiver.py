"""Decode's half of one hand-off, as SGLang's scheduler calls it."""

import logging
from typing import Any, Final

from pdpool_connector import DecodeConnector, DecodeTransfer, Phase

from . import surface
from .half import Half
from .memory import pages_of, state_ids
from .settings import registry_of

log = logging.getLogger(__name__)

POLLS: Final = {
    Phase.WAITING: surface.Poll.WAITING,
    Phase.READY: surface.Poll.WAITING,
    Phase.TRANSFERRING: surface.Poll.TRANSFERRING,
    Phase.DONE: surface.Poll.SUCCESS,
    Phase.FAILED: surface.Poll.FAILED,
}


class Receiver(surface.BaseKVReceiver):
    """One request at decode. The transfer is opened when the request arrives, and memory is offered later.

    A request that prefill computes again is opened with its offer. Prefill gets its half only then.
    """

    require_staging = False
    conclude_state = None

    def __init__(
        self,
        mgr: Any,  # noqa: ANN401 - our Manager; its type would be a circle
        bootstrap_addr: str,
        bootstrap_room: int | None = None,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.abort_notified = False
        self.bootstrap_infos = (bootstrap_addr,)
        """SGLang counts them as acknowledgements to wait for; `Manager.is_abort_release_safe` needs no count."""
        request, self._recomputed = surface.taken_request(), surface.taken_recomputed()
        self.half = Half(bootstrap_room, request)
        self.bootstrap_room = self.half.room
        self._dp_rank: int | None = None
        self._inited = self._offered = False
        if not self._recomputed and self.bootstrap_room is not None:
            self._open(mgr.dp_rank_of(bootstrap_addr, request, self.bootstrap_room))

    def _open(self, dp_rank: int) -> None:
        """Open at this data-parallel rank of prefill. One that was opened elsewhere is given up."""
        if dp_rank == self._dp_rank or self.half.status.ended or self.bootstrap_room is None:
            return
        if self.half.transfer is not None:
            self.half.transfer.abort(f"prefill's data-parallel rank {dp_rank} has the request")
            self.half.transfer = None
        connector: DecodeConnector = self.kv_mgr.connector
        self._dp_rank = dp_rank
        try:
            self.half.transfer = connector.open(
                registry_of(self.bootstrap_addr, dp_rank),
                self.bootstrap_room,
                self.half.request_id,
                prompt=self.half.digest(recomputed=self._recomputed),
            )
        except ValueError as error:
            self.half.refuse(str(error))

    # --- What the scheduler calls ---

    def init(self, prefill_dp_rank: int) -> None:
        """The data-parallel rank of prefill is known."""
        if self._recomputed:
            self._dp_rank = prefill_dp_rank
        else:
            self._open(prefill_dp_rank)
        self._inited = True

    def send_metadata(
        self,
        kv_indices: Any,  # noqa: ANN401 - array of int32
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        **destination: Any,  # noqa: ANN401
    ) -> None:
        """Offer memory: pages, the aux row, and state items."""
        if self._recomputed:
            dp_rank, self._dp_rank = self._dp_rank or 0, None
            self._open(dp_rank)
        self._offered = True
        transfer = self.half.transfer
        if not isinstance(transfer, DecodeTransfer):
            return
        if destination:
            self.half.give_up(f"decode cannot offer memory: {', '.join(destination)} is not supported")
            return
        try:
            transfer.offer(
                kv_indices,
                aux_slot=aux_index,
                prefix_pages=pages_of(decode_prefix_len or 0, self.kv_mgr.kv_args.page_size, "decode_prefix_len"),
                state=state_ids(self.kv_mgr.kv_args, state_indices),
            )
        except (ValueError, RuntimeError) as error:
            log.exception("memory for room %s cannot be offered", self.bootstrap_room)
            self.half.give_up(f"decode cannot offer memory: {error}")

    def poll(self) -> int:
        """SGLang's status. Before `init` and before the offer only what SGLang's queues expect there."""
        phase = self.half.status.phase
        if phase is Phase.FAILED:
            return surface.Poll.FAILED
        if not self._inited:
            return surface.Poll.BOOTSTRAPPING
        return POLLS[phase] if self._offered else surface.Poll.WAITING

    def failure_exception(self) -> None:
        """Raise why it failed."""
        raise self.half.failure()

    def ensure_abort_notified(self, force_arm: bool = False) -> None:  # noqa: ARG002 - nothing to arm
        """Give the transfer up. The scheduler keeps the pages until `is_abort_release_safe`."""
        self.half.conclude("the request failed on another rank of decode")
        self.abort_notified = True
        self.kv_mgr.hold(self)

    def abort(self) -> None:
        """The client has left."""
        self.half.conclude("decode's engine aborted the request")
        if self._offered:
            self.abort_notified = True
            self.kv_mgr.hold(self)

    def clear(self) -> None:
        """The request is over."""
        self.kv_mgr.unhold(self)
        self.half.end()
