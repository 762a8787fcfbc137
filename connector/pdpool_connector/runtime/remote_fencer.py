"""Completes an external proof that a peer is dead: only we can see that our TCP connections to it have closed.

Peers of other hosts cannot be watched from here. The operator reports that their containers have ended. Over TCP that
is no proof until everything that they had sent was read (docs/holds.md).
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from pdpool_connector.layout.process import ProcessName
from pdpool_connector.protocol.fence import ConnectionsEnded, InsufficientProofError, Proof, judge
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.kernel_poller import KernelPoller
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.transport.sockets import Connection, connections, leading_to

log = logging.getLogger(__name__)

Table = frozenset[Connection]


class RemoteFencer:
    """Knows where peers run, and fences one once the external proofs and the end of its connections suffice.

    `check` and `before_pairing` are for any thread, the rest is for the owner thread.

    Args:
        backend, sending: See `fence.judge`.
        submit: Runs a coroutine elsewhere: reading the kernel's tables takes longer than the owner thread may pause.
        fence: Called with a peer and its proofs once they suffice.
        owed: Whether pages are held for a peer until there is proof.
        here: This process, as its peers receive it.
    """

    def __init__(
        self,
        backend: str,
        *,
        sending: bool,
        who: str,
        reactor: Reactor,
        submit: Callable[[Coroutine[Any, Any, Table]], "Future[Table]"],
        fence: Callable[[str, tuple[Proof, ...]], None],
        owed: Callable[[str], bool],
        here: ProcessName,
        timeouts: Timeouts,
    ) -> None:
        self._backend, self._sending = backend, sending
        self._seen_here = ConnectionsEnded(seen_by=who)
        self._reactor, self._fence, self._owed = reactor, fence, owed
        self._connections = KernelPoller(reactor, submit, connections, timeouts)
        self._here = here
        self._peers: dict[str, ProcessName] = {}
        self._controls: dict[str, str] = {}
        self._frozen: dict[str, Table] = {}

    @property
    def peers(self) -> Mapping[str, ProcessName]:
        """Where each peer runs, as it said at pairing."""
        return self._peers

    def note(self, peer: str, control: str, process: ProcessName | None) -> None:
        """A peer is paired, at this control address. Asking again does no harm."""
        if process is not None:
            self._peers[peer] = process
            self._controls[peer] = control

    def keep(self, peers: Iterable[str]) -> None:
        """Forget all but these."""
        for peer in self._peers.keys() - set(peers):
            del self._peers[peer], self._controls[peer]
            self._frozen.pop(peer, None)

    def check(self, peer: str, proofs: Sequence[Proof]) -> None:
        """Raise InsufficientProofError unless `proofs` suffice, or will together with what we can see ourselves."""
        try:
            judge(self._backend, proofs, sending=self._sending)
        except InsufficientProofError:
            if proofs and self._addresses(peer):
                with contextlib.suppress(InsufficientProofError):  # which would name what the caller has not given
                    return judge(self._backend, (*proofs, self._seen_here), sending=self._sending)
            raise

    def take(self, peer: str, proofs: tuple[Proof, ...]) -> None:
        """Fence the peer: at once, or when the connections that it had to us have ended, or nothing waits for that."""
        try:
            judge(self._backend, proofs, sending=self._sending)
        except InsufficientProofError:
            self._connections.begin(peer, partial(self._suffices, peer), partial(self._conclude, peer, proofs))
        else:
            self._fence(peer, proofs)

    async def before_pairing(self, newcomers: Mapping[str, str]) -> None:
        """Note which connections there are before processes that listen where former ones did make theirs.

        newcomers: control address by incarnation. Without this the connections of a process look the same as
        those of its successor in the same pod.
        """
        taken = set(newcomers.values())
        former = [
            peer
            for peer, control in tuple(self._controls.items())
            if control in taken and peer not in newcomers and peer not in self._frozen
        ]
        if former:
            table = await asyncio.to_thread(connections, os.getpid())
            self._reactor.post(partial(self._freeze, former, table))

    def _freeze(self, peers: Sequence[str], table: Table) -> None:
        for peer in peers:
            if peer in self._peers:
                self._frozen.setdefault(peer, table)

    def _addresses(self, peer: str) -> frozenset[str]:
        process = self._peers.get(peer)
        return process.addresses_seen_by(self._here) if process is not None else frozenset()

    def _suffices(self, peer: str, table: Table) -> bool:
        """Whether no connection is there that may be the peer's, or none would matter."""
        addresses = self._addresses(peer)
        has_left = bool(addresses) and not leading_to(addresses, table & self._frozen.get(peer, table))
        return has_left or not self._owed(peer)

    def _conclude(self, peer: str, proofs: tuple[Proof, ...]) -> None:
        # A peer that is owed nothing was not looked for, but is to begin nothing either.
        self._fence(peer, (*proofs, self._seen_here) if self._owed(peer) else proofs)
