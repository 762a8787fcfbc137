"""What prefill's and decode's connector share: life cycle, the owner thread around the state machine, stats, admin."""

import atexit
import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Container
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Generic, Literal, Self, SupportsIndex, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from pdpool_connector.flight.files import Flight, Source
from pdpool_connector.layout.memory import KVMemory, RemoteMemory, encode_remote
from pdpool_connector.layout.pairing import ModelShard
from pdpool_connector.layout.staging import Staging
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.events import AbortTransfer, Drain, Effect, Event, Fenced, Report, Shutdown, Tick
from pdpool_connector.protocol.fence import Proof, describe, kinds_of
from pdpool_connector.protocol.frames import Frame
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.states import is_public_queue
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus
from pdpool_connector.runtime.admin import AdminEndpoint, drain_handlers
from pdpool_connector.runtime.arguments import OnChange, Running
from pdpool_connector.runtime.config import ConnectorConfig
from pdpool_connector.runtime.machine_driver import MachineDriver
from pdpool_connector.runtime.metrics import ConnectorCollector, state_json
from pdpool_connector.runtime.outcome_log import OutcomeLog
from pdpool_connector.runtime.parts import Parts
from pdpool_connector.runtime.ports import Ports
from pdpool_connector.runtime.process_watch import ProcessWatch
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.runtime.remote_fencer import RemoteFencer
from pdpool_connector.runtime.spans import open_spans
from pdpool_connector.runtime.stats import ConnectorStats, LinkStats, PeerStats
from pdpool_connector.runtime.stats_publisher import StatsPublisher, bytes_held, held_for, queues_of
from pdpool_connector.runtime.transfer_table import AnyTransfer, TransferTable
from pdpool_connector.runtime.validation import as_incarnation, as_proof, as_queue
from pdpool_connector.transport.address import Address
from pdpool_connector.transport.drops import Drops
from pdpool_connector.transport.http import HttpServer, Page
from pdpool_connector.version import VERSION

log = logging.getLogger(__name__)

TORN = "was interrupted in the middle of its work"
_FORKED = "belongs to the parent of this process: make another connector after the fork"

AnyMachine = TypeVar("AnyMachine", bound=PrefillMachine | DecodeMachine)


class Connector(ABC, Generic[AnyTransfer, AnyMachine]):
    """One engine rank's end of all its hand-offs. `with` starts the connector, and closes it.

    The connector does not survive `fork()`. In the child, `start` and `open` raise RuntimeError; every other call does
    nothing and does not affect the parent. Create a new connector after the fork.
    """

    role: Literal["prefill", "decode"]

    def __init__(
        self,
        config: ConnectorConfig,
        memory: KVMemory,
        instance: tuple[ModelShard, ...],
        machine: AnyMachine,
        parts: Parts,
        *,
        on_change: OnChange,
        registry: CollectorRegistry | None,
        running: Running,
        staging: Staging | None = None,
    ) -> None:
        self.config = config
        self.memory = memory
        self.incarnation = parts.identity.incarnation
        self._instance = instance
        self._machine: AnyMachine = machine
        self._backend = parts.backend
        self._process = parts.identity.process
        self._staging = staging
        self._timeouts = config.timeouts
        self._running, self._registry = running, registry
        self._collector = ConnectorCollector(self._all_stats)
        self._reactor = Reactor(
            f"pdpool-{self.role}",
            after_turn=self._after_turn,
            at_rest=self._at_rest,
            at_end=self._at_end,
            torn=self._on_torn,
            timeouts=config.timeouts,
        )
        self._drops = Drops(time.monotonic, config.timeouts)
        self._ports = Ports(config, self._reactor, self._drops)
        self._flight = self._open_flight()
        self._driver = MachineDriver(
            machine,
            self._reactor,
            self._drops,
            self._flight,
            config.frame_filter,
            transmit=self._transmit,
            publish=self._publish,
            perform=self._perform,
        )
        watching = f"{self.role} {self.incarnation}"
        self._fencer = RemoteFencer(
            self._backend.name,
            sending=self.role == "prefill",
            who=watching,
            reactor=self._reactor,
            submit=self._ports.submit,
            fence=self._release,
            owed=self._is_owed,
            here=self._process,
            timeouts=config.timeouts,
        )
        self._process_watch = ProcessWatch(
            self._backend.name,
            sending=self.role == "prefill",
            who=watching,
            reactor=self._reactor,
            submit=self._ports.submit,
            lost=self._on_exit,
            fence=self._release,
            wanted=self._concerns,
            timeouts=config.timeouts,
        )
        self._publisher = StatsPublisher(self._take_snapshot, self._reactor.lag, config.timeouts)
        self._spans = open_spans(self.role, config.rank)
        self._outcomes = OutcomeLog(self.role, config.rank, self._spans)
        self._remote_form = b""
        self._handles = count(1)
        self._transfers: TransferTable[AnyTransfer] = TransferTable(on_change)
        self._bytes_moved = 0
        self._armed: float | None = None
        """The machine's deadline for which the reactor has a timer."""
        self._started = self._closed = self._all_ended = self._forked = False
        self._closing = threading.RLock()
        self._draining = False
        self._shutting_down = False
        self._settled = threading.Event()
        _made_here.add(self)

    # --- Life cycle ---

    def start(self) -> None:
        """Register the memory, listen on the ports, and start the threads. Blocks for a short time.

        Raises:
            OSError: A port or the admin socket cannot be bound. `start` may be called again.
            BackendError: The transfer backend does not start.
            RuntimeError: No thread is left (`start` may be called again). Or the connector was started or closed
                before, or this process was forked after the connector was made.
        """
        if self._forked:
            raise RuntimeError(f"the {self.role} connector {_FORKED}")
        with self._closing:
            if self._started or self._closed:
                done = "closed" if self._closed else "started"
                raise RuntimeError(f"the {self.role} connector was {done}: make another")
            self._start()
        log.info("%s connector %s listens on %s", self.role, self.incarnation, self.control_address)
        if not self.config.curve:
            log.warning("there are no CURVE keys: the control channel is open to every process that reaches its port")

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            if not self._started:
                undo.callback(self.close)
            self.start()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail what is under way, inform peers, let writes under way end, and stop all threads.

        Idempotent. A second thread that calls it waits for the first. The next call completes one that was interrupted.
        A program that ends without a call makes it at its exit. Pages that are not releasable by then may still be
        written: end the process rather than use them again.

        Args:
            timeout_s: Half of it is for hand-offs, the rest for threads, in seconds. HTTP, spans and the transfer
                backend take some seconds more at worst. Threads that do not end in time are logged and left.
        """
        if self._forked:
            log.info("the %s connector %s", self.role, _FORKED)
            return
        with self._closing:
            self._closed = True
            if not self._all_ended:
                self._close(timeout_s)
                self._all_ended = True
                atexit.unregister(self.close)

    def drain(self) -> None:
        """Take no new hand-offs: they fail with `Cause.REFUSED`; those under way go on. See `stats().drained`."""
        self._draining = True
        self._post(Drain())

    @property
    def draining(self) -> bool:
        """True once `drain` was called, by the engine or through the admin socket."""
        return self._draining

    def fence(self, incarnation: str, *proofs: Proof) -> None:
        """Release what is held because of `incarnation`: there is proof that it can touch our memory no more.

        The caller is responsible for `proofs`, which are logged. Silence, NotReady, or a pod object that is gone are no
        proof: a node that is cut off goes on writing. Peers on this host need no call if the kernel reports their
        end. They do need one if we have connections to other hosts over a transfer backend that may use TCP.

        Where the peer's connections must also have closed at our end, the connector waits for that. Calling again does
        no harm. A fence is permanent: nothing is begun with that process again.

        Args:
            incarnation: Of the dead process, 32 hex characters.
            proofs: What was observed of its end.

        Raises:
            InsufficientProofError: The proofs do not suffice for the transfer backend; nothing was changed.
            ValueError: This is no incarnation, or no proof.
        """
        as_incarnation(incarnation)
        proofs = tuple(as_proof(proof) for proof in proofs)
        self._fencer.check(incarnation, proofs)
        self._reactor.post(partial(self._fencer.take, incarnation, proofs))

    def purge(self, older_than_s: float, reason: str) -> int:
        """Fail all hand-offs that this engine opened at least `older_than_s` seconds ago; returns at once.

        They fail with `Cause.PURGED` here and at the peer. Others go on. Pages stay held until they are releasable, as
        after `abort`. A request that only decode's engine has opened is purged at decode alone.

        Args:
            older_than_s: Age in seconds. 0 means every hand-off.
            reason: Why; the other side's engine receives it too.

        Returns:
            How many hand-offs were under way that long. One that ends at this moment may be among them.

        Raises:
            ValueError: The age is negative, or no number.
        """
        if not older_than_s >= 0:
            raise ValueError(f"older_than_s={older_than_s!r} must be 0 or more seconds")
        before = time.monotonic() - older_than_s
        old = [one for one in self._transfers if not one.status.ended and one.opened_at <= before]
        return sum(self._post(AbortTransfer(one._handle, reason, Cause.PURGED)) for one in old)

    def beat(self, *, paused: bool = False, idle: bool = False) -> None:
        """Report that the engine's scheduler loop is alive; optional, to be called in each of its turns.

        Args:
            paused: The engine is paused on request. Its requests do not move, and nothing is at fault.
            idle: The engine has no request, and its loop sleeps until one comes. It counts as alive until the next
                beat.
        """
        self._publisher.beat(paused=paused, idle=idle)

    # --- Queries ---

    @property
    def control_address(self) -> str:
        """Address of the control channel, "host:port"; known once the connector is started."""
        if not self._ports.control_port:
            raise RuntimeError("control_address is known once the connector is started")
        return str(Address(self.config.advertise_host, self._ports.control_port))

    @property
    def admin_address(self) -> str | None:
        """Address of the admin endpoint, "host:port"; None when there is none."""
        if self.config.admin_port is None:
            return None
        if not self._ports.admin_port:
            raise RuntimeError("admin_address is known once the connector is started")
        return str(Address(self.config.advertise_host, self._ports.admin_port))

    def poll(self) -> list[AnyTransfer]:
        """Return the transfers whose status has changed since the last call, each once, in order of their changes.

        Keep the transfers that you open: one that your program has dropped may be missing here.
        """
        return self._transfers.poll()

    def stats(self) -> ConnectorStats:
        """The connector's state as of a fraction of a second ago. Never waits for the owner thread."""
        return self._publisher.read()

    def set_queue(self, name: str, reqs: SupportsIndex, oldest_s: float | None, moved_total: SupportsIndex) -> None:
        """Show a queue of the engine's in `stats()`. It ages until it is shown again.

        Under the name of a hand-off queue, it lets the operator find requests that the engine keeps although their
        hand-offs have ended.

        Args:
            name: Of the queue: 1 to 64 letters, digits, '.', '_' and '-'.
            reqs: Requests in it.
            oldest_s: Age of the oldest request in seconds; None when there is none.
            moved_total: Requests that went on from it so far.

        Raises:
            ValueError: A value is out of range, or this is one queue too many.
            TypeError: A value has another type.
        """
        self._publisher.set_queue(name, as_queue(name, reqs, oldest_s, moved_total))

    # --- Start ---

    def _start(self) -> None:
        if not self._remote_form:
            self._remote_form = self._register()
        with contextlib.ExitStack() as undo:
            self._ports.open(
                undo,
                on_frames=self._on_server,
                on_connections=self._on_connections,
                pages=self._admin_pages(),
                changes=AdminEndpoint(self, self.config.admin_gate).handlers(),
                drain=drain_handlers(self, self._running),
            )
            self._serve_more(self._ports.http)
            self._publisher.refresh(at_once=True)
            if self._registry is not None:
                self._registry.register(self._collector)
                undo.callback(self._registry.unregister, self._collector)
            # The interpreter stops threads wherever they are: one that is in a call of NIXL's then aborts the process.
            atexit.register(self.close)
            self._reactor.start()
            self._started = True
            undo.pop_all()

    def _register(self) -> bytes:
        """Our memory as peers receive it; the transfer backend knows it from now on."""
        descriptor = self._backend.register(self.memory, self._staging.region if self._staging is not None else None)
        return encode_remote(
            RemoteMemory(backend=self._backend.name, memory=self.memory, descriptor=descriptor, process=self._process)
        )

    def _admin_pages(self) -> dict[str, Page]:
        metrics = CollectorRegistry()
        metrics.register(self._collector)
        return {
            "/v1/state": Page("application/json", lambda: state_json(self.stats())),
            "/metrics": Page(CONTENT_TYPE_LATEST, lambda: generate_latest(metrics)),
        }

    def _all_stats(self) -> list[ConnectorStats]:
        return [self.stats()]

    # --- Close ---

    def _close(self, timeout_s: float) -> None:
        """Each step may have been made before."""
        deadline = time.monotonic() + timeout_s
        ended = self._stop(deadline) if self._started or self._reactor.running else True
        for transfer in self._transfers if ended else ():
            if not transfer.status.ended:  # opened by a thread that was about to post it
                self._turn_away(transfer)
        if self._flight is not None:
            ended &= self._flight.close(max(deadline - time.monotonic(), 0.5))
        if self._spans is not None:
            self._spans.close(self._timeouts.span_flush_s)
        if not ended:
            log.error("a thread of the connector did not end within %.1f s and is left behind", timeout_s)
            atexit.register(self._close_late)
            return
        held = [transfer for transfer in self._transfers if not transfer.status.releasable]
        if held:
            log.error("closed with %d hand-offs whose pages may still be written", len(held))
        self._backend.close()
        self._ports.close()

    def _stop(self, deadline: float) -> bool:
        """End what `start` began; False when a thread goes on."""
        if self._reactor.running:
            self._reactor.post(self._begin_shutdown)
            self._settled.wait((deadline - time.monotonic()) / 2)
            self._reactor.post(self._send_goodbye)
        workers_ended = self._join_workers(deadline)
        stopped = self._reactor.stop(max(deadline - time.monotonic(), 0.5))
        self._ports.close_http()
        if self._registry is not None:
            with contextlib.suppress(KeyError):
                self._registry.unregister(self._collector)
        return workers_ended and stopped

    def _close_late(self) -> None:
        """At exit, close what has ended since `close` gave up waiting: Mooncake aborts a process that does not."""
        if self._forked:
            return
        late_s = self._timeouts.late_close_s
        if self._join_workers(time.monotonic() + late_s) and self._reactor.stop(late_s):
            self._backend.close()

    def _leave_to_parent(self) -> None:
        """We are in a forked child: it has our sockets and epolls, and no thread of ours.

        Closing anything here would break or block the parent. So this object is never collected.
        """
        self._forked = self._closed = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    # --- Hooks of the two sides ---

    @abstractmethod
    def _on_server(self) -> None:
        """The control port has something to read."""

    @abstractmethod
    def _transmit(self, peer: str, frame: Frame) -> None:
        """Send a frame to a paired peer."""

    @abstractmethod
    def _perform(self, effect: Effect) -> None:
        """Perform an effect that only this side has."""

    @abstractmethod
    def _peer_stats(self, now: float) -> tuple[PeerStats, ...]: ...

    @abstractmethod
    def _link_stats(self, now: float) -> tuple[LinkStats, ...]: ...

    @abstractmethod
    def _known_peers(self) -> Container[str]:
        """The peers with which hand-offs may still begin, reachable at the moment or not."""

    @abstractmethod
    def _send_goodbye(self) -> None:
        """Inform all peers that this connector closes, and let workers end."""

    @abstractmethod
    def _mark_lost(self, peer: str, why: str) -> None:
        """A process has exited or was fenced (`why`): it is lost, if that was not noticed before."""

    def _serve_more(self, http: HttpServer) -> None:
        """Serve what only one side serves."""

    def _on_connections(self) -> None:
        """Take note of connections to our control port that have ended."""
        self._ports.control.ended()

    def _checksums(self) -> dict[str, int]:
        """Checked hand-offs by outcome, where this side checks."""
        return {}

    def _join_workers(self, deadline: float) -> bool:
        """Wait for threads of this side; True when all have ended."""
        return time.monotonic() <= deadline

    # --- Opening and posting ---

    def _check_started(self, call: str) -> None:
        if self._forked:
            raise RuntimeError(f"the {self.role} connector {_FORKED}")
        if not self._started:
            raise RuntimeError(f"{call}() on a {self.role} connector that was not started: call start() first")

    def _open(self, transfer: AnyTransfer, event: Event, traceparent: str | None) -> AnyTransfer:
        if self._spans is not None:
            self._spans.begin(transfer, traceparent)
        self._transfers.add(transfer)
        if not self._post(event):
            self._turn_away(transfer)
        return transfer

    def _turn_away(self, transfer: AnyTransfer) -> None:
        """Nothing will be done for it any more."""
        if self._transfers.remove(transfer):
            refused = self._refusal(releasable=transfer._unknown_to_peers)
            self._transfers.settle(transfer, refused)
            if self._spans is not None:
                self._spans.end(transfer, refused)

    def _post(self, event: Event) -> bool:
        """Have the machine handle an event; False, and nothing is done, when the connector works no more."""
        if self._closed or self._driver.torn:
            return False
        self._reactor.step(partial(self._driver.drive, event))
        return True

    def _refusal(self, *, releasable: bool) -> TransferStatus:
        cause, what = (Cause.INTERNAL, TORN) if self._driver.torn else (Cause.SHUTDOWN, "is closed")
        return TransferStatus(Phase.FAILED, cause, f"the {self.role} connector {what}", releasable=releasable)

    # --- Owner thread ---

    def _publish(self, report: Report) -> None:
        transfer = self._transfers.get(report.handle)
        if transfer is None:
            return
        if report.status.ended and self._flight is not None:
            self._flight.ended(report.handle, report.status, self._reactor.now())
        transfer.attempts = report.attempts
        self._outcomes.changed(transfer, report.status)
        self._transfers.settle(transfer, report.status)

    def _after_turn(self) -> None:
        due = self._machine.next_deadline
        if due != self._armed:
            self._armed = due
            if due is None:
                self._reactor.cancel("machine")
            else:
                self._reactor.at("machine", due, self._on_deadline)
        if self._shutting_down and (self._driver.torn or not self._machine.unsettled):
            self._settled.set()
        if self._driver.failed:
            self._reactor.later(self._publish_failed)  # behind the frames of this turn
        self._transfers.notify()

    def _publish_failed(self) -> None:
        """An engine that sees a failure finds the peer informed."""
        self._driver.publish_failed()
        self._transfers.notify()

    def _on_deadline(self) -> None:
        self._armed = None
        self._driver.drive(Tick())

    def _begin_shutdown(self) -> None:
        self._shutting_down = True
        self._driver.drive(Shutdown())

    def _on_exit(self, peer: str) -> None:
        self._mark_lost(peer, "has exited")

    def _release(self, incarnation: str, proofs: tuple[Proof, ...]) -> None:
        log.warning("fence of %s: %s", incarnation, describe(proofs))
        self._driver.drive(Fenced(incarnation, kinds_of(proofs)))
        self._mark_lost(incarnation, "was fenced")

    def _on_torn(self) -> None:
        """An exception that ends the program cut a turn short: its effects are unknown.

        So nothing is moved and nothing is released any more. Peers learn that we leave, and then that we are gone.
        """
        self._driver.torn = True
        self._driver.failed.clear()
        log.error("the %s connector %s: its pages stay held until the process ends", self.role, TORN)
        lost = self._refusal(releasable=False)
        for transfer in self._transfers:
            if not transfer.status.ended:
                self._outcomes.changed(transfer, lost)
                self._transfers.settle(transfer, lost)
        self._send_goodbye()

    def _at_rest(self) -> None:
        self._publisher.refresh()

    def _at_end(self) -> None:
        self._process_watch.close()
        self._publisher.refresh(at_once=True)
        self._ports.close_control()

    def _open_flight(self) -> Flight | None:
        if self.config.flight_dir is None:
            return None
        source = Source(self.role, self.config.rank, self.incarnation, self.config.timeouts)
        return Flight(Path(self.config.flight_dir), source)

    # --- Statistics ---

    def _take_snapshot(self, now: float) -> ConnectorStats:
        held = self._machine.held()
        self._fencer.keep([peer for peer in self._fencer.peers if self._concerns(peer)])
        self._process_watch.tidy()
        self._outcomes.held([one.attempt for one in held])
        counts = queues_of(self._machine.queues, now)
        return ConnectorStats(
            role=self.role,
            rank=self.config.number_in_pod,
            ranks=self.config.connectors_of_pod,
            incarnation=self.incarnation,
            engine=self.config.engine,
            connector_version=VERSION,
            backend=self._backend.name,
            pod_uid=self._process.pod_uid,
            container=self._process.container,
            uptime_s=0.0,
            loop_lag_s=0.0,
            engine_beat_age_s=None,
            engine_paused=False,
            draining=self._machine.draining,
            queues={label: queue for label, queue in counts.items() if is_public_queue(label)},
            engine_queues={},
            attempts={label: queue for label, queue in counts.items() if not is_public_queue(label)},
            outcomes=dict(self._outcomes.outcomes),
            causes=dict(self._outcomes.causes),
            releases=self._outcomes.releases,
            checksums=self._checksums(),
            flights_lost=self._flight.lost() if self._flight is not None else {},
            drops=self._drops.counts(),
            holds=counts["held"].reqs,
            held_bytes=sum(bytes_held(one, self.memory) for one in held),
            held_oldest_s=counts["held"].oldest_s,
            held_for=held_for((peer for one in held for peer in one.unsettled_peers), self._fencer.peers),
            bytes_moved_total=self._bytes_moved,
            tombstones=self._machine.tombstones,
            faults=self._reactor.faults,
            peers=self._peer_stats(now),
            links=self._link_stats(now),
        )

    def _is_owed(self, peer: str) -> bool:
        return bool(self._machine.under_way(peer))

    def _concerns(self, peer: str) -> bool:
        return peer in self._known_peers() or self._is_owed(peer)


_made_here: "weakref.WeakSet[Connector[Any, Any]]" = weakref.WeakSet()


def _after_fork() -> None:
    for connector in list(_made_here):
        connector._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
