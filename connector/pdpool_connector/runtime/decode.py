"""Decode's connector: opens hand-offs, offers memory to prefills, and says when the cache has landed."""

import logging
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, SupportsIndex

import zmq
from prometheus_client import CollectorRegistry

from pdpool_connector.backends.base import TransferBackend
from pdpool_connector.layout.checksum import CopyPages, PageSums
from pdpool_connector.layout.memory import KVMemory, LayoutError, decode_remote
from pdpool_connector.layout.pairing import pair
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.attempt import DecodeAttempt
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.events import (
    Connect,
    Effect,
    Linked,
    OpenAttempt,
    PeerLost,
    PeerReady,
    Received,
    Report,
    Unlinked,
    Unreachable,
    Writer,
)
from pdpool_connector.protocol.fence import Proof
from pdpool_connector.protocol.states import DecodeState
from pdpool_connector.protocol.status import Cause
from pdpool_connector.runtime.arguments import OnChange, Running, check_arguments, no_requests, nothing
from pdpool_connector.runtime.checksum_verifier import ChecksumVerifier, Written
from pdpool_connector.runtime.config import ConnectorConfig
from pdpool_connector.runtime.connector import Connector
from pdpool_connector.runtime.instance_connection import Found, InstanceConnection, MisfitError, MisfitRank, Stage
from pdpool_connector.runtime.misfit_notice import MisfitNotices
from pdpool_connector.runtime.page_guard import PageGuard
from pdpool_connector.runtime.parts import Identity, make_parts
from pdpool_connector.runtime.prefill_facts import PrefillFacts
from pdpool_connector.runtime.rank_connection import RankConnection
from pdpool_connector.runtime.silent_prefills import SilentPrefills
from pdpool_connector.runtime.stats import LinkStats, PeerStats
from pdpool_connector.runtime.transfer import DecodeTransfer
from pdpool_connector.runtime.validation import as_request
from pdpool_connector.transport.address import AddressError, parse_address
from pdpool_connector.transport.bootstrap import BootstrapClient
from pdpool_connector.transport.curve import CurveKey

log = logging.getLogger(__name__)

MAX_INSTANCES: Final = 1024
"""Prefill instances that are connected or being tried; bootstrap addresses come from requests, so there is a bound."""


class DecodeConnector(Connector[DecodeTransfer, DecodeMachine]):
    """Decode's end: `open` a hand-off when its request arrives, `offer` memory when there is some, wait for the pages.

    See `Connector` for the life cycle, and `PrefillConnector` for the arguments and errors.
    """

    role = "decode"

    def __init__(
        self,
        config: ConnectorConfig,
        memory: KVMemory,
        on_change: OnChange = nothing,
        registry: CollectorRegistry | None = None,
        *,
        running: Running = no_requests,
        copy_pages: CopyPages | None = None,
        backend: TransferBackend | None = None,
        identity: Identity | None = None,
    ) -> None:
        instance = check_arguments(config, memory, on_change, running)
        parts = make_parts("decode", config, backend, identity)
        machine = DecodeMachine(parts.identity.incarnation, config.timeouts)
        super().__init__(
            config, memory, instance, machine, parts, on_change=on_change, registry=registry, running=running
        )
        self._instances: dict[str, InstanceConnection] = {}
        """By bootstrap address."""
        self._by_peer: dict[str, InstanceConnection] = {}
        self._silent = SilentPrefills(self._reactor, config.timeouts, self._driver.drive, self._connect_to)
        self._facts = PrefillFacts(config.timeouts.connect_max_s)
        self._notices = MisfitNotices(self._reactor, self._ports.context, self._drops, config.timeouts)
        self._guard = PageGuard([pool.name for pool in memory.state])
        self._client = BootstrapClient(config.allowed_networks)
        sums = PageSums(memory, copy_pages)
        self._verifier = ChecksumVerifier(
            sums.whole if sums.possible else None, self._driver.drive, self._reactor.post, config.checksum_rate
        )

    def open(
        self,
        prefill: str,
        room: SupportsIndex,
        request_id: str,
        *,
        prompt: bytes = b"",
        deadline_s: float | None = None,
        traceparent: str | None = None,
    ) -> DecodeTransfer:
        """Open the hand-off of a request as soon as it has arrived; returns at once. Memory is offered later.

        Args:
            prefill: "host:port" of the prefill instance's bootstrap registry.
            room: Number that prefill and decode have in common for this request, 0 to 2**63 - 1.
            request_id: The same from all ranks of this instance, at most 256 characters.
            prompt: Digest of the prompt, as prefill gives it (`prompt_digest`), at most 16 bytes. Halves with different
                prompts are never matched. b"" matches any.
            deadline_s: Life of the hand-off in seconds. None: `config.request_deadline_s`.
            traceparent: That header of the request (W3C Trace Context), for the span.

        Returns:
            The transfer, to `offer` memory with.

        Raises:
            ValueError: A value is out of range; `AddressError` for what is no address.
            TypeError: A value has another type.
            RuntimeError: The connector was not started.
        """
        _check_address(prefill)
        life = self.config.request_deadline_s if deadline_s is None else deadline_s
        request = as_request(room, request_id, life, prompt)
        self._check_started("open")
        event = OpenAttempt(
            next(self._handles), prefill, request.room, request.request_id, request.deadline_s, request.prompt
        )
        transfer = DecodeTransfer(event, self.incarnation, self._post, self.memory, self._guard)
        return self._open(transfer, event, traceparent)

    def facts(self, prefill: str) -> Mapping[str, str] | None:
        """What the registry of a prefill instance says of its engine (`ConnectorConfig.facts`). Never blocks.

        Args:
            prefill: "host:port" of the registry. One that is not connected yet is connected to.

        Returns:
            The facts; None as long as the registry has not answered.

        Raises:
            AddressError: This is no address.
            RuntimeError: The connector was not started.
        """
        _check_address(prefill)
        self._check_started("facts")
        known = self._facts.of(prefill)
        if known is None and not self._closed:
            self._reactor.post(partial(self._ask_for_facts, prefill))
        return known

    def _ask_for_facts(self, prefill: str) -> None:
        if prefill in self._instances or len(self._instances) >= MAX_INSTANCES:
            return
        if self._facts.ask(prefill, self._reactor.now()):
            self._connect_to(prefill)

    # --- What instance connections need ---

    def find(self, prefill: str) -> Future[Sequence[Found]]:
        """See `ConnectionOwner`."""
        return self._ports.submit(self._find(prefill))

    async def _find(self, prefill: str) -> Sequence[Found]:
        """In the thread of the HTTP server: pairing large instances takes longer than the owner thread may pause."""
        info = await self._client.ask(prefill, self._timeouts.registry_s)
        self._reactor.post(partial(self._note_facts, prefill, info.facts))
        ranks = info.ranks
        try:
            writers = pair([one.shard for one in ranks], self._instance)[self.config.rank]
        except LayoutError as error:
            count = len(self._instance)
            raise MisfitError(str(error), [MisfitRank(one, self.config.rank, count) for one in ranks]) from None
        await self._fencer.before_pairing({one.incarnation: one.control for one in ranks})
        return [Found(ranks[writer.rank], writer) for writer in writers]

    def _note_facts(self, prefill: str, facts: Mapping[str, str]) -> None:
        if prefill in self._instances:
            self._facts.note(prefill, facts)

    def connect(self, instance: InstanceConnection, found: Found, name: str) -> RankConnection:
        """See `ConnectionOwner`."""
        return RankConnection(
            found.info,
            name,
            self._hello(kv=found.writer.kv, state=found.writer.state),
            instance,
            filtered=self._driver.send,
            reactor=self._reactor,
            context=self._ports.context,
            drops=self._drops,
            key=self._key(instance),
            timeouts=self._timeouts,
        )

    def _hello(self, *, kv: bool, state: bool) -> f.Hello:
        return f.Hello(
            version=f.VERSION_MAX,
            oldest_version=f.VERSION_MIN,
            sender=self.incarnation,
            address=self.control_address,
            memory=self._remote_form,
            kv=kv,
            state=state,
        )

    def _key(self, instance: InstanceConnection) -> CurveKey | None:
        """The key to connect with: each round of an instance tries the next one."""
        keys = self.config.curve if self.config.curve_required else (*self.config.curve, None)
        return keys[instance.rounds % len(keys)] if keys else None

    def on_paired(self, instance: InstanceConnection, peer: str, version: int) -> None:
        """See `ConnectionOwner`."""
        self._by_peer[peer] = instance
        if (connection := instance.connection(peer)) is not None:
            self._note_process(peer, connection)
        self._driver.drive(PeerReady(peer, version))

    def _note_process(self, peer: str, connection: RankConnection) -> None:
        try:
            process = decode_remote(connection.memory).process
        except LayoutError as error:
            self._drops.note("malformed", f"memory of prefill {peer[:8]}: {error}")
            return
        self._fencer.note(peer, connection.control, process)
        self._process_watch.watch(peer, process)

    def on_linked(self, instance: InstanceConnection, writers: Sequence[Found]) -> None:
        """See `ConnectionOwner`."""
        named = ", ".join(f"{found.info.rank} ({found.info.incarnation[:8]})" for found in writers)
        log.info("linked with prefill %s, ranks %s", instance.prefill, named)
        self._silent.remove(instance.prefill)
        self._driver.drive(Linked(instance.prefill, tuple(map(_as_writer, writers))))

    def on_unlinked(self, instance: InstanceConnection) -> None:
        """See `ConnectionOwner`."""
        self._driver.drive(Unlinked(instance.prefill))

    def on_lost(self, instance: InstanceConnection, peer: str, message: str) -> None:
        """See `ConnectionOwner`. If another address leads to the same process, only this one has lost it."""
        if self._by_peer.get(peer) is not instance:
            return
        others = [one for one in self._instances.values() if one is not instance and one.connection(peer) is not None]
        if others:
            self._by_peer[peer] = others[-1]
            self._driver.drive(Unlinked(instance.prefill))
        else:
            del self._by_peer[peer]
            self._verifier.lost(peer)
            self._driver.drive(PeerLost(peer, message))

    def on_unreachable(self, instance: InstanceConnection, cause: Cause, message: str) -> None:
        """See `ConnectionOwner`."""
        if instance.stage is Stage.CLOSED:
            del self._instances[instance.prefill]
            self._facts.forget(instance.prefill)
        if cause is Cause.PEER_LOST and not instance.refused:
            self._silent.on_failed(instance.prefill, message, in_vain=instance.in_vain)
        else:
            self._silent.remove(instance.prefill)
        waiting = self._waiting_for(instance.prefill) if cause is Cause.INVALID and instance.misfits else ()
        self._driver.drive(Unreachable(instance.prefill, cause, message))
        for misfit in instance.misfits[: self._notices.room] if waiting else ():
            self._notify_misfit(instance, misfit, waiting)

    def _waiting_for(self, prefill: str) -> Sequence[DecodeAttempt]:
        """The attempts of which no rank behind a bootstrap address knows."""
        handles = [transfer._handle for transfer in self._transfers if transfer.prefill == prefill]
        attempts = [self._machine.find(f.AttemptId(self.incarnation, handle)) for handle in handles]
        return [attempt for attempt in attempts if attempt is not None and not attempt.writers]

    def _notify_misfit(self, instance: InstanceConnection, misfit: MisfitRank, failed: Sequence[DecodeAttempt]) -> None:
        try:
            self._notices.add(misfit, failed, self._hello(kv=True, state=True), self._key(instance))
        except (OSError, zmq.ZMQError) as error:
            log.warning("rank %d of prefill %s is not informed: %s", misfit.info.rank, instance.prefill, error)

    def on_frame(self, frame: f.AttemptFrame) -> None:
        """See `ConnectionOwner`."""
        if isinstance(frame, f.Ended) and frame.settled and not frame.cause:
            self._verifier.done(frame, self._written(frame.attempt))
        else:
            self._driver.drive(Received(frame))

    def _written(self, number: f.AttemptId) -> Written | None:
        attempt = self._machine.find(number)
        if attempt is None or attempt.cause is not None or attempt.memory is None:
            return None
        return Written(tuple(attempt.writers), attempt.unsettled_peers, attempt.memory.pages)

    def is_wanted(self, instance: InstanceConnection) -> bool:
        """See `ConnectionOwner`."""
        return self._machine.waits_for(instance.prefill)

    def is_owed(self, instance: InstanceConnection) -> bool:
        """See `ConnectionOwner`."""
        return self._machine.holds_for(instance.prefill)

    def is_fenced(self, peer: str) -> bool:
        """See `ConnectionOwner`."""
        return self._machine.fenced(peer)

    # --- Hooks of the base ---

    def _on_server(self) -> None:
        """Our control port gives this process its address; no frame is for it."""
        for arrival in self._ports.control.receive():
            self._drops.note("direction", f"{type(arrival.frame).__name__} came to decode's control port")

    def _transmit(self, peer: str, frame: f.Frame) -> None:
        instance = self._by_peer.get(peer)
        connection = instance.connection(peer) if instance is not None else None
        if connection is None:
            self._drops.note("unsent", f"{type(frame).__name__}: no connection to {peer[:8]}")
        else:
            connection.send(frame)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Connect):
            self._silent.limit(effect.prefill)
            self._connect_to(effect.prefill)

    def _connect_to(self, prefill: str) -> None:
        if (instance := self._instances.get(prefill)) is not None:
            instance.hurry()
            return
        if len(self._instances) >= MAX_INSTANCES:
            why = f"decode is connected to {MAX_INSTANCES} prefills, which is its limit"
            refused = Unreachable(prefill, Cause.REFUSED, why)
            self._reactor.post(partial(self._driver.drive, refused))
            return
        self._instances[prefill] = InstanceConnection(prefill, self, self._reactor, self._timeouts)

    def _mark_lost(self, peer: str, why: str) -> None:
        for instance in list(self._instances.values()):
            instance.mark_lost(peer, why)

    def _release(self, incarnation: str, proofs: tuple[Proof, ...]) -> None:
        self._verifier.lost(incarnation)
        super()._release(incarnation, proofs)

    def _publish(self, report: Report) -> None:
        known = self._transfers.get(report.handle)
        if known is not None and report.status.ended:
            self._bytes_moved += report.status.bytes_moved - known.status.bytes_moved
            self._verifier.ended(f.AttemptId(self.incarnation, report.handle))
        super()._publish(report)

    def _peer_stats(self, now: float) -> tuple[PeerStats, ...]:
        rows = []
        for peer, instance in self._by_peer.items():
            if (connection := instance.connection(peer)) is None:
                continue
            attempts = self._machine.under_way(peer)
            waiting = sum(attempt.state is DecodeState.OFFERED for attempt in attempts)
            rows.append(
                PeerStats(
                    peer,
                    connection.control,
                    now - connection.last_seen,
                    len(attempts),
                    waiting,
                    self._backend.name,
                )
            )
        return tuple(rows)

    def _link_stats(self, now: float) -> tuple[LinkStats, ...]:
        links = {prefill: instance.stats(now) for prefill, instance in self._instances.items()}
        return tuple((links | self._silent.stats(now)).values())

    def _known_peers(self) -> Container[str]:
        return self._by_peer

    def _send_goodbye(self) -> None:
        for peer, instance in self._by_peer.items():
            if (connection := instance.connection(peer)) is not None:
                goodbye = f.Goodbye(
                    version=connection.version, sender=self.incarnation, reason="decode is shutting down"
                )
                connection.send(goodbye)

    def _checksums(self) -> dict[str, int]:
        return dict(self._verifier.outcomes)

    def _join_workers(self, deadline: float) -> bool:
        self._verifier.close()
        return super()._join_workers(deadline)

    def _at_end(self) -> None:
        for instance in list(self._instances.values()):
            instance.close()
        self._notices.close()
        super()._at_end()


def _check_address(prefill: str) -> None:
    if not isinstance(prefill, str):
        raise TypeError(f'prefill={prefill!r} is of type {type(prefill).__name__}: give a str, "host:port"')
    try:
        parse_address(prefill)
    except AddressError as error:
        raise AddressError(f"prefill: {error}") from None


def _as_writer(found: Found) -> Writer:
    return Writer(found.info.incarnation, found.writer.rank_index, found.writer.rank_count, found.writer.aux)
