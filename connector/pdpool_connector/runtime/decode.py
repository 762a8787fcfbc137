"""Decode's connector: offers memory to prefills, and says when the cache has landed."""

import logging
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from pdpool_connector.layout.memory import KVMemory, LayoutError, decode_remote
from pdpool_connector.layout.pairing import pair
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.decode_read import DecodeReadMachine
from pdpool_connector.protocol.events import (
    Connect,
    Effect,
    ExpectAttempt,
    Linked,
    OpenAttempt,
    PeerLost,
    PeerReady,
    Read,
    Received,
    Report,
    StopReading,
    Unlinked,
    Unreachable,
    Writer,
)
from pdpool_connector.protocol.fence import Proof
from pdpool_connector.protocol.states import DecodeState
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.versions import VersionMismatchError, negotiate
from pdpool_connector.runtime.checksum_verifier import ChecksumVerifier
from pdpool_connector.runtime.config import ConnectorConfig
from pdpool_connector.runtime.connector import Connector
from pdpool_connector.runtime.instance_connection import Found, InstanceConnection, Stage
from pdpool_connector.runtime.page_guard import PageGuard
from pdpool_connector.runtime.rank_connection import RankConnection
from pdpool_connector.runtime.reads import Failure, Reads
from pdpool_connector.runtime.stats import LinkStats, PeerStats
from pdpool_connector.runtime.transfer import DecodeTransfer
from pdpool_connector.runtime.validation import (
    RefusalCause,
    Request,
    as_aux_row,
    as_reason,
    as_refusal_cause,
    as_request,
    as_whole,
    pack_pages,
    pack_state,
)
from pdpool_connector.runtime.worker import join_all
from pdpool_connector.transport.address import AddressError, parse_address
from pdpool_connector.transport.bootstrap import BootstrapClient, RankInfo

log = logging.getLogger(__name__)

MAX_LINKS = 1024
"""Prefills that are known or being tried at a time; bootstrap hosts come from requests, so there must be a bound."""
ASK_S = 2.0
"""Time for one question to a bootstrap registry."""


class DecodeConnector(Connector[DecodeTransfer]):
    """Decode's end: `open` a hand-off into pages of yours, and wait until it lands. See `Connector` for the rest."""

    role = "decode"

    def __init__(
        self,
        config: ConnectorConfig,
        memory: KVMemory,
        on_change: Callable[[], None] = lambda: None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._links: dict[str, InstanceConnection] = {}
        self._by_peer: dict[str, InstanceConnection] = {}
        self._offered = PageGuard()
        self._client = BootstrapClient(config.allowed_networks)
        self._checks = ChecksumVerifier(
            memory, lambda event: self._drive(event), lambda call: self._reactor.post(call), config.checksum_rate
        )
        self._whole: dict[str, Sequence[Found]] = {}
        """Links whose ranks are paired, and whose memory is still being reached."""
        super().__init__(config, memory, on_change, registry)
        self._reads = Reads(
            self._backend, memory, self._reactor, self._drive, self._on_reachable, begun=self._checks.reads
        )

    def open(
        self,
        prefill: str,
        room: SupportsIndex,
        request_id: str,
        *,
        pages: NDArray[np.int32],
        aux_slot: SupportsIndex,
        state: NDArray[np.int32] | None = None,
        prefix_pages: SupportsIndex = 0,
        sibling: SupportsIndex = 0,
        prompt: bytes = b"",
        deadline_s: float | None = None,
        traceparent: str | None = None,
    ) -> DecodeTransfer:
        """Offer memory for the cache of a request that prefill computes under `room`; returns at once.

        `prefill`: the bootstrap registry's "host:port". `pages`: int32 page ids that take logical pages `prefix_pages`
        .. `prefix_pages + len(pages)`, at most 2**19; the first `prefix_pages` decode holds already. `aux_slot`: takes
        the aux row. `state`: int32 ids of items of the state pool, one for each that prefill will send; None where
        there are none. `sibling`: index of the request among those that share the room. `prompt`: digest of the prompt,
        as prefill gives it (`prompt_digest`): where rooms are used again, halves of different prompts then never meet.
        `deadline_s`: life of the attempt, by default `config.request_deadline_s`. `traceparent`: that header of
        the request's (W3C), for the span.

        Raises ValueError for values out of range, and for a page or state item that another hand-off was offered whose
        status is not `releasable` yet; TypeError for what is of another type; RuntimeError before `start`.
        """
        whose = self._request(prefill, room, request_id, sibling, prompt, deadline_s)
        params = OpenAttempt(
            next(self._handles),
            prefill,
            whose.room,
            whose.sibling,
            request_id,
            pack_pages(pages, self.memory, target=True),
            as_whole("prefix_pages", prefix_pages),
            as_aux_row(aux_slot, self.memory),
            whose.deadline_s,
            pack_state(state, self.memory, target=True),
            prompt,
        )
        self._check_started("open")
        self._offered.take(params)
        return self._open(DecodeTransfer(params, self._post, self._offered.give_back), params, traceparent)

    def expect(
        self,
        prefill: str,
        room: SupportsIndex,
        request_id: str,
        *,
        sibling: SupportsIndex = 0,
        prompt: bytes = b"",
        deadline_s: float | None = None,
    ) -> None:
        """Tell prefill that the engine has a request, which it will `open`, or `refuse`, later; returns at once.

        To be called as soon as the request has arrived, from any thread, with the arguments that `open` will have; best
        where a scheduler that stands still cannot keep it from being called. It is repeated until then. A request whose
        decode is lost before it was opened then ends at prefill at once, not at its deadline. It is a hint: where it
        does not arrive, or finds no room, nothing fails by it.

        Raises ValueError for values out of range, TypeError for what is of another type, RuntimeError before `start`.
        """
        whose = self._request(prefill, room, request_id, sibling, prompt, deadline_s)
        self._check_started("expect")
        self._post(ExpectAttempt(next(self._handles), prefill, *whose))

    def refuse(
        self,
        prefill: str,
        room: SupportsIndex,
        request_id: str,
        message: str,
        *,
        cause: RefusalCause = Cause.REFUSED,
        sibling: SupportsIndex = 0,
        prompt: bytes = b"",
    ) -> None:
        """Tell prefill that the engine will not `open` a request, announced or not; returns at once.

        Prefill's half then ends with `cause` and `message`; about these, and about `prompt`, see
        `PrefillConnector.refuse`. Raises as `open`.
        """
        self._check_started("refuse")
        whose = self._request(prefill, room, request_id, sibling, prompt, None)
        where = (next(self._handles), prefill, whose.room, whose.sibling, request_id)
        why = as_reason(message)
        params = OpenAttempt(
            *where, b"", 0, 0, whose.deadline_s, prompt=prompt, refused=why, refused_as=as_refusal_cause(cause)
        )
        self._open(DecodeTransfer(params, self._post, self._offered.give_back), params, None)

    def _request(
        self,
        prefill: str,
        room: SupportsIndex,
        request_id: str,
        sibling: SupportsIndex,
        prompt: bytes,
        deadline_s: float | None,
    ) -> Request:
        if not isinstance(prefill, str):
            raise TypeError(f'prefill={prefill!r} is of type {type(prefill).__name__}: give a str, "host:port"')
        try:
            parse_address(prefill)
        except AddressError as error:
            raise AddressError(f"prefill: {error}") from None
        life = self.config.request_deadline_s if deadline_s is None else deadline_s
        return as_request(room, request_id, sibling, life, prompt)

    # --- What links ask and tell ---

    def find(self, prefill: str) -> Future[Sequence[Found]]:
        """See `ConnectionOwner`."""
        return self._http.submit(self._find(prefill))

    async def _find(self, prefill: str) -> Sequence[Found]:
        """In the thread of the HTTP server: pairing large instances takes longer than the owner thread may pause."""
        ranks = (await self._client.ask(prefill, ASK_S)).ranks
        directions = {info.direction for info in ranks}
        if directions != {self.config.direction}:
            theirs = ", ".join(sorted(directions))
            raise LayoutError(f"direction is {theirs} at prefill and {self.config.direction} at decode")
        if self._instance[0].state_ranks:
            _refuse_whole_state(ranks)
        writers = pair([info.part for info in ranks], self._instance)[self.config.rank]
        await self._vouchers.before_pairing({info.incarnation: info.control for info in ranks})
        return [Found(ranks[writer.rank], writer) for writer in writers]

    def connect(self, link: InstanceConnection, found: Found, name: str) -> RankConnection:
        """See `ConnectionOwner`."""
        hello = f.Hello(
            version=f.VERSION_MAX,
            oldest_version=f.VERSION_MIN,
            sender=self.incarnation,
            address=self.control_address,
            memory=self._remote_form,
            kv=found.writer.kv,
            state=found.writer.state,
        )
        keys = self.config.curve if self.config.curve_required else (*self.config.curve, None)
        return RankConnection(
            found.info,
            name,
            hello,
            link,
            filtered=self._filtered,
            reactor=self._reactor,
            context=self._context,
            drops=self._drops,
            key=keys[link.rounds % len(keys)] if keys else None,
        )

    def link_paired(self, link: InstanceConnection, peer: str, version: int) -> None:
        """See `ConnectionOwner`."""
        self._by_peer[peer] = link
        if (line := link.line(peer)) is not None:
            self._note_process(peer, line)
        self._drive(PeerReady(peer, version))

    def _on_reachable(self, peer: str, failure: Failure | None) -> None:
        """A rank's memory can be read from here, or cannot."""
        waiting = [link for link in self._links.values() if link.prefill in self._whole and link.line(peer) is not None]
        for link in waiting:  # more than one where a rank is known by several addresses
            if failure is None:
                self._link_when_reachable(link)
            else:
                del self._whole[link.prefill]
                self._drive(Unreachable(link.prefill, failure.cause, f"{link.prefill}: {failure.message}"))
        if failure is not None and not waiting and peer in self._by_peer:
            self._drive(PeerLost(peer, failure.message))

    def _link_when_reachable(self, link: InstanceConnection) -> None:
        """Offer what waits for a link, as soon as the memory of all its ranks can be read."""
        writers = self._whole.get(link.prefill)
        if writers is not None and all(self._reads.connected(found.info.incarnation) for found in writers):
            del self._whole[link.prefill]
            self._drive(Linked(link.prefill, _serving(writers)))

    def _note_process(self, peer: str, line: RankConnection) -> None:
        try:
            process = decode_remote(line.memory).process
        except LayoutError as error:
            self._drops.note("malformed", f"memory of prefill {peer[:8]}: {error}")
            return
        self._vouchers.note(peer, line.control, process)
        self._exits.watch(peer, process)

    def link_whole(self, link: InstanceConnection, writers: Sequence[Found]) -> None:
        """See `ConnectionOwner`."""
        named = ", ".join(f"{found.info.rank} ({found.info.incarnation[:8]})" for found in writers)
        log.info("linked with prefill %s, ranks %s", link.prefill, named)
        if self.config.direction == "write":
            self._drive(Linked(link.prefill, _serving(writers)))
            return
        self._whole[link.prefill] = writers
        for found in writers:
            if (line := link.line(found.info.incarnation)) is not None:
                self._reads.connect(found.info.incarnation, line.memory, kv=found.writer.kv, shares=found.writer.state)
        self._link_when_reachable(link)

    def link_broken(self, link: InstanceConnection) -> None:
        """See `ConnectionOwner`."""
        self._drive(Unlinked(link.prefill))

    def link_lost(self, link: InstanceConnection, peer: str, message: str) -> None:
        """See `ConnectionOwner`. Another address may lead to the same process; then it is lost by that one only."""
        if self._by_peer.get(peer) is not link:
            return
        self._whole.pop(link.prefill, None)
        others = [one for one in self._links.values() if one is not link and one.line(peer) is not None]
        if others:
            self._by_peer[peer] = others[-1]
            self._drive(Unlinked(link.prefill))
        else:
            del self._by_peer[peer]
            self._checks.lost(peer)
            self._drive(PeerLost(peer, message))
            self._reads.leave(peer)

    def link_fenced(self, peer: str) -> bool:
        """See `ConnectionOwner`."""
        return self._machine.fenced(peer)

    def _part_with(self, peer: str, why: str) -> None:
        for link in list(self._links.values()):
            link.part_with(peer, why)

    def _release(self, incarnation: str, proofs: tuple[Proof, ...]) -> None:
        self._checks.lost(incarnation)
        super()._release(incarnation, proofs)

    def link_failed(self, link: InstanceConnection, cause: Cause, message: str) -> None:
        """See `ConnectionOwner`."""
        if link.stage is Stage.CLOSED:
            del self._links[link.prefill]
        self._drive(Unreachable(link.prefill, cause, message))

    def link_frame(self, frame: f.AttemptFrame) -> None:
        """See `ConnectionOwner`."""
        if isinstance(frame, f.Done) and isinstance(self._decode, DecodeMachine):
            self._checks.done(frame, self._decode.find(frame.attempt))
        else:
            self._drive(Received(frame))

    def link_wanted(self, link: InstanceConnection) -> bool:
        """See `ConnectionOwner`."""
        return self._decode.waits_for(link.prefill)

    def link_owed(self, link: InstanceConnection) -> bool:
        """See `ConnectionOwner`."""
        return self._decode.holds_for(link.prefill)

    # --- Hooks of the base ---

    def _make_machine(self) -> DecodeMachine | DecodeReadMachine:
        kind = DecodeMachine if self.config.direction == "write" else DecodeReadMachine
        self._decode: DecodeMachine | DecodeReadMachine = kind(self.incarnation, self.config.timing)
        return self._decode

    def _on_server(self) -> None:
        """Our control port gives this process its address; nobody has anything to say there yet."""
        for arrival in self._server.receive():
            self._drops.note("direction", f"{type(arrival.frame).__name__} came to decode's control port")

    def _transmit(self, peer: str, frame: f.Frame) -> None:
        link = self._by_peer.get(peer)
        line = link.line(peer) if link is not None else None
        if line is None:
            self._drops.note("unsent", f"{type(frame).__name__}: no connection to {peer[:8]}")
        else:
            line.send(frame)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Read | StopReading):
            self._reads.perform(effect)
        elif isinstance(effect, Connect):
            self._connect_to(effect)

    def _connect_to(self, effect: Connect) -> None:
        if (link := self._links.get(effect.prefill)) is not None:
            link.hurry()
            return
        if len(self._links) >= MAX_LINKS:
            why = f"decode knows {MAX_LINKS} prefills, which is its limit"
            self._reactor.post(lambda: self._drive(Unreachable(effect.prefill, Cause.REFUSED, why)))
            return
        self._links[effect.prefill] = InstanceConnection(
            effect.prefill, self, self._reactor, connect_s=self.config.connect_deadline_s
        )

    def _publish(self, report: Report) -> None:
        known = self._transfers.get(report.handle)
        if known is not None and report.status.ended:
            self._bytes_moved += report.status.bytes_moved - known.status.bytes_moved
            self._checks.ended(f.AttemptId(self.incarnation, report.handle), report.status)
        super()._publish(report)

    def _peer_stats(self, now: float) -> tuple[PeerStats, ...]:
        rows = []
        for peer, link in self._by_peer.items():
            if (line := link.line(peer)) is None:
                continue
            attempts = self._decode.under_way(peer)
            waiting = sum(attempt.state in (DecodeState.OPENING, DecodeState.ACCEPTED) for attempt in attempts)
            rows.append(PeerStats(peer, line.control, now - line.last_seen, len(attempts), waiting))
        return tuple(rows)

    def _link_stats(self, now: float) -> tuple[LinkStats, ...]:
        return tuple(link.stats(now) for link in self._links.values())

    def _at_hand(self) -> Container[str]:
        return self._by_peer

    def _say_goodbye(self) -> None:
        for peer, link in self._by_peer.items():
            if (line := link.line(peer)) is not None:
                bye = f.Goodbye(version=line.version, sender=self.incarnation, reason="decode is shutting down")
                line.send(bye)
        self._reads.close()

    def _checksums(self) -> dict[str, int]:
        return dict(self._checks.outcomes)

    def _join_workers(self, deadline: float) -> bool:
        self._checks.close()
        return join_all(self._reads.workers(), deadline)

    def _at_end(self) -> None:
        for link in list(self._links.values()):
            link.close()
        super()._at_end()


def _refuse_whole_state(ranks: Sequence[RankInfo]) -> None:
    """Raise LayoutError for a prefill whose version knows no cut state: that it tells of none means nothing."""
    for info in ranks:
        try:
            negotiate(*info.protocol, shares=True)
        except VersionMismatchError as error:
            raise LayoutError(f"rank {info.rank} of prefill cannot be spoken to: {error}") from None


def _serving(writers: Sequence[Found]) -> tuple[Writer, ...]:
    return tuple(
        Writer(found.info.incarnation, found.writer.part, found.writer.parts, found.writer.aux) for found in writers
    )
