"""Peers of the same host are fenced without anybody's help: the kernel tells when their process has ended."""

import logging
import os
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from pdpool_connector.layout.process import ProcessName, ancestors, has_ended, open_process
from pdpool_connector.protocol.fence import ConnectionsEnded, InsufficientProofError, ProcessExited, Proof, judge
from pdpool_connector.runtime.kernel_poller import KernelPoller
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.transport.sockets import Holder, other_ends

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""A connection that ended is evidence of death unless the same process is back within this time; and what a process had
said before its exit is heard within it."""

Fence = Callable[[str, tuple[Proof, ...]], None]
OutcomeLog = list[frozenset[Holder]]
"""Who holds the other end of each connection of ours."""


class _Watched(NamedTuple):
    process: ProcessName
    pidfd: int
    ancestors: frozenset[tuple[int, int]]
    """Asked at pairing: whose parent has exited is another's child."""


class ProcessWatch:
    """Waits for the end of peers' processes. Owner thread only.

    `lost(peer)` is called when one has ended, `GRACE_S` later: what it had said is heard first. `fence(peer, proofs)`
    is called once the proofs suffice: instead of `lost` where the end alone does, for its connections may carry words
    yet; with the end of all of them, at once.
    `backend`, `sending`: see `fence.judge`. `submit`: runs a coroutine elsewhere; a look at the kernel's tables takes
    longer than the owner thread may pause. `wanted`: whether anything is, or may come to be, between us and a peer. One
    that cannot be watched from here is left to whoever can.
    """

    def __init__(
        self,
        backend: str,
        *,
        sending: bool,
        who: str,
        reactor: Reactor,
        submit: Callable[[Coroutine[Any, Any, OutcomeLog]], "Future[OutcomeLog]"],
        lost: Callable[[str], None],
        fence: Fence,
        wanted: Callable[[str], bool],
    ) -> None:
        self._backend, self._sending, self._who = backend, sending, who
        self._reactor, self._lost, self._fence, self._wanted = reactor, lost, fence, wanted
        self._ends = KernelPoller(reactor, submit, other_ends)
        self._watched: dict[str, _Watched] = {}

    def watch(self, peer: str, process: ProcessName | None) -> None:
        """A peer is paired. Asking again does no harm."""
        if process is None or peer in self._watched or (pidfd := open_process(process)) is None:
            return
        self._watched[peer] = _Watched(process, pidfd, ancestors(process.pid))
        self._reactor.watch(pidfd, partial(self._on_exit, peer))

    def tidy(self) -> None:
        """Watch those no longer with whom nothing is any more."""
        for peer in [peer for peer in self._watched if not self._wanted(peer)]:
            self._forget(peer)

    def close(self) -> None:
        """Watch no longer."""
        for peer in list(self._watched):
            self._forget(peer)

    def _forget(self, peer: str) -> ProcessName:
        watched = self._watched.pop(peer)
        self._reactor.unwatch(watched.pidfd)
        os.close(watched.pidfd)
        return watched.process

    def _on_exit(self, peer: str) -> None:
        if not has_ended(self._watched[peer].pidfd):
            return  # the news was of another descriptor, closed in this turn, that had the number before
        process = self._forget(peer)
        at_last = partial(self._lost, peer)
        exited = ProcessExited(pid=process.pid, seen_by=self._who)
        try:
            judge(self._backend, (exited,), sending=self._sending)
        except InsufficientProofError:
            proofs = (exited, ConnectionsEnded(seen_by=self._who))
            conclude = partial(self._conclude, peer, proofs)
            self._ends.begin(peer, partial(self._are_others, process), conclude, partial(self._wanted, peer))
        else:
            at_last = partial(self._fence, peer, (exited,))
        self._reactor.at((self, peer), time.monotonic() + GRACE_S, at_last)

    def _are_others(self, exited: ProcessName, ends: OutcomeLog) -> bool:
        """Whether no connection of ours can be one of the exited process, or of a helper that it had forked.

        Who holds its other end must be a peer that lives and was not forked off either, or have begun before the one
        that has exited.
        """
        living = {
            Holder(watched.process.pid, watched.process.started)
            for watched in self._watched.values()
            if (exited.pid, exited.started) not in watched.ancestors
        }
        return all(
            holders and all(holder in living or holder.started < exited.started for holder in holders)
            for holders in ends
        )

    def _conclude(self, peer: str, proofs: tuple[Proof, ...]) -> None:
        try:
            judge(self._backend, proofs)
        except InsufficientProofError as error:
            log.warning("peer %s has exited, which is no fence: %s", peer[:8], error)
        else:
            self._fence(peer, proofs)
