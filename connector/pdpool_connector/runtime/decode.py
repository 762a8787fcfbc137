"""Decode's connector: offers memory to prefills, and says when the cache has landed."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from pdpool_connector.layout.memory import KVMemory
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.events import (
    Connect,
    Effect,
    Linked,
    OpenAttempt,
    PeerLost,
    PeerReady,
    Received,
    Unreachable,
)
from pdpool_connector.protocol.outcome import Cause, TransferStatus
from pdpool_connector.protocol.states import DecodeState
from pdpool_connector.runtime.config import ConnectorConfig
from pdpool_connector.runtime.connector import Connector
from pdpool_connector.runtime.link import Link, Stage
from pdpool_connector.runtime.stats import PeerStats
from pdpool_connector.runtime.transfer import DecodeTransfer, check_request, check_slot, pack_pages
from pdpool_connector.transport.address import parse_address

log = logging.getLogger(__name__)

MAX_LINKS = 1024
"""Prefills that are known or being tried at a time; bootstrap hosts come from requests, so there must be a bound."""
ASKERS = 4
"""Threads that ask bootstrap registries; a silent one keeps its thread for `link.ASK_S`."""


class DecodeConnector(Connector[DecodeTransfer]):
    """Decode's end: `open` a hand-off into pages of yours, and wait until it lands. See `Connector` for the rest."""

    role = "decode"

    def __init__(
        self,
        config: ConnectorConfig,
        memory: KVMemory,
        on_change: Callable[[], None],
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._links: dict[str, Link] = {}
        self._by_peer: dict[str, Link] = {}
        self._pool = ThreadPoolExecutor(ASKERS, thread_name_prefix="pdpool-ask")
        super().__init__(config, memory, on_change, registry)

    def open(
        self,
        prefill: str,
        room: int,
        request_id: str,
        *,
        pages: NDArray[np.int32],
        aux_slot: int,
        prefix_pages: int = 0,
        sibling: int = 0,
        deadline_s: float | None = None,
    ) -> DecodeTransfer:
        """Offer memory for the cache of a request that prefill computes under `room`; returns at once.

        `prefill`: the bootstrap registry's "host:port". `pages`: int32 page ids that take logical pages `prefix_pages`
        .. `prefix_pages + len(pages)`; the first `prefix_pages` decode holds already. `aux_slot`: takes the aux row.
        `sibling`: index of the request among those that share the room. `deadline_s`: life of the attempt, by default
        `config.request_deadline_s`. Raises ValueError for values out of range.
        """
        life = self.config.request_deadline_s if deadline_s is None else deadline_s
        check_request(room, request_id, sibling, life)
        parse_address(prefill)
        check_slot(aux_slot, self.memory)
        if prefix_pages < 0:
            raise ValueError(f"prefix_pages={prefix_pages} is negative")
        packed = pack_pages(pages, self.memory)
        handle = next(self._handles)
        transfer = DecodeTransfer(handle, room, request_id, self._post)
        wish = OpenAttempt(handle, prefill, room, sibling, request_id, packed, prefix_pages, aux_slot, life)
        return self._open(transfer, wish)

    # --- What links tell ---

    def link_paired(self, link: Link, peer: str, version: int) -> None:
        """See `LinkOwner`."""
        self._by_peer[peer] = link
        log.info("paired with prefill %s (%s)", link.prefill, peer)
        self._drive(PeerReady(peer, version))
        self._drive(Linked(link.prefill, (peer,)))

    def link_lost(self, link: Link, peer: str, message: str) -> None:
        """See `LinkOwner`. Another address may lead to the same process; then it is lost by that one only."""
        if self._by_peer.get(peer) is link:
            del self._by_peer[peer]
            self._drive(PeerLost(peer, message))

    def link_failed(self, link: Link, cause: Cause, message: str) -> None:
        """See `LinkOwner`."""
        if link.stage is Stage.CLOSED:
            del self._links[link.prefill]
        self._drive(Unreachable(link.prefill, cause, message))

    def link_frame(self, link: Link, frame: f.AttemptFrame) -> None:
        """See `LinkOwner`."""
        del link
        self._drive(Received(frame))

    def link_wanted(self, link: Link) -> bool:
        """See `LinkOwner`."""
        return self._decode.waits_for(link.prefill)

    def link_owed(self, link: Link) -> bool:
        """See `LinkOwner`."""
        return self._decode.holds_for(link.prefill)

    # --- Hooks of the base ---

    def _make_machine(self) -> DecodeMachine:
        self._decode = DecodeMachine(self.incarnation, self.config.timing)
        return self._decode

    def _on_server(self) -> None:
        """Our control port gives this process its address; nobody has anything to say there yet."""
        for arrival in self._server.receive():
            self._drops.note("direction", f"{type(arrival.frame).__name__} came to decode's control port")
        self._server.ended()

    def _hello(self) -> f.Hello:
        return f.Hello(
            version=f.VERSION_MAX,
            oldest_version=f.VERSION_MIN,
            sender=self.incarnation,
            address=self.control_address,
            memory=self._remote_form,
        )

    def _transmit(self, peer: str, frame: f.Frame) -> None:
        link = self._by_peer.get(peer)
        if link is not None and link.stage is Stage.PAIRED:
            link.send(frame)

    def _perform(self, effect: Effect) -> None:
        if not isinstance(effect, Connect):
            return
        if (link := self._links.get(effect.prefill)) is not None:
            link.hurry()
            return
        if len(self._links) >= MAX_LINKS:
            why = f"decode knows {MAX_LINKS} prefills, which is its limit"
            self._reactor.post(lambda: self._drive(Unreachable(effect.prefill, Cause.REFUSED, why)))
            return
        self._links[effect.prefill] = Link(
            effect.prefill,
            self._hello,
            self,
            filtered=self._filtered,
            reactor=self._reactor,
            context=self._context,
            pool=self._pool,
            drops=self._drops,
            networks=self.config.allowed_networks,
            connect_s=self.config.connect_deadline_s,
        )

    def _publish(self, handle: int, status: TransferStatus) -> None:
        known = self._transfers.get(handle)
        if known is not None and status.ended:
            self._bytes_moved += status.bytes_moved - known.status.bytes_moved
        super()._publish(handle, status)

    def _peer_stats(self, now: float) -> tuple[PeerStats, ...]:
        rows = []
        for peer, link in self._by_peer.items():
            attempts = self._decode.attempts_of(peer)
            waiting = sum(attempt.state in (DecodeState.OPENING, DecodeState.ACCEPTED) for attempt in attempts)
            rows.append(PeerStats(peer, link.control, now - link.last_seen, len(attempts), waiting))
        return tuple(rows)

    def _held_pages(self) -> int:
        return sum(attempt.pages for attempt in self._decode.held())

    def _unsettled(self) -> int:
        return self._machine.census.count("aborting")

    def _say_goodbye(self) -> None:
        for link in self._by_peer.values():
            if link.stage is Stage.PAIRED:
                bye = f.Goodbye(version=link.version, sender=self.incarnation, reason="decode is shutting down")
                link.send(bye)

    def _join_workers(self, deadline: float) -> bool:
        self._pool.shutdown(wait=False, cancel_futures=True)
        return super()._join_workers(deadline)

    def _at_end(self) -> None:
        for link in list(self._links.values()):
            link.close()
        super()._at_end()
