"""Peers of the same host are fenced without anybody's help: the kernel tells when their process has ended."""

import logging
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any

from pdpool_connector.layout.process import ProcessName, open_process
from pdpool_connector.protocol.fence import ConnectionsEnded, InsufficientProofError, ProcessExited, Proof, judge
from pdpool_connector.runtime.looks import Looks
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.transport.sockets import ownerless_connections

log = logging.getLogger(__name__)


class ExitWatch:
    """Waits for the end of peers' processes and calls `fence(peer, proofs)` once the proofs suffice. Owner thread only.

    `engine`, `sending`: see `fence.judge`. `submit`: runs a coroutine elsewhere; a look at the kernel's tables takes
    longer than the owner thread may pause. A peer that cannot be watched from here is left to whoever can.
    """

    def __init__(
        self,
        engine: str,
        *,
        sending: bool,
        who: str,
        reactor: Reactor,
        submit: Callable[[Coroutine[Any, Any, int]], "Future[int]"],
        fence: Callable[[str, tuple[Proof, ...]], None],
    ) -> None:
        self._engine, self._sending, self._who = engine, sending, who
        self._reactor, self._fence = reactor, fence
        self._ownerless = Looks(reactor, submit, ownerless_connections)
        self._pidfds: dict[str, int] = {}

    def watch(self, peer: str, process: ProcessName | None) -> None:
        """A peer is paired. Asking again does no harm."""
        if process is None or peer in self._pidfds or (pidfd := open_process(process)) is None:
            return
        self._pidfds[peer] = pidfd
        self._reactor.watch(pidfd, partial(self._on_exit, peer, process.pid))

    def close(self) -> None:
        """Watch no longer."""
        for peer in list(self._pidfds):
            self._forget(peer)

    def _forget(self, peer: str) -> None:
        pidfd = self._pidfds.pop(peer)
        self._reactor.unwatch(pidfd)
        os.close(pidfd)

    def _on_exit(self, peer: str, pid: int) -> None:
        self._forget(peer)
        exited = ProcessExited(pid=pid, seen_by=self._who)
        try:
            judge(self._engine, (exited,), sending=self._sending)
        except InsufficientProofError:
            proofs = (exited, ConnectionsEnded(seen_by=self._who))
            self._ownerless.begin(peer, lambda count: count == 0, partial(self._conclude, peer, proofs))
        else:
            self._fence(peer, (exited,))

    def _conclude(self, peer: str, proofs: tuple[Proof, ...]) -> None:
        try:
            judge(self._engine, proofs)
        except InsufficientProofError as error:
            log.warning("peer %s has exited, which is no fence: %s", peer[:8], error)
        else:
            self._fence(peer, proofs)
