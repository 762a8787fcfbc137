"""Prefill's half of one hand-off, as SGLang's scheduler calls it."""

import logging
import time
from typing import Any

from pdpool_connector import Phase, PrefillConnector, PrefillTransfer

from . import surface
from .half import Half
from .memory import state_ids

log = logging.getLogger(__name__)


class Sender(surface.BaseKVSender):
    """One request at prefill. The scheduler polls it, sends its chunks, and clears it."""

    def __init__(
        self,
        mgr: Any,  # noqa: ANN401 - our Manager; its type would be a circle
        bootstrap_addr: str,  # noqa: ARG002 - its own registry
        bootstrap_room: int | None,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self.half = Half(bootstrap_room, surface.taken_request())
        self.bootstrap_room = self.half.room
        self.has_sent = False
        self._early_send_wait_event: Any = None
        self._pages = self._next = 0
        self._aux_index: int | None = None
        self._first_send: float | None = None
        self._took: float | None = None
        self._last_poll = surface.Poll.BOOTSTRAPPING
        connector: PrefillConnector = mgr.connector
        if not req_has_disagg_prefill_dp_rank and self.bootstrap_room is not None:
            self._check_dp_rank(self.bootstrap_room)
        if not self.half.status.ended and self.bootstrap_room is not None:
            self.half.transfer = connector.open(self.bootstrap_room, self.half.request_id, prompt=self.half.digest())

    def _check_dp_rank(self, room: int) -> None:
        own, ranks = self.kv_mgr.dp_rank, self.kv_mgr.dp_size
        if room % ranks != own:
            self.half.refuse(
                f"the request came to data-parallel rank {own} of {ranks}, and decode looks for room {room} at rank "
                f"{room % ranks}: route by bootstrap_room, or name the rank in both requests"
            )

    @property
    def must_hold(self) -> bool:
        """Whether transfers may still read a request that was given up. All ranks of the instance answer alike."""
        return self.half.concluded and self.has_sent

    @property
    def releasable(self) -> bool:
        """Whether no transfer touches pages and aux row any more."""
        return self.half.status.releasable

    # --- What the scheduler calls ---

    def poll(self) -> int:
        """SGLang's status; it never goes back, and after `init` the request is no longer waiting for decode."""
        phase = self.half.status.phase
        if phase is Phase.FAILED:
            return surface.Poll.FAILED
        if phase is Phase.DONE and self._aux_index is not None:
            if self._took is None and self._first_send is not None:
                self._took = time.perf_counter() - self._first_send
            return surface.Poll.SUCCESS
        known = phase is not Phase.WAITING or self._last_poll != surface.Poll.BOOTSTRAPPING
        current = surface.Poll.WAITING if known else surface.Poll.BOOTSTRAPPING
        if self.has_sent and phase is Phase.TRANSFERRING:
            current = surface.Poll.TRANSFERRING
        self._last_poll = max(self._last_poll, current)
        return self._last_poll

    def poll_pp_consensus(self) -> int:
        """As `poll`: the connector agrees with decode for each rank."""
        return self.poll()

    def pop_decode_prefix_len(self) -> int:
        """Tokens at the start of the prompt that decode has already."""
        return self.half.status.prefix_pages * int(self.kv_mgr.kv_args.page_size)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Decode is known: so many pages are sent, and this aux row with the last of them."""
        self._pages, self._aux_index = num_kv_indices, aux_index
        self._next = self.half.status.prefix_pages
        self._pages += self._next

    def get_max_transfer_tokens(self) -> int | None:
        """No limit: the connector cuts sends into chunks itself."""
        return None

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """Whether there is something to send; the last send may have no pages."""
        return num_pages > 0 or last_chunk

    def send(
        self,
        kv_indices: Any,  # noqa: ANN401 - array of int32
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,  # noqa: ARG002 - pages are whole
    ) -> None:
        """Send the next pages. With an event of the overlap schedule, once the event has happened."""
        event, self._early_send_wait_event = self._early_send_wait_event, None
        start, self._next = self._next, self._next + len(kv_indices)
        last = self._next >= self._pages
        self.has_sent = True
        transfer = self.half.transfer
        if self.half.status.ended or not isinstance(transfer, PrefillTransfer):
            return
        if self._first_send is None:
            self._first_send = time.perf_counter()
        try:
            transfer.send(
                kv_indices,
                start=start,
                last=last,
                aux_slot=self._aux_index if last else None,
                state=state_ids(self.kv_mgr.kv_args, state_indices) if last else None,
                ready=None if event is None else event.query,
            )
        except (ValueError, RuntimeError) as error:
            log.exception("pages of room %s cannot be sent", self.bootstrap_room)
            self.half.give_up(f"prefill cannot send: {error}")

    def get_transfer_metric(self) -> Any:  # noqa: ANN401 - SGLang's KVTransferMetric
        """What SGLang shows as its transfer metrics; asked after `clear`."""
        return surface.KVTransferMetric(
            transfer_latency_s=self._took, transfer_total_bytes=self.half.status.bytes_moved
        )

    def failure_exception(self) -> None:
        """Raise why it failed."""
        raise self.half.failure()

    def abort(self) -> None:
        """The client has left."""
        self.half.conclude("prefill's engine aborted the request")

    def clear(self) -> None:
        """The request is over."""
        self.half.end()
