"""The decodes that a prefill is paired with: which ones are accepted, by which connections, and when they are lost."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from pdpool_connector.backends.base import BackendError, IncompatiblePeerError
from pdpool_connector.layout.memory import KVMemory, LayoutError, RemoteMemory, decode_remote
from pdpool_connector.layout.overlap import compatible
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.versions import VersionMismatchError, negotiate, readable
from pdpool_connector.runtime.hello_queue import HelloQueue
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.runtime.worker import PeerWorker, join_all
from pdpool_connector.transport.drops import Drops

log = logging.getLogger(__name__)

MAX_PEERS = 256
"""Each costs a thread; further decodes are refused and try again later."""
MAX_ROUTES = 8
"""Connections of one process; the oldest give way."""


@dataclass(slots=True, eq=False)
class Peer:
    """One decode process that has sent a Hello.

    It may have several connections, where it knows us by several addresses: `routes` has each with its number, the one
    of the last Hello last. Frames may arrive by any of them; answers go by the last, `route` and `connection`.
    """

    incarnation: str
    address: str
    version: int
    route: bytes
    connection: int
    worker: PeerWorker
    last_seen: float
    paired: bool = False
    """Its memory is connected."""
    present: bool = True
    """Its connection has not ended for longer than the grace."""
    routes: dict[bytes, int] = field(default_factory=dict)


class Misfit(NamedTuple):
    """A decode that can never be paired, by the connection of its last Hello. Only its Aborts are read."""

    incarnation: str
    route: bytes
    connection: int


class PeerTableOwner(Protocol):
    """What the peer table needs of its connector."""

    def is_fenced(self, peer: str) -> bool:
        """True for a process with which nothing is begun again."""

    def start_worker(self, hello: f.Hello, remote: RemoteMemory) -> PeerWorker:
        """Start the thread that writes to a decode that fits; it calls `PeerTable.connected`."""

    def on_peer_paired(self, peer: Peer) -> None:
        """Its memory is connected, or it is connected again: answer its Hello."""

    def on_peer_lost(self, peer: Peer, message: str) -> None:
        """There is evidence that it is gone."""

    def on_misfit(self, incarnation: str, version: int) -> None:
        """A decode does not fit: it may still abort its attempts."""

    def on_misfit_gone(self, incarnation: str) -> None:
        """The connection of a decode that does not fit has ended."""

    def send_to(self, route: bytes, frame: f.Frame) -> None:
        """Send a frame that belongs to no attempt."""


class PeerTable:
    """Owner thread only. A peer stays in the table until nothing writes to it any more."""

    def __init__(
        self,
        owner: PeerTableOwner,
        incarnation: str,
        memory: KVMemory,
        backend: str,
        reactor: Reactor,
        drops: Drops,
        timeouts: Timeouts,
    ) -> None:
        self._owner, self._reactor, self._drops, self._timeouts = owner, reactor, drops, timeouts
        self._incarnation, self._memory, self._backend = incarnation, memory, backend
        self._peers: dict[str, Peer] = {}
        self._by_connection: dict[int, Peer] = {}
        self._misfits: dict[str, Misfit] = {}
        self._rejected: dict[str, str] = {}
        """Why the backend can never reach the memory of a decode process."""
        self._open = True
        self._unknown: dict[bytes, float] = {}
        """When the sender of a frame, which is not paired, was last sent that."""
        self._hellos = HelloQueue(self._judge, reactor, drops, reactor.now)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __contains__(self, incarnation: object) -> bool:
        return incarnation in self._peers

    def get(self, incarnation: str) -> Peer | None:
        """A peer in the table, lost or not."""
        return self._peers.get(incarnation)

    def paired(self, incarnation: str) -> Peer | None:
        """A peer to which frames and pages may go."""
        peer = self._peers.get(incarnation)
        return peer if peer is not None and peer.paired else None

    def sender(self, sender: str, route: bytes) -> Peer | None:
        """The paired peer `sender`, if its Hello came by the same connection as the frame."""
        peer = self._peers.get(sender)
        if peer is None or not peer.paired or (peer.route != route and route not in peer.routes):
            return None
        if peer.route not in peer.routes and route in peer.routes:
            self._turn_to(peer, route)  # the connection of its last Hello has ended
        return peer

    def route_to(self, incarnation: str) -> bytes | None:
        """The route by which a paired peer, or a decode that does not fit, gets frames about its attempts."""
        if (peer := self.paired(incarnation)) is not None:
            return peer.route
        misfit = self._misfits.get(incarnation)
        return misfit.route if misfit is not None else None

    def is_misfit(self, sender: str, route: bytes) -> bool:
        """Whether `sender` is a decode that does not fit, and its Hello came by this connection."""
        misfit = self._misfits.get(sender)
        return misfit is not None and misfit.route == route

    def unknown(self, sender: str, route: bytes) -> None:
        """A frame came from a process that is not paired. It is refused, so that it sends another Hello."""
        peer, now = self._peers.get(sender), self._reactor.now()
        pause_s = self._timeouts.unknown_reply_s
        if (peer is not None and peer.present) or now - self._unknown.get(route, -pause_s) < pause_s:
            return
        if len(self._unknown) >= MAX_PEERS:
            self._unknown.clear()
        self._unknown[route] = now
        self._refuse(route, "prefill does not know this decode any more", retry=True)

    # --- A decode comes ---

    def greet(self, hello: f.Hello, route: bytes, connection: int) -> None:
        """A Hello has arrived. A known process needs no check, and waits behind no unknown one."""
        if hello.sender in self._peers:
            self._hellos.ended(connection)
            self._judge(hello, route, connection)
        else:
            self._hellos.add(hello, route, connection)

    def _judge(self, hello: f.Hello, route: bytes, connection: int) -> None:
        peer = self._peers.get(hello.sender)
        if not self._open:
            self._refuse(route, "prefill is shutting down", retry=True)
        elif self._owner.is_fenced(hello.sender):
            self._refuse(route, f"decode {hello.address} was fenced and is not paired again: restart it", retry=False)
        elif (why := self._rejected.get(hello.sender)) is not None:
            self._turn_away(hello, route, connection, why)
        elif peer is not None and not peer.present:
            self._refuse(route, "writes to this decode from before it was lost have not ended yet", retry=True)
        elif peer is not None:
            self._rebind(peer, route, connection)
        else:
            self._pair(hello, route, connection)

    def _pair(self, hello: f.Hello, route: bytes, connection: int) -> None:
        try:
            version = negotiate(hello.oldest_version, hello.version, we_are="prefill")
            remote = fitting(self._backend, self._memory, hello.memory)
        except (VersionMismatchError, LayoutError) as error:
            self._turn_away(hello, route, connection, str(error))
            return
        self._replace(hello)
        if len(self._peers) >= MAX_PEERS:
            self._refuse(route, f"prefill has {MAX_PEERS} peers, which is its limit", retry=True)
            return
        worker = self._owner.start_worker(hello, remote)
        peer = Peer(hello.sender, hello.address, version, route, connection, worker, self._reactor.now())
        self._peers[hello.sender] = peer
        self._bind(peer, route, connection)

    def _turn_away(self, hello: f.Hello, route: bytes, connection: int, why: str) -> None:
        """Refuse a decode that does not fit for good, and read its Aborts from now on."""
        version = readable(hello.oldest_version, hello.version)
        if hello.sender in self._misfits or len(self._misfits) < MAX_PEERS:
            self._misfits[hello.sender] = Misfit(hello.sender, route, connection)
            self._owner.on_misfit(hello.sender, version)
        self._refuse(route, why, retry=False, version=version)

    def _replace(self, hello: f.Hello) -> None:
        """A new process at an address is evidence that the old one has ended."""
        for old in list(self._peers.values()):
            if old.address == hello.address and old.present:
                self.lose(old, f"decode {old.address} was replaced by process {hello.sender[:8]}")

    def _rebind(self, peer: Peer, route: bytes, connection: int) -> None:
        """The same process sends another Hello: its first answer was lost, or its connection."""
        self._bind(peer, route, connection)
        if peer.paired:
            self._owner.on_peer_paired(peer)

    def _bind(self, peer: Peer, route: bytes, connection: int) -> None:
        other = self._by_connection.get(connection)
        if other is not None and other is not peer and other.connection != connection:
            self._forget_route(other, route)
        elif other is not None and other is not peer:
            self.lose(other, f"the connection of decode {other.address} now belongs to another process")
        self._forget_route(peer, route)
        while len(peer.routes) >= MAX_ROUTES:
            self._forget_route(peer, next(iter(peer.routes)))
        peer.routes[route] = connection
        self._by_connection[connection] = peer
        self._turn_to(peer, route)

    def _turn_to(self, peer: Peer, route: bytes) -> None:
        peer.route, peer.connection = route, peer.routes[route]
        self._reactor.cancel(("grace", peer.incarnation))

    def _forget_route(self, peer: Peer, route: bytes) -> None:
        self._by_connection.pop(peer.routes.pop(route, -1), None)

    def connected(self, incarnation: str, error: BackendError | None) -> None:
        """The backend has reached a decode's memory, or could not."""
        peer = self._peers.get(incarnation)
        if peer is None or not peer.present:
            return
        if error is None:
            peer.paired = True
            self._owner.on_peer_paired(peer)
            log.info("paired with decode %s (%s)", peer.address, incarnation)
        else:
            message = f"prefill's backend cannot reach the memory of decode {peer.address}: {error}"
            final = isinstance(error, IncompatiblePeerError)
            if final and len(self._rejected) < MAX_PEERS:
                self._rejected[incarnation] = message
            self._refuse(peer.route, message, retry=not final)
            self.lose(peer, message)

    def _refuse(self, route: bytes, reason: str, *, retry: bool, version: int = f.VERSION_MIN) -> None:
        if not retry:
            self._drops.note("misfit", f"a decode is not paired: {reason}")
        frame = f.HelloRefused(version=version, sender=self._incarnation, reason=f.text(reason), retry=retry)
        self._owner.send_to(route, frame)

    # --- A decode goes ---

    def connection_ended(self, connection: int) -> None:
        """A connection to our control port has ended."""
        self._hellos.ended(connection)
        for misfit in [one for one in self._misfits.values() if one.connection == connection]:
            del self._misfits[misfit.incarnation]
            self._owner.on_misfit_gone(misfit.incarnation)
        peer = self._by_connection.get(connection)
        if peer is None:
            return
        self._forget_route(peer, next(route for route, number in peer.routes.items() if number == connection))
        if peer.present and connection == peer.connection:
            for route in peer.routes:  # a living process sends another Hello there
                self._refuse(route, "the connection of the last Hello has ended", retry=True)
            message = f"the connection of decode {peer.address} ended, and the process did not connect again"
            grace_s = self._timeouts.lost_grace_s
            self._reactor.at(
                ("grace", peer.incarnation), self._reactor.now() + grace_s, partial(self.lose, peer, message)
            )

    def lose(self, peer: Peer, message: str) -> None:
        """There is evidence that a peer is gone, or it has sent Goodbye."""
        peer.present = peer.paired = False
        self._reactor.cancel(("grace", peer.incarnation))
        for route in list(peer.routes):
            self._forget_route(peer, route)
        self._owner.on_peer_lost(peer, message)
        peer.worker.close()
        log.warning("%s", message)

    def mark_lost(self, incarnation: str, why: str) -> None:
        """A process has exited or was fenced (`why`): it is lost, if that was not noticed before."""
        known = self._peers.get(incarnation)
        if known is not None and known.present:
            self._send_goodbye(known, f"decode {why}; restart it")
            self.lose(known, f"decode {known.address} {why}")

    def worker_gone(self, incarnation: str) -> None:
        """Nothing writes to a peer any more."""
        peer = self._peers[incarnation]
        if peer.present:
            self._send_goodbye(peer, "the thread that writes to it has failed")
            self.lose(peer, f"the thread that writes to decode {peer.address} has failed")
        del self._peers[incarnation]

    def shut(self) -> None:
        """Pair with no further decode."""
        self._open = False

    def leave(self) -> None:
        """The connector closes: send Goodbye to all, and let workers end."""
        self.shut()
        for peer in self:
            self._send_goodbye(peer, "prefill is shutting down")
            peer.present = False
            peer.worker.close()

    def _send_goodbye(self, peer: Peer, reason: str) -> None:
        if peer.paired:
            bye = f.Goodbye(version=peer.version, sender=self._incarnation, reason=reason)
            self._owner.send_to(peer.route, bye)

    def join(self, deadline: float) -> bool:
        """Wait for closed workers until `deadline` (monotonic). True when all have ended. For the closing thread."""
        return join_all([peer.worker for peer in list(self)], deadline)


def fitting(backend: str, memory: KVMemory, received: bytes) -> RemoteMemory:
    """Return a decode's memory, if a prefill with this backend and memory can write to it.

    Args:
        backend: prefill's.
        memory: prefill's.
        received: decode's `RemoteMemory`, as it came in Hello.

    Raises:
        LayoutError: it is not valid or does not fit; every difference is named.
    """
    try:
        remote = decode_remote(received)
    except LayoutError as error:
        raise LayoutError(f"decode's memory is not valid: {error}") from None
    if remote.backend != backend:
        raise LayoutError(f"backend is {backend!r} at prefill and {remote.backend!r} at decode")
    if differences := compatible(memory, remote.memory):
        raise LayoutError("prefill's and decode's memory differ: " + "; ".join(differences))
    return remote
