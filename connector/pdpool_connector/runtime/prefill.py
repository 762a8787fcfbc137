"""Prefill's connector: accepts decodes, and writes pages into their memory."""

import logging
import time
from collections.abc import Container
from functools import partial
from typing import SupportsIndex

from prometheus_client import CollectorRegistry

from pdpool_connector.backends.base import TransferBackend
from pdpool_connector.layout.checksum import CopyPages, PageSums
from pdpool_connector.layout.memory import KVMemory, RemoteMemory
from pdpool_connector.layout.staging import SLOT_BYTES, Reservation, Staging
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    Effect,
    EngineRan,
    OpenRequest,
    PeerLost,
    PeerReady,
    Received,
    StopWriting,
    Write,
    WriteEnded,
    WriteResult,
)
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.states import PrefillState as S
from pdpool_connector.runtime.arguments import OnChange, Running, check_arguments, no_requests, nothing
from pdpool_connector.runtime.config import ConnectorConfig
from pdpool_connector.runtime.connector import Connector
from pdpool_connector.runtime.job import ended
from pdpool_connector.runtime.membership import Membership
from pdpool_connector.runtime.parts import Identity, make_parts
from pdpool_connector.runtime.peer_table import Peer, PeerTable
from pdpool_connector.runtime.ready_queue import ReadyQueue
from pdpool_connector.runtime.stats import LinkStats, PeerStats
from pdpool_connector.runtime.transfer import PrefillTransfer
from pdpool_connector.runtime.validation import as_request
from pdpool_connector.runtime.worker import PeerWorker
from pdpool_connector.transport.bootstrap import RankInfo
from pdpool_connector.transport.control import Arrival
from pdpool_connector.transport.http import HttpServer

log = logging.getLogger(__name__)


class PrefillConnector(Connector[PrefillTransfer, PrefillMachine]):
    """Prefill's end: `open` a request, `send` its pages as they are computed. See `Connector` for the life cycle.

    Args:
        config: How this rank presents itself.
        memory: Cache is moved from it; it must stay mapped until `close` has returned.
        on_change: Called when the status of some transfer has changed, in the connector's own thread or within a call
            of yours (`open`, `send`, `abort`). It must only wake the scheduler.
        registry: Takes the `pdpool_connector_*` metrics.
        running: Says how many requests the engine has under way, for the drain through the admin socket.
        copy_pages: Copies pages of one region of a device to the host, for checksums; called in threads of the
            connector. Without it pages of a device have no checksums.
        backend, identity: Parts that tests replace; None for the usual ones.

    Raises:
        ValueError: The memory does not fit the configuration, or a rank above 0 has no registry.
        BackendUnavailableError: The transfer backend cannot work in this process.
    """

    role = "prefill"

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
        if config.rank > 0 and config.registry is None:
            raise ValueError(f"registry is missing: rank {config.rank} has to register at that of rank 0")
        instance = check_arguments(config, memory, on_change, running)
        parts = make_parts("prefill", config, backend, identity)
        machine = PrefillMachine(parts.identity.incarnation, config.timeouts)
        # The CPU gathers pages, and never touches the memory of a device.
        staged = config.staging_bytes and parts.backend.stages and not memory.on_device
        super().__init__(
            config,
            memory,
            instance,
            machine,
            parts,
            on_change=on_change,
            registry=registry,
            running=running,
            staging=Staging(config.staging_bytes // SLOT_BYTES) if staged else None,
        )
        self._sums = PageSums(memory, copy_pages)
        self._writes: dict[f.AttemptId, set[int]] = {}
        """Writes under way of each attempt."""
        self._ready_queue = ReadyQueue(self._post, config.timeouts.ready_poll_s)
        self._membership: Membership | None = None
        self._watches_engine = False
        self._peers = PeerTable(
            self, self.incarnation, memory, self._backend.name, self._reactor, self._drops, config.timeouts
        )

    @property
    def bootstrap_address(self) -> str:
        """Address of the instance's bootstrap registry, "host:port": decode's `open` takes it."""
        if self.config.rank > 0:
            return str(self.config.registry)
        if self._membership is None:
            raise RuntimeError("bootstrap_address is known once the connector is started")
        return self._membership.registry_address

    def open(
        self,
        room: SupportsIndex,
        request_id: str,
        *,
        prompt: bytes = b"",
        deadline_s: float | None = None,
        traceparent: str | None = None,
    ) -> PrefillTransfer:
        """Open the hand-off of a request whose cache some decode will take; returns at once.

        Args:
            room: Number that prefill and decode have in common for this request, 0 to 2**63 - 1.
            request_id: At most 256 characters. Where decode gives the same, the two halves are matched by it first.
            prompt: Digest of the prompt, as decode gives it (`prompt_digest`), at most 16 bytes. Halves with different
                prompts are never matched. b"" matches any.
            deadline_s: Life of the hand-off in seconds. None: `config.request_deadline_s`.
            traceparent: That header of the request (W3C Trace Context), for the span.

        Returns:
            The transfer, to `send` pages with.

        Raises:
            ValueError: A value is out of range.
            TypeError: A value has another type.
            RuntimeError: The connector was not started.
        """
        life = self.config.request_deadline_s if deadline_s is None else deadline_s
        request = as_request(room, request_id, life, prompt)
        self._check_started("open")
        event = OpenRequest(next(self._handles), request.room, request.request_id, request.deadline_s, request.prompt)
        transfer = PrefillTransfer(event, self._post, self.memory, self._ready_queue)
        return self._open(transfer, event, traceparent)

    # --- Set-up ---

    def _serve_more(self, http: HttpServer) -> None:
        own = RankInfo(
            rank=self.config.rank,
            incarnation=self.incarnation,
            control=self.control_address,
            shard=self._instance[self.config.rank],
            protocol=(f.VERSION_MIN, f.VERSION_MAX),
        )
        self._membership = Membership(self.config, self._instance, own, http, self._on_registration_refused)

    def _on_registration_refused(self, why: str) -> None:
        self._reactor.post(partial(self._drops.note, "registration", why))

    # --- What comes in ---

    def _on_server(self) -> None:
        for arrival in self._ports.control.receive():
            try:
                self._on_arrival(arrival)
            except Exception:
                self._reactor.faults += 1
                log.exception("prefill failed at a %s", type(arrival.frame).__name__)

    def _on_connections(self) -> None:
        for connection in self._ports.control.ended():
            self._peers.connection_ended(connection)

    def _on_arrival(self, arrival: Arrival) -> None:
        frame = arrival.frame
        if isinstance(frame, f.Hello):
            connection = self._ports.control.connection(arrival)
            self._on_connections()  # the look at this one may have taken news of others from zmq
            if connection >= 0:
                self._peers.greet(frame, arrival.route, connection)
            return
        peer = self._peers.sender(frame.sender, arrival.route)
        if peer is None and isinstance(frame, f.Abort | f.Ack) and self._peers.is_misfit(frame.sender, arrival.route):
            self._driver.drive(Received(frame))
            return
        if peer is None:
            self._drops.note("unpaired", f"{type(frame).__name__} from {frame.sender[:8]}, which is not paired here")
            self._peers.unknown(frame.sender, arrival.route)
            return
        peer.last_seen = self._reactor.now()
        if isinstance(frame, f.Goodbye):
            self._peers.lose(peer, f"decode {peer.address} has closed its connector: {f.text(frame.reason)}")
        elif isinstance(frame, f.AttemptFrame):
            self._driver.drive(Received(frame))
        else:
            self._drops.note("direction", f"{type(frame).__name__} is not for prefill")

    # --- What the peer table needs ---

    def is_fenced(self, peer: str) -> bool:
        """See `PeerTableOwner`."""
        return self._machine.fenced(peer)

    def start_worker(self, hello: f.Hello, remote: RemoteMemory) -> PeerWorker:
        """See `PeerTableOwner`."""
        peer = hello.sender
        self._process_watch.watch(peer, remote.process)
        self._fencer.note(peer, hello.address, remote.process)
        return PeerWorker(  # last: nothing would end its thread if something failed after
            self._backend,
            self.memory,
            peer,
            remote,
            kv=hello.kv,
            shares=hello.state,
            sums=self._sums,
            checksum_rate=self.config.checksum_rate,
            timeouts=self._timeouts,
            staging=self._staging,
            connected=lambda error: self._reactor.post(partial(self._peers.connected, peer, error)),
            ended=lambda events: self._reactor.step(partial(self._on_writes_ended, events)),
            kept=lambda attempt, slot: self._reactor.post(partial(self._on_kept, attempt, slot)),
            gone=lambda: self._reactor.post(partial(self._on_worker_gone, peer)),
        )

    def on_peer_paired(self, peer: Peer) -> None:
        """See `PeerTableOwner`."""
        self._driver.drive(PeerReady(peer.incarnation, peer.version))
        answer = f.HelloOk(version=peer.version, sender=self.incarnation, memory=self._remote_form)
        for route in peer.routes:
            self.send_to(route, answer)

    def on_peer_lost(self, peer: Peer, message: str) -> None:
        """See `PeerTableOwner`."""
        self._driver.drive(PeerLost(peer.incarnation, message))

    def on_misfit(self, incarnation: str, version: int) -> None:
        """See `PeerTableOwner`."""
        self._driver.drive(PeerReady(incarnation, version))

    def on_misfit_gone(self, incarnation: str) -> None:
        """See `PeerTableOwner`."""
        self._driver.drive(PeerLost(incarnation, "a decode that does not fit has closed its connection"))

    def send_to(self, route: bytes, frame: f.Frame) -> None:
        """See `PeerTableOwner`."""
        self._driver.send(frame, partial(self._ports.control.send, route, frame))

    def _mark_lost(self, peer: str, why: str) -> None:
        self._peers.mark_lost(peer, why)

    def _on_worker_gone(self, incarnation: str) -> None:
        """After a fault in the worker, the state of its unanswered writes is unknown."""
        known = self._peers.get(incarnation)
        unended = known.worker.unended() if known is not None else []
        what = "the thread that writes has failed"
        self._on_writes_ended([ended(write, WriteResult.UNSETTLED, 0, what) for write in unended])
        self._peers.worker_gone(incarnation)

    # --- What goes out ---

    def _after_turn(self) -> None:
        """Decode waits for these frames; the engine's news can wait until they are out."""
        self._ports.control.flush()
        if not self._watches_engine and self._machine.queues.count("parked"):
            self._watches_engine = True
            self._reactor.at("engine", self._reactor.now() + self._timeouts.engine_look_s, self._look_at_engine)
        super()._after_turn()

    def _look_at_engine(self) -> None:
        """While attempts wait for their requests, the machine learns how long the engine has run."""
        self._watches_engine = False
        self._driver.drive(EngineRan(self._publisher.engine_ran_s))

    def _transmit(self, peer: str, frame: f.Frame) -> None:
        if (route := self._peers.route_to(peer)) is not None:
            self._ports.control.send(route, frame)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Write):
            try:
                failure = self._write(effect)
            except Exception:
                self._reactor.faults += 1
                log.exception("prefill failed to pass a write on")
                failure = "a fault in the connector; see its log"
            if failure:
                failed = ended(effect, WriteResult.FAILED, 0, failure)
                self._reactor.post(partial(self._on_writes_ended, [failed]))
        elif isinstance(effect, StopWriting) and (peer := self._peers.get(effect.peer)) is not None:
            peer.worker.stop(self._writes.get(effect.attempt, set()))

    def _write(self, write: Write) -> str:
        """Pass a write on to its peer's worker, or return why nothing is under way."""
        if (peer := self._peers.paired(write.peer)) is None:
            return "decode is gone"
        self._writes.setdefault(write.attempt, set()).add(write.write)
        if peer.worker.submit(write):
            self._reactor.soon(partial(self._write_now, peer.worker))
        return ""

    def _write_now(self, worker: PeerWorker) -> None:
        self._on_writes_ended(worker.write_now())

    def _on_writes_ended(self, events: list[WriteEnded]) -> None:
        for event in events:
            self._on_write_ended(event)

    def _on_write_ended(self, event: WriteEnded) -> None:
        writes = self._writes.get(event.attempt)
        if writes is not None:
            writes.discard(event.write)
            if not writes:
                del self._writes[event.attempt]
        if (peer := self._peers.get(event.attempt.decode)) is not None:
            peer.worker.forget(event.write)
        self._bytes_moved += event.bytes_moved
        self._driver.drive(event)

    def _on_kept(self, attempt: f.AttemptId, slot: Reservation) -> None:
        """Keep what an unsettled write may still read as long as its source pages."""
        for exchange in self._machine.under_way(attempt.decode):
            request = exchange.handoff.request
            if exchange.attempt != attempt or request is None:
                continue
            if (transfer := self._transfers.get(request.handle)) is not None:
                transfer._attach(slot.release)
                return
        slot.release()  # the hand-off is over: there was proof

    # --- Statistics and shutdown ---

    def _peer_stats(self, now: float) -> tuple[PeerStats, ...]:
        rows = []
        for peer in self._peers:
            exchanges = self._machine.under_way(peer.incarnation)
            waiting = sum(exchange.state in (S.PARKED, S.MATCHED) for exchange in exchanges)
            rows.append(
                PeerStats(
                    peer.incarnation,
                    peer.address,
                    now - peer.last_seen,
                    len(exchanges),
                    waiting,
                    self._backend.name,
                    peer.worker.transport,
                )
            )
        return tuple(rows)

    def _link_stats(self, now: float) -> tuple[LinkStats, ...]:
        return self._membership.stats(now) if self._membership is not None else ()

    def _known_peers(self) -> Container[str]:
        return self._peers

    def _begin_shutdown(self) -> None:
        self._peers.shut()
        super()._begin_shutdown()

    def _send_goodbye(self) -> None:
        self._peers.leave()

    def _join_workers(self, deadline: float) -> bool:
        is_quiet = self._ready_queue.close(max(deadline - time.monotonic(), 0.1))
        return self._peers.join(deadline) and is_quiet
