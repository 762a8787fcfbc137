"""What prefill's and decode's connector share: life cycle, the owner thread around the machine, stats, admin."""

import atexit
import contextlib
import ctypes
import logging
import os
import secrets
import threading
import time
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Generic, Literal, Self, SupportsIndex, TypeVar

import zmq
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from pdpool_connector.backends import open_backend
from pdpool_connector.backends.base import Op
from pdpool_connector.flight.files import Flight, Speaker
from pdpool_connector.flight.replay import AnyMachine
from pdpool_connector.layout.memory import KVMemory, RemoteMemory, encode_remote
from pdpool_connector.layout.pairing import ModelShard, shard_of
from pdpool_connector.layout.process import this_process
from pdpool_connector.layout.staging import Staging
from pdpool_connector.protocol.events import (
    Drain,
    Event,
    Fenced,
    Report,
    Shutdown,
    Tick,
)
from pdpool_connector.protocol.exchange import Exchange
from pdpool_connector.protocol.fence import Proof, describe, kinds_of
from pdpool_connector.protocol.frames import ROOMS
from pdpool_connector.protocol.opening import DecodeAttempt
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus
from pdpool_connector.runtime.admin import AdminEndpoint
from pdpool_connector.runtime.config import ConnectorConfig
from pdpool_connector.runtime.machine_driver import MachineDriver
from pdpool_connector.runtime.metrics import ConnectorCollector, state_json
from pdpool_connector.runtime.outcome_log import OutcomeLog
from pdpool_connector.runtime.process_watch import ProcessWatch
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.runtime.remote_fencer import RemoteFencer
from pdpool_connector.runtime.spans import open_spans
from pdpool_connector.runtime.stats import ConnectorStats, HeldFor, LinkStats, PeerStats
from pdpool_connector.runtime.stats_publisher import StatsPublisher, queues_of
from pdpool_connector.runtime.transfer import Transfer
from pdpool_connector.runtime.validation import as_incarnation, as_proof, as_queue, as_whole
from pdpool_connector.transport.address import Address
from pdpool_connector.transport.control import ControlServer
from pdpool_connector.transport.curve import CurveAuthenticator
from pdpool_connector.transport.drops import Drops
from pdpool_connector.transport.http import HttpServer, Page

log = logging.getLogger(__name__)

LATE_S = 0.5
"""What an exiting process still waits for threads that were left behind."""

TORN = "was interrupted in the midst of its work"
_FORKED = "belongs to the process from which this one was forked off: make one after the fork"

AnyTransfer = TypeVar("AnyTransfer", bound=Transfer)


class Connector(MachineDriver, Generic[AnyTransfer]):
    """One engine rank's end of all its hand-offs.

    `memory` is what cache is moved from (prefill) or to (decode), by us or by peers; it must stay mapped until `close`
    has returned. `on_change` is called when the status of some transfer has changed, in the connector's own thread or
    within a call of yours (`open`, `send`, `abort`): it must only wake the scheduler. `registry`, when given, gets the
    `pdpool_connector_*` metrics. `with` starts the connector, and closes it.
    """

    role: Literal["prefill", "decode"]
    _staging: Staging | None = None

    def __init__(
        self,
        config: ConnectorConfig,
        memory: KVMemory,
        on_change: Callable[[], None] = lambda: None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        if not callable(on_change):
            raise TypeError(f"on_change={on_change!r} cannot be called: give a function without arguments")
        self._forked = False
        _made_here.add(self)
        self.config = config
        self.memory = memory
        self._instance = _instance_of(config, memory)
        self.incarnation = secrets.token_hex(16)
        self._on_change = on_change
        self._registry = registry
        self._collector = ConnectorCollector(lambda: [self.stats()])
        self._sending = self.role == "prefill" and config.direction == "write"
        """Our engine reads our pages to write the peer's; otherwise somebody writes ours, or a peer reads them."""
        target = "decode" if config.direction == "write" else "prefill"
        self._backend = open_backend(
            config.backend,
            self.incarnation,
            target=self.role == target,
            op=Op(config.direction),
            host=config.advertise_host,
        )
        machine = self._make_machine()
        reactor = Reactor(
            f"pdpool-{self.role}",
            after_turn=self._after_turn,
            at_rest=lambda: self._board.refresh(),
            at_end=self._at_end,
            torn=self._on_torn,
        )
        super().__init__(machine, reactor, Drops(), self._open_flight(machine))
        self._process = this_process(config.pod_uid)
        self._vouchers = RemoteFencer(
            self._backend.name,
            sending=self._sending,
            who=f"{self.role} {self.incarnation}",
            reactor=reactor,
            submit=lambda look: self._http.submit(look),
            fence=self._release,
            owed=lambda peer: bool(self._machine.under_way(peer)),
        )
        self._exits = ProcessWatch(
            self._backend.name,
            sending=self._sending,
            who=f"{self.role} {self.incarnation}",
            reactor=reactor,
            submit=lambda look: self._http.submit(look),
            lost=lambda peer: self._part_with(peer, "has exited"),
            fence=self._release,
            wanted=self._concerns,
        )
        self._context: zmq.Context[Any] = zmq.Context()
        self._started = False
        self._remote_form = b""
        self._control_port = self._admin_port = 0
        self._doorkeeper: CurveAuthenticator | None = None
        self._handles = count(1)
        self._transfers: dict[int, AnyTransfer] = {}
        self._spans = open_spans(self.role, config.rank)
        self._ends = OutcomeLog(self.role, config.rank, self._spans)
        self._bytes_moved = 0
        self._changed = False
        self._armed: float | None = None
        """The deadline of the machine's for which the reactor has a timer."""
        self._closed = self._all_ended = False
        self._closing = threading.RLock()
        self._shutting_down = False
        self._settled = threading.Event()
        self._board = StatsPublisher(self._take_snapshot, reactor.lag)

    # --- Life cycle ---

    def start(self) -> None:
        """Register the memory, listen, and begin to work. Blocks shortly.

        Raises OSError when a port cannot be bound, and RuntimeError when no thread is left, after which it may be tried
        again; BackendError when the data plane will not start; RuntimeError also when it was started or closed before,
        or made before this process was forked off.
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
            log.warning("there are no CURVE keys: the control channel is open to whoever reaches its port")

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            if not self._started:
                undo.callback(self.close)
            self.start()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        if not self._remote_form:
            self._remote_form = self._register()
        with contextlib.ExitStack() as undo:
            self._listen(undo)
            self._board.refresh(at_once=True)
            if self._registry is not None:
                self._registry.register(self._collector)
                undo.callback(self._registry.unregister, self._collector)
            # The interpreter ends threads wherever they are: one that is in a call of NIXL's then aborts the process.
            atexit.register(self.close)
            self._reactor.start()
            self._started = True
            undo.pop_all()

    def _register(self) -> bytes:
        """What peers are told of our memory, which the engine knows then."""
        descriptor = self._backend.register(self.memory, self._staging.region if self._staging is not None else None)
        return encode_remote(
            RemoteMemory(backend=self._backend.name, memory=self.memory, descriptor=descriptor, process=self._process)
        )

    def _listen(self, undo: contextlib.ExitStack) -> None:
        host, port = self.config.listen_host, self.config.control_port
        if self.config.curve and self._doorkeeper is None:
            # It stays where a port is taken: its own address is free again only some time after it was closed.
            self._doorkeeper = CurveAuthenticator(self._context, self.config.curve)
        key = self.config.curve[0] if self.config.curve else None
        self._server = ControlServer(self._context, host, port, self._drops, self._reactor, key)
        self._control_port = self._server.port
        undo.callback(self._server.close)
        for socket, call in ((self._server.socket, self._on_server), (self._server.monitor, self._on_connections)):
            self._reactor.watch(socket, call)
            undo.callback(self._reactor.unwatch, socket)
        self._http = HttpServer(host)
        undo.callback(self._http.close)
        if self.config.admin_port is not None:
            changes = AdminEndpoint(self, self.config.admin_gate).handlers()
            self._admin_port = self._http.serve(self.config.admin_port, self._admin_pages(), changes)
        self._serve_more(self._http)

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail what is under way, tell peers, let writes in flight end, and stop all threads.

        Hand-offs have half of `timeout_s`, threads the rest; HTTP, spans, data plane take some seconds more at worst.
        Idempotent; a second thread that calls it waits for the first, and one that was interrupted is made by the next
        call. What cannot be ended in time is logged and left to the end of the process. Pages that are not releasable
        by then may still be touched afterwards: end the process rather than use them again. A program that ends without
        a call of this, by an exception or not, makes it at its exit. In a process that was forked off it does nothing:
        the connector is its parent's.
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

    def _close(self, timeout_s: float) -> None:
        """Each step may have been made before."""
        deadline = time.monotonic() + timeout_s
        ended = self._stop(deadline) if self._started or self._reactor.running else True
        for transfer in list(self._transfers.values()) if ended else ():
            if not transfer.status.ended:  # opened by a thread that was about to post it
                self._turn_away(transfer)
        if self._flight is not None:
            ended &= self._flight.close(max(deadline - time.monotonic(), 0.5))
        if self._spans is not None:
            self._spans.close()
        if not ended:
            log.error("a thread of the connector did not end within %.1f s and is left behind", timeout_s)
            atexit.register(self._close_late)
            return
        held = [transfer for transfer in list(self._transfers.values()) if not transfer.status.releasable]
        if held:
            log.error("closed with %d hand-offs whose pages may still be touched", len(held))
        self._backend.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._context.destroy()  # with what a start that was interrupted has left open

    def _stop(self, deadline: float) -> bool:
        """End what `start` began; False when a thread goes on."""
        if self._reactor.running:
            self._reactor.post(self._begin_shutdown)
            self._settled.wait((deadline - time.monotonic()) / 2)
            self._reactor.post(self._say_goodbye)
        workers_ended = self._join_workers(deadline)
        stopped = self._reactor.stop(max(deadline - time.monotonic(), 0.5))
        self._http.close()
        if self._registry is not None:
            with contextlib.suppress(KeyError):
                self._registry.unregister(self._collector)
        return workers_ended and stopped

    def _close_late(self) -> None:
        """At exit, close what has ended since `close` gave up waiting: Mooncake aborts a process that does not."""
        if self._forked:
            return
        if self._join_workers(time.monotonic() + LATE_S) and self._reactor.stop(LATE_S):
            self._backend.close()

    def _leave_to_parent(self) -> None:
        """We are in a process that was forked off: it has our sockets and epolls, and no thread of ours.

        Whatever is ended here, by us or when the interpreter collects what the data plane made, ends or blocks what
        the parent works with. So it is never collected.
        """
        self._forked = self._closed = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def drain(self) -> None:
        """Take no new hand-offs (they fail with Cause.REFUSED); those under way go on. `stats().drained` tells when."""
        self._post(Drain())

    def fence(self, incarnation: str, *proofs: Proof) -> None:
        """Release what is held because of `incarnation`: there is proof that it can touch our memory no more.

        The caller vouches for `proofs`, which are logged. Silence, NotReady, or a pod object that is gone are no proof:
        a node that is cut off goes on writing. Peers of this host whose end the kernel tells need no call, unless we
        have connections to other hosts over a data plane that may use TCP. Where the end of the peer's connections must
        be seen at our end too, that is waited for here; to call again does no harm.

        A fence is for good: whether its loss has been noticed or not, nothing is begun with that process again.

        Raises InsufficientProofError, and changes nothing, when the proofs do not suffice for the engine in use;
        ValueError for what is no incarnation, or no proof.
        """
        as_incarnation(incarnation)
        proofs = tuple(as_proof(proof) for proof in proofs)
        self._vouchers.check(incarnation, proofs)
        self._reactor.post(lambda: self._vouchers.take(incarnation, proofs))

    def abort_room(self, room: int, message: str) -> int:
        """Give up all hand-offs of a room; returns how many. From any thread. Raises as `open` for what is no room."""
        room = as_whole("room", room, ROOMS)
        return self._abort_all([one for one in tuple(self._transfers.values()) if one.room == room], message)

    def purge(self, older_than_s: float, message: str) -> int:
        """Give up all hand-offs that were opened so long ago, whatever they wait for; returns how many.

        Raises ValueError for what is no age.
        """
        if not (isinstance(older_than_s, int | float) and older_than_s >= 0):
            raise ValueError(f"older_than_s={older_than_s!r} is no age: give 0 or more seconds")
        latest = time.monotonic() - older_than_s
        return self._abort_all([one for one in tuple(self._transfers.values()) if one.opened_at <= latest], message)

    def _abort_all(self, transfers: list[AnyTransfer], message: str) -> int:
        live = [transfer for transfer in transfers if not (transfer.status.ended or self._closed)]
        for transfer in live:
            transfer.abort(message)
        return len(live)

    def beat(self) -> None:
        """The engine's scheduler loop is alive; to be called in each of its turns."""
        self._board.beat()

    # --- What can be asked ---

    @property
    def control_address(self) -> str:
        """Address of the control channel, "host:port"; known once it is started."""
        if not self._control_port:
            raise RuntimeError("control_address is known once the connector is started")
        return str(Address(self.config.advertise_host, self._control_port))

    @property
    def admin_address(self) -> str | None:
        """Address of the admin endpoint, "host:port"; None when there is none."""
        if self.config.admin_port is None:
            return None
        if not self._admin_port:
            raise RuntimeError("admin_address is known once the connector is started")
        return str(Address(self.config.advertise_host, self._admin_port))

    def stats(self) -> ConnectorStats:
        """State as of a fraction of a second ago. From any thread; never waits for the owner thread."""
        return self._board.read()

    def set_queue(self, name: str, reqs: SupportsIndex, oldest_s: float | None, moved_total: SupportsIndex) -> None:
        """Show a queue of the engine's own beside the connector's in `stats()`; from any thread.

        `reqs`: requests in it; `oldest_s`: age of the oldest, None when there is none; `moved_total`: how many went on
        from it so far. Raises ValueError or TypeError for what cannot be; ValueError for one queue too many.
        """
        self._board.set_queue(name, as_queue(name, reqs, oldest_s, moved_total))

    # --- For the two sides ---

    @abstractmethod
    def _make_machine(self) -> AnyMachine: ...

    @abstractmethod
    def _on_server(self) -> None: ...

    @abstractmethod
    def _peer_stats(self, now: float) -> tuple[PeerStats, ...]: ...

    @abstractmethod
    def _link_stats(self, now: float) -> tuple[LinkStats, ...]: ...

    @abstractmethod
    def _at_hand(self) -> Container[str]:
        """The peers with which something may still begin, out of reach for the moment or not."""

    @abstractmethod
    def _say_goodbye(self) -> None: ...

    @abstractmethod
    def _part_with(self, peer: str, why: str) -> None:
        """A process has exited or was fenced (`why`): if its loss has not been noticed yet, it has been now."""

    def _serve_more(self, http: HttpServer) -> None:
        """Serve what only one side serves."""

    def _on_connections(self) -> None:
        """Take note of connections to our control port that have ended."""
        self._server.ended()

    def _checksums(self) -> dict[str, int]:
        """Checked hand-offs by outcome, where this side checks."""
        return {}

    def _join_workers(self, deadline: float) -> bool:
        """Wait for threads of the data plane; True when all have ended."""
        return time.monotonic() <= deadline

    def _check_started(self, call: str) -> None:
        if self._forked:
            raise RuntimeError(f"the {self.role} connector {_FORKED}")
        if not self._started:
            raise RuntimeError(f"{call}() on a {self.role} connector that was not started")

    def _open(self, transfer: AnyTransfer, event: Event, traceparent: str | None) -> AnyTransfer:
        self._check_started("open")
        if self._spans is not None:
            self._spans.begin(transfer, traceparent)
        self._transfers[transfer._handle] = transfer
        if not self._post(event):
            self._turn_away(transfer)
        return transfer

    def _turn_away(self, transfer: AnyTransfer) -> None:
        """Nothing will be done about it any more. Where no attempt was made, no peer has heard of it."""
        if self._transfers.pop(transfer._handle, None) is not None:
            transfer.settle(refused := self._refusal(releasable=not transfer.attempts))
            if self._spans is not None:
                self._spans.end(transfer, refused)

    def _post(self, event: Event) -> bool:
        """Have the machine handle an event; False, and nothing is done, when the connector works no more."""
        if self._closed or self._torn:
            return False
        self._reactor.step(partial(self._drive, event))
        return True

    def _refusal(self, *, releasable: bool) -> TransferStatus:
        cause, what = (Cause.INTERNAL, TORN) if self._torn else (Cause.SHUTDOWN, "is closed")
        return TransferStatus(Phase.FAILED, cause, f"the {self.role} connector {what}", releasable=releasable)

    # --- Owner thread ---

    def _open_flight(self, machine: AnyMachine) -> Flight | None:
        if self.config.flight_dir is None:
            return None
        speaker = Speaker(self.role, self.config.rank, self.incarnation, machine.timing, self.config.direction)
        return Flight(Path(self.config.flight_dir), speaker)

    def _publish(self, report: Report) -> None:
        handle, status = report.handle, report.status
        transfer = self._transfers.get(handle)
        if transfer is None:
            return
        over = status.ended
        if over and self._flight is not None:
            self._flight.ended(handle, status, time.monotonic())
        transfer.attempts = report.attempts
        self._ends.changed(transfer, status)
        transfer.settle(status)
        self._changed = True
        if over and status.releasable:
            del self._transfers[handle]

    def _after_turn(self) -> None:
        due = self._machine.next_deadline
        if due != self._armed:
            self._armed = due
            if due is None:
                self._reactor.cancel("machine")
            else:
                self._reactor.at("machine", due, self._on_deadline)
        if self._shutting_down and (self._torn or not self._machine.unsettled):
            self._settled.set()
        if self._failed:
            self._reactor.later(self._publish_failed)  # behind what was sent in this turn
        self._tell_engine()

    def _publish_failed(self) -> None:
        """Whoever sees a failure finds the peer told."""
        failed, self._failed = self._failed, []
        for report in failed:
            self._reactor.guard(partial(self._publish, report))
        self._tell_engine()

    def _tell_engine(self) -> None:
        if self._changed:
            self._changed = False
            self._on_change()

    def _on_deadline(self) -> None:
        self._armed = None
        self._drive(Tick())

    def _begin_shutdown(self) -> None:
        self._shutting_down = True
        self._drive(Shutdown())

    def _release(self, incarnation: str, proofs: tuple[Proof, ...]) -> None:
        log.warning("fence of %s: %s", incarnation, describe(proofs))
        self._drive(Fenced(incarnation, kinds_of(proofs)))
        self._part_with(incarnation, "was fenced")

    def _on_torn(self) -> None:
        """An exception that ends the program came in the midst of a turn: nobody knows what of it was done.

        So nothing is moved and nothing is released any more. Peers learn that we leave, and then that we are gone.
        """
        self._torn = True
        self._failed.clear()
        log.error("the %s connector %s: its pages stay held until the process ends", self.role, TORN)
        lost = self._refusal(releasable=False)
        for transfer in list(self._transfers.values()):
            if not transfer.status.ended:
                self._ends.changed(transfer, lost)
                transfer.settle(lost)
        self._changed = True
        self._say_goodbye()

    def _at_end(self) -> None:
        self._exits.close()
        self._board.refresh(at_once=True)
        self._server.close()

    def _take_snapshot(self, now: float) -> ConnectorStats:
        held = self._machine.held()
        self._vouchers.keep([peer for peer in self._vouchers.peers if self._concerns(peer)])
        self._exits.tidy()
        self._ends.held([one.attempt for one in held])
        counts = queues_of(self._machine.census, now)
        return ConnectorStats(
            role=self.role,
            rank=self.config.rank,
            ranks=len(self.config.instance) or 1,
            incarnation=self.incarnation,
            pod_uid=self._process.pod_uid,
            container=self._process.container,
            uptime_s=0.0,
            loop_lag_s=0.0,
            engine_beat_age_s=None,
            draining=self._machine.draining,
            queues={label: queue for label, queue in counts.items() if "_" in label},
            attempts={label: queue for label, queue in counts.items() if "_" not in label},
            outcomes=dict(self._ends.outcomes),
            causes=dict(self._ends.causes),
            releases=self._ends.releases,
            checksums=self._checksums(),
            flights_lost=self._flight.lost() if self._flight is not None else {},
            drops=self._drops.counts(),
            holds=counts["held"].reqs,
            held_bytes=sum(map(self._bytes_of, held)),
            held_oldest_s=counts["held"].oldest_s,
            held_for=self._held_for(peer for one in held for peer in one.loud),
            bytes_moved_total=self._bytes_moved,
            expected=self._machine.expected,
            tombstones=self._machine.tombstones,
            faults=self._reactor.faults,
            peers=self._peer_stats(now),
            links=self._link_stats(now),
        )

    def _bytes_of(self, held: Exchange | DecodeAttempt) -> int:
        """Of our memory that a hand-off may touch: its pages, its items of state, its aux row."""
        memory = self.memory
        return held.pages * memory.page_bytes + held.state_items * memory.state_bytes + memory.aux.item_bytes

    def _held_for(self, unproven: Iterable[str]) -> tuple[HeldFor, ...]:
        rows = []
        for peer, holds in sorted(Counter(unproven).items()):
            process = self._vouchers.peers.get(peer)
            where = (process.pod_uid, process.container) if process is not None else ("", "")
            rows.append(HeldFor(peer, holds, *where))
        return tuple(rows)

    def _concerns(self, peer: str) -> bool:
        return peer in self._at_hand() or bool(self._machine.under_way(peer))

    def _admin_pages(self) -> dict[str, Page]:
        metrics = CollectorRegistry()
        metrics.register(self._collector)
        return {
            "/v1/state": Page("application/json", lambda: state_json(self.stats())),
            "/metrics": Page(CONTENT_TYPE_LATEST, lambda: generate_latest(metrics)),
        }


_made_here: weakref.WeakSet[Connector[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for connector in list(_made_here):
        connector._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def _instance_of(config: ConnectorConfig, memory: KVMemory) -> tuple[ModelShard, ...]:
    """The parts of all ranks. Raises ValueError when the memory is not that of the rank that it is said to be."""
    own = shard_of(memory)
    instance = config.instance or (own,)
    if instance[config.rank] != own:
        raise ValueError(f"memory holds {own}, instance says that rank {config.rank} holds {instance[config.rank]}")
    return instance
