"""Prefill's connector: takes pairings from decodes, writes pages into their memory."""

import logging
import time
from collections.abc import Callable, Container
from functools import partial
from typing import SupportsIndex

from prometheus_client import CollectorRegistry

from pdpool_connector.layout.checksum import PageSum, PageSums
from pdpool_connector.layout.memory import KVMemory, RemoteMemory
from pdpool_connector.layout.staging import SLOT_BYTES, Reservation, Staging
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    Effect,
    OpenRequest,
    PeerLost,
    PeerReady,
    Received,
    Report,
    StopWriting,
    Write,
    WriteResult,
)
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.prefill_read import PrefillReadMachine
from pdpool_connector.protocol.states import PrefillState as S
from pdpool_connector.protocol.status import Cause
from pdpool_connector.runtime.announce import Announcements
from pdpool_connector.runtime.config import ConnectorConfig
from pdpool_connector.runtime.connector import Connector
from pdpool_connector.runtime.job import Ended, ended, number_of
from pdpool_connector.runtime.membership import Membership
from pdpool_connector.runtime.peer_table import Peer, PeerTable
from pdpool_connector.runtime.stats import LinkStats, PeerStats
from pdpool_connector.runtime.transfer import PrefillTransfer
from pdpool_connector.runtime.validation import RefusalCause, as_reason, as_refusal_cause, as_request
from pdpool_connector.runtime.worker import PeerWorker
from pdpool_connector.transport.bootstrap import RankInfo
from pdpool_connector.transport.control import Arrival
from pdpool_connector.transport.http import HttpServer

log = logging.getLogger(__name__)


class PrefillConnector(Connector[PrefillTransfer]):
    """Prefill's end: `open` a request, `send` its pages as they are computed. See `Connector` for the life cycle."""

    role = "prefill"

    def __init__(
        self,
        config: ConnectorConfig,
        memory: KVMemory,
        on_change: Callable[[], None] = lambda: None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._writes: dict[f.AttemptId, set[int]] = {}
        self._sums = PageSums(memory)
        self._announcements = Announcements(config.checksum_rate, lambda call: self._reactor.post(call))
        self._membership: Membership | None = None
        if config.rank > 0 and config.registry is None:
            raise ValueError(f"registry is missing: rank {config.rank} has to register at that of rank 0")
        super().__init__(config, memory, on_change, registry)
        self._decodes = PeerTable(
            self, self.incarnation, memory, self._backend.name, config.direction, self._reactor, self._drops
        )
        if config.staging_bytes and config.direction == "write" and self._backend.stages:
            self._staging = Staging(config.staging_bytes // SLOT_BYTES)

    @property
    def bootstrap_address(self) -> str:
        """Address of the instance's bootstrap registry, "host:port": what decode is given."""
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
        sibling: SupportsIndex = 0,
        prompt: bytes = b"",
        deadline_s: float | None = None,
        traceparent: str | None = None,
    ) -> PrefillTransfer:
        """Announce a request whose cache some decode will fetch under `room`; returns at once.

        `sibling`: index of the request among those that share the room. `prompt`: digest of the prompt, as decode gives
        it (`prompt_digest`): where rooms are used again, halves of different prompts then never meet. `deadline_s`:
        life of the hand-off, by default `config.request_deadline_s`. `traceparent`: that header of the
        request's (W3C), for the span.

        Raises ValueError for values out of range, TypeError for what is of another type, RuntimeError before `start`.
        """
        life = self.config.request_deadline_s if deadline_s is None else deadline_s
        params = OpenRequest(next(self._handles), *as_request(room, request_id, sibling, life, prompt))
        transfer = PrefillTransfer(params.handle, params.room, request_id, self._post, self.memory)
        return self._open(transfer, params, traceparent)

    def refuse(
        self,
        room: SupportsIndex,
        request_id: str,
        message: str,
        *,
        cause: RefusalCause = Cause.REFUSED,
        sibling: SupportsIndex = 0,
        prompt: bytes = b"",
    ) -> None:
        """Tell the decode that comes for a request, or has come, that the engine will not serve it; returns at once.

        Decode's half then ends with `cause` and `message`: `Cause.TOO_LONG` for what this engine could never serve.
        A `prompt` that is not known, for a text too long to be made into tokens, may be left out: any half of that room
        and sibling is meant then. Raises as `open`.
        """
        self._check_started("refuse")
        whose = as_request(room, request_id, sibling, self.config.request_deadline_s, prompt)
        params = OpenRequest(next(self._handles), *whose, as_reason(message), as_refusal_cause(cause))
        self._open(PrefillTransfer(params.handle, params.room, request_id, self._post, self.memory), params, None)

    # --- Set-up ---

    def _make_machine(self) -> PrefillMachine | PrefillReadMachine:
        kind = PrefillMachine if self.config.direction == "write" else PrefillReadMachine
        self._prefill: PrefillMachine | PrefillReadMachine = kind(self.incarnation, self.config.timing)
        return self._prefill

    def _serve_more(self, http: HttpServer) -> None:
        own = RankInfo(
            rank=self.config.rank,
            incarnation=self.incarnation,
            control=self.control_address,
            part=self._instance[self.config.rank],
            direction=self.config.direction,
            protocol=(f.VERSION_MIN, f.VERSION_MAX),
        )
        self._membership = Membership(self.config, self._instance, own, http, self._on_registration_refused)

    def _on_registration_refused(self, why: str) -> None:
        self._reactor.post(lambda: self._drops.note("registration", why))

    # --- What comes in ---

    def _on_server(self) -> None:
        for arrival in self._server.receive():
            try:
                self._on_arrival(arrival)
            except Exception:
                self._reactor.faults += 1
                log.exception("prefill failed at a %s", type(arrival.frame).__name__)

    def _on_connections(self) -> None:
        for connection in self._server.ended():
            self._decodes.connection_ended(connection)

    def _on_arrival(self, arrival: Arrival) -> None:
        frame = arrival.frame
        if isinstance(frame, f.Hello):
            connection = self._server.connection(arrival)
            self._on_connections()  # the look at this one may have taken news of others from zmq
            if connection >= 0:
                self._decodes.greet(frame, arrival.route, connection)
            return
        peer = self._decodes.speaker(frame.sender, arrival.route)
        if peer is None:
            self._drops.note("unpaired", f"{type(frame).__name__} from {frame.sender[:8]}, which is not paired here")
            self._decodes.unknown(frame.sender, arrival.route)
            return
        peer.last_seen = time.monotonic()
        if isinstance(frame, f.Goodbye):
            self._decodes.lose(peer, f"decode {peer.address} says goodbye: {f.text(frame.reason)}")
        elif isinstance(frame, f.AttemptFrame):
            self._drive(Received(frame))
        else:
            self._drops.note("direction", f"{type(frame).__name__} is not for prefill")

    # --- What the table of decodes asks and tells ---

    def decode_fenced(self, peer: str) -> bool:
        """See `PeerTableOwner`."""
        return self._machine.fenced(peer)

    def decode_met(self, hello: f.Hello, remote: RemoteMemory) -> tuple[PeerWorker | None, PageSum | None]:
        """See `PeerTableOwner`."""
        self._exits.watch(hello.sender, remote.process)
        self._vouchers.note(hello.sender, hello.address, remote.process)
        if self.config.direction == "write":
            return self._start_worker(hello, remote), None  # last: nobody would end it if something failed after
        return None, self._sums.of_pages(remote.memory) if hello.kv else None

    def _start_worker(self, hello: f.Hello, remote: RemoteMemory) -> PeerWorker:
        incarnation = hello.sender
        return PeerWorker(
            self._backend,
            self.memory,
            incarnation,
            remote,
            kv=hello.kv,
            shares=hello.state,
            sums=self._sums,
            checksum_rate=self.config.checksum_rate,
            staging=self._staging,
            connected=lambda error: self._reactor.post(partial(self._decodes.connected, incarnation, error)),
            ended=lambda events: self._reactor.step(partial(self._on_writes_ended, events)),
            kept=lambda attempt, slot: self._reactor.post(partial(self._on_kept, attempt, slot)),
            gone=lambda: self._reactor.post(partial(self._on_worker_gone, incarnation)),
        )

    def decode_paired(self, peer: Peer) -> None:
        """See `PeerTableOwner`."""
        self._drive(PeerReady(peer.incarnation, peer.version))
        answer = f.HelloOk(version=peer.version, sender=self.incarnation, memory=self._remote_form)
        for route in peer.routes:
            self._filtered(answer, partial(self._server.send, route, answer))

    def decode_lost(self, peer: Peer, message: str) -> None:
        """See `PeerTableOwner`."""
        self._drive(PeerLost(peer.incarnation, message))

    def decode_told(self, route: bytes, frame: f.HelloRefused | f.Goodbye) -> None:
        """See `PeerTableOwner`."""
        self._filtered(frame, partial(self._server.send, route, frame))

    def _part_with(self, peer: str, why: str) -> None:
        self._decodes.part_with(peer, why)

    def _on_worker_gone(self, incarnation: str) -> None:
        """What it has not answered, after a fault in it, nobody can speak for any more."""
        known = self._decodes.get(incarnation)
        unended = known.worker.unended() if known is not None and known.worker is not None else []
        what = "the thread that writes has failed"
        self._on_writes_ended([ended(move, WriteResult.UNSETTLED, 0, what) for move in unended])
        self._decodes.worker_gone(incarnation)

    def _begin_shutdown(self) -> None:
        self._decodes.shut()
        super()._begin_shutdown()

    # --- What goes out ---

    def _after_turn(self) -> None:
        """Decode waits for these words, and nobody for the news that they are out."""
        self._server.flush()
        super()._after_turn()

    def _transmit(self, peer: str, frame: f.Frame) -> None:
        if (known := self._decodes.paired(peer)) is None:
            return
        exchange = self._prefill.find(frame.attempt) if isinstance(frame, f.Computed) else None
        if isinstance(frame, f.Computed) and exchange is not None and known.page_sum is not None:
            self._announcements.send(frame, exchange, known.page_sum, partial(self._say, peer))
        else:
            self._server.send(known.route, frame)

    def _say(self, peer: str, frame: f.Computed) -> None:
        """Send what has been hashed, if its decode is still there."""
        if (known := self._decodes.paired(peer)) is not None:
            self._server.send(known.route, frame)

    def _publish(self, report: Report) -> None:
        if report.status.releasable and self.config.direction == "read":
            for attempt in report.attempts:
                self._announcements.ended(attempt)
        super()._publish(report)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Write):
            try:
                failure = self._write(effect)
            except Exception:
                self._reactor.faults += 1
                log.exception("prefill failed to pass a write on")
                failure = "a fault in the connector; see its log"
            if failure:
                over = ended(effect, WriteResult.FAILED, 0, failure)
                self._reactor.post(partial(self._on_writes_ended, [over]))
        elif isinstance(effect, StopWriting):
            peer = self._decodes.get(effect.peer)
            if peer is not None and peer.worker is not None:
                peer.worker.stop(self._writes.get(effect.attempt, set()))

    def _write(self, write: Write) -> str:
        """Pass a write on to its peer's worker, or return why nothing is under way."""
        peer = self._decodes.paired(write.peer)
        if peer is None or peer.worker is None:
            return "decode is gone"
        self._writes.setdefault(write.attempt, set()).add(write.write)
        if peer.worker.submit(write):
            self._reactor.soon(partial(self._move_now, peer.worker))
        return ""

    def _move_now(self, worker: PeerWorker) -> None:
        self._on_writes_ended(worker.move_now())

    def _on_writes_ended(self, events: list[Ended]) -> None:
        for event in events:
            self._on_write_ended(event)

    def _on_write_ended(self, event: Ended) -> None:
        number = number_of(event)
        writes = self._writes.get(event.attempt)
        if writes is not None:
            writes.discard(number)
            if not writes:
                del self._writes[event.attempt]
        peer = self._decodes.get(event.attempt.decode)
        if peer is not None and peer.worker is not None:
            peer.worker.forget(number)
        self._bytes_moved += event.bytes_moved
        self._drive(event)

    def _on_kept(self, attempt: f.AttemptId, slot: Reservation) -> None:
        """Keep what an unsettled write may still read as long as its source pages."""
        for exchange in self._prefill.under_way(attempt.decode):
            if exchange.attempt == attempt and (request := exchange.handoff.request) is not None:
                self._transfers[request.handle].attach(slot.release)
                return
        slot.release()  # the hand-off is over: there was proof

    # --- Stats and shutdown ---

    def _peer_stats(self, now: float) -> tuple[PeerStats, ...]:
        rows = []
        for peer in self._decodes:
            exchanges = self._prefill.under_way(peer.incarnation)
            waiting = sum(exchange.state in (S.PARKED, S.READY) for exchange in exchanges)
            rows.append(PeerStats(peer.incarnation, peer.address, now - peer.last_seen, len(exchanges), waiting))
        return tuple(rows)

    def _link_stats(self, now: float) -> tuple[LinkStats, ...]:
        return self._membership.stats(now) if self._membership is not None else ()

    def _at_hand(self) -> Container[str]:
        return self._decodes

    def _say_goodbye(self) -> None:
        self._decodes.leave()

    def _join_workers(self, deadline: float) -> bool:
        self._announcements.close()
        return self._decodes.join(deadline)
