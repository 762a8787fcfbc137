"""The decodes that a prefill is paired with: who gets in, under which connection it speaks, and when it is gone."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from pdpool_connector.backends.base import BackendError, IncompatiblePeerError
from pdpool_connector.layout.checksum import PageSum
from pdpool_connector.layout.memory import KVMemory, LayoutError, RemoteMemory, decode_remote
from pdpool_connector.layout.overlap import compatible
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.versions import VersionMismatchError, negotiate
from pdpool_connector.runtime.hello_queue import HelloQueue
from pdpool_connector.runtime.process_watch import GRACE_S
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.runtime.worker import PeerWorker, join_all
from pdpool_connector.transport.drops import Drops

log = logging.getLogger(__name__)

MAX_PEERS = 256
"""Each costs a thread; more decodes than this are told to try again later."""
TELL_S = 1.0
"""How often somebody who is not paired is told so."""
MAX_ROUTES = 8
"""Connections by which one process may speak; the oldest give way."""


@dataclass(slots=True, eq=False)
class Peer:
    """One decode process that has said hello.

    It may have done so by several connections, where it knows us by several addresses: `routes` has each with its
    number, the last hello last. It may speak by any, and is answered by the last, which is `route` and `connection`.
    """

    incarnation: str
    address: str
    version: int
    route: bytes
    connection: int
    worker: PeerWorker | None
    """Writes to it; None where decode reads."""
    page_sum: PageSum | None
    """What gives the checksum of pages that it reads; None where it reads none, or pages are cut by heads."""
    last_seen: float
    paired: bool = False
    """Its memory is connected."""
    present: bool = True
    """Its connection has not ended for longer than the grace."""
    routes: dict[bytes, int] = field(default_factory=dict)


class PeerTableOwner(Protocol):
    """What the table of decodes asks of its connector, and tells it."""

    def decode_fenced(self, peer: str) -> bool:
        """True for a process with which nothing is begun again."""

    def decode_met(self, hello: f.Hello, remote: RemoteMemory) -> tuple[PeerWorker | None, PageSum | None]:
        """Begin with a decode that fits: what writes to it, which will say `connected`, or None where it reads."""

    def decode_paired(self, peer: Peer) -> None:
        """Its memory is connected, or it has come back. It is to be welcomed."""

    def decode_lost(self, peer: Peer, message: str) -> None:
        """There is evidence that it is gone."""

    def decode_told(self, route: bytes, frame: f.HelloRefused | f.Goodbye) -> None:
        """Send a frame that belongs to no attempt."""


class PeerTable:
    """In turns of the owner only. A peer stays in the table until nothing writes to it any more."""

    def __init__(
        self,
        owner: PeerTableOwner,
        incarnation: str,
        memory: KVMemory,
        backend: str,
        direction: Literal["write", "read"],
        reactor: Reactor,
        drops: Drops,
    ) -> None:
        self._owner, self._reactor, self._drops = owner, reactor, drops
        self._incarnation, self._memory, self._backend, self._direction = incarnation, memory, backend, direction
        self._peers: dict[str, Peer] = {}
        self._by_connection: dict[int, Peer] = {}
        self._open = True
        self._told: dict[bytes, float] = {}
        """When somebody was told that we do not know him."""
        self._greetings = HelloQueue(self._judge, reactor, drops)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __contains__(self, incarnation: object) -> bool:
        return incarnation in self._peers

    def get(self, incarnation: str) -> Peer | None:
        """Whoever is in the table, lost or not."""
        return self._peers.get(incarnation)

    def paired(self, incarnation: str) -> Peer | None:
        """A peer that may be spoken with and written to."""
        peer = self._peers.get(incarnation)
        return peer if peer is not None and peer.paired else None

    def speaker(self, sender: str, route: bytes) -> Peer | None:
        """The paired peer that says to be `sender`, if it has said hello by the connection that the words came by."""
        peer = self._peers.get(sender)
        if peer is None or not peer.paired or (peer.route != route and route not in peer.routes):
            return None
        if peer.route not in peer.routes and route in peer.routes:
            self._turn_to(peer, route)  # the one by which it was answered has ended
        return peer

    def unknown(self, sender: str, route: bytes) -> None:
        """Somebody spoke as if it was paired. Whom we do not know any more learns of it, and may say hello again."""
        peer, now = self._peers.get(sender), time.monotonic()
        if (peer is not None and peer.present) or now - self._told.get(route, -TELL_S) < TELL_S:
            return
        if len(self._told) >= MAX_PEERS:
            self._told.clear()
        self._told[route] = now
        self._refuse(route, "prefill does not know this decode any more", retry=True)

    # --- One comes ---

    def greet(self, hello: f.Hello, route: bytes, connection: int) -> None:
        """Somebody has said hello. Who is known needs no judging, and waits behind no stranger."""
        if hello.sender in self._peers:
            self._greetings.ended(connection)
            self._judge(hello, route, connection)
        else:
            self._greetings.come(hello, route, connection)

    def _judge(self, hello: f.Hello, route: bytes, connection: int) -> None:
        peer = self._peers.get(hello.sender)
        if not self._open:
            self._refuse(route, "prefill is shutting down", retry=True)
        elif self._owner.decode_fenced(hello.sender):
            self._refuse(route, f"decode {hello.address} was fenced, and is paired no more: restart it", retry=False)
        elif peer is not None and not peer.present:
            self._refuse(route, "what you left behind is still being cleaned up", retry=True)
        elif peer is not None:
            self._rebind(peer, route, connection)
        else:
            self._pair(hello, route, connection)

    def _pair(self, hello: f.Hello, route: bytes, connection: int) -> None:
        try:
            version = negotiate(
                hello.oldest_version,
                hello.version,
                direction=self._direction,
                state=bool(self._memory.state),
                shares=bool(self._memory.state_ranks),
            )
            remote = decode_remote(hello.memory)
        except VersionMismatchError as error:
            self._refuse(route, str(error), retry=False)
            return
        except LayoutError as error:
            self._refuse(route, f"decode's memory is not valid: {error}", retry=False)
            return
        if (why := mismatch(self._backend, self._memory, remote)) is not None:
            self._refuse(route, why, retry=False)
            return
        self._replace(hello)
        if len(self._peers) >= MAX_PEERS:
            self._refuse(route, f"prefill has {MAX_PEERS} peers, which is its limit", retry=True)
            return
        worker, page_sum = self._owner.decode_met(hello, remote)
        peer = Peer(hello.sender, hello.address, version, route, connection, worker, page_sum, time.monotonic())
        self._peers[hello.sender] = peer
        self._bind(peer, route, connection)
        if worker is None:
            self.connected(hello.sender, None)

    def _replace(self, hello: f.Hello) -> None:
        """A new process at an address means that the old one there is no more."""
        for old in list(self._peers.values()):
            if old.address == hello.address and old.present:
                self.lose(old, f"decode {old.address} was replaced by process {hello.sender[:8]}")

    def _rebind(self, peer: Peer, route: bytes, connection: int) -> None:
        """The same process says hello again: its first answer was lost, or its connection."""
        self._bind(peer, route, connection)
        if peer.paired:
            self._owner.decode_paired(peer)

    def _bind(self, peer: Peer, route: bytes, connection: int) -> None:
        other = self._by_connection.get(connection)
        if other is not None and other is not peer and other.connection != connection:
            self._forget_route(other, route)
        elif other is not None and other is not peer:
            self.lose(other, f"the connection of decode {other.address} speaks for another process now")
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
            self._owner.decode_paired(peer)
            log.info("paired with decode %s (%s)", peer.address, incarnation)
        else:
            message = f"prefill's backend cannot reach the memory of decode {peer.address}: {error}"
            self._refuse(peer.route, message, retry=not isinstance(error, IncompatiblePeerError))
            self.lose(peer, message)

    def _refuse(self, route: bytes, reason: str, *, retry: bool) -> None:
        if not retry:
            self._drops.note("misfit", f"a decode is not paired: {reason}")
        told = f.HelloRefused(version=f.VERSION_MIN, sender=self._incarnation, reason=f.text(reason), retry=retry)
        self._owner.decode_told(route, told)

    # --- One goes ---

    def connection_ended(self, connection: int) -> None:
        """A connection to our control port is no more."""
        self._greetings.ended(connection)
        peer = self._by_connection.get(connection)
        if peer is None:
            return
        self._forget_route(peer, next(route for route, number in peer.routes.items() if number == connection))
        if peer.present and connection == peer.connection:
            for route in peer.routes:  # a process that lives says hello there once more
                self._refuse(route, "the connection by which you were answered has ended", retry=True)
            message = f"the connection of decode {peer.address} ended, and it did not come back"
            self._reactor.at(("grace", peer.incarnation), time.monotonic() + GRACE_S, partial(self.lose, peer, message))

    def lose(self, peer: Peer, message: str) -> None:
        """There is evidence that a peer is gone, or it has said goodbye."""
        peer.present = peer.paired = False
        self._reactor.cancel(("grace", peer.incarnation))
        for route in list(peer.routes):
            self._forget_route(peer, route)
        self._owner.decode_lost(peer, message)
        if peer.worker is not None:
            peer.worker.close()
        else:
            del self._peers[peer.incarnation]
        log.warning("%s", message)

    def part_with(self, incarnation: str, why: str) -> None:
        """A process has exited or was fenced (`why`): it is gone, whether that was noticed before or not."""
        known = self._peers.get(incarnation)
        if known is not None and known.present:
            self._say_goodbye(known, f"decode {why}; restart it")
            self.lose(known, f"decode {known.address} {why}")

    def worker_gone(self, incarnation: str) -> None:
        """Nothing writes to a peer any more."""
        peer = self._peers[incarnation]
        if peer.present:
            self._say_goodbye(peer, "the thread that writes to it has failed")
            self.lose(peer, f"the thread that writes to decode {peer.address} has failed")
        del self._peers[incarnation]

    def shut(self) -> None:
        """Let nobody in any more."""
        self._open = False

    def leave(self) -> None:
        """We go: say goodbye to all, and let workers end."""
        self.shut()
        for peer in self:
            self._say_goodbye(peer, "prefill is shutting down")
            peer.present = False
            if peer.worker is not None:
                peer.worker.close()

    def _say_goodbye(self, peer: Peer, reason: str) -> None:
        if peer.paired:
            bye = f.Goodbye(version=peer.version, sender=self._incarnation, reason=reason)
            self._owner.decode_told(peer.route, bye)

    def join(self, deadline: float) -> bool:
        """Wait for workers that were closed, until `deadline` on the monotonic clock; True when all have ended.

        From the thread that closes the connector.
        """
        return join_all([peer.worker for peer in list(self) if peer.worker is not None], deadline)


def mismatch(backend: str, memory: KVMemory, remote: RemoteMemory) -> str | None:
    """Why a prefill with this backend and memory cannot pair with a decode, every difference named; None if it can."""
    if remote.backend != backend:
        return f"backend is {backend!r} at prefill and {remote.backend!r} at decode"
    differences = compatible(memory, remote.memory)
    if bool(memory.state) != bool(remote.memory.state):
        # Each hand-off names as many state items on both sides, and a rank without state has none to name.
        counts = f"{len(memory.state)} regions at prefill and {len(remote.memory.state)} at decode"
        differences.append(f"state has {counts}, must have some on both sides or on neither")
    return "prefill will not pair, in its own words: " + "; ".join(differences) if differences else None
