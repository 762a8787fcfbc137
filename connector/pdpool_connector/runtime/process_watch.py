"""Fences peers of the same host without help: the kernel reports the end of their process."""

import logging
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from pdpool_connector.layout.process import ProcessName, ancestors, has_ended, open_process
from pdpool_connector.protocol.fence import ConnectionsEnded, InsufficientProofError, ProcessExited, Proof, judge
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.kernel_poller import KernelPoller
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.transport.sockets import Holder, other_ends

log = logging.getLogger(__name__)

Fence = Callable[[str, tuple[Proof, ...]], None]
Holders = list[frozenset[Holder]]
"""The processes that hold the other end of each of our connections."""


class _Watched(NamedTuple):
    process: ProcessName
    pidfd: int
    ancestors: frozenset[tuple[int, int]]
    """Asked at pairing: whose parent has exited is another's child."""


class ProcessWatch:
    """Waits for the end of peers' processes. Owner thread only.

    Args:
        backend, sending: See `fence.judge`.
        submit: Runs a coroutine elsewhere: reading the kernel's tables takes longer than the owner thread may pause.
        lost: Called when a process has ended, `lost_grace_s` later, so that its last frames are read first.
        fence: Called as soon as the proofs suffice: `lost_grace_s` after the exit if that alone is proof, otherwise
            when all its connections have closed.
        wanted: Whether a peer has current or possible hand-offs with us.
    """

    def __init__(
        self,
        backend: str,
        *,
        sending: bool,
        who: str,
        reactor: Reactor,
        submit: Callable[[Coroutine[Any, Any, Holders]], "Future[Holders]"],
        lost: Callable[[str], None],
        fence: Fence,
        wanted: Callable[[str], bool],
        timeouts: Timeouts,
    ) -> None:
        self._grace_s = timeouts.lost_grace_s
        self._backend, self._sending, self._who = backend, sending, who
        self._reactor, self._lost, self._fence, self._wanted = reactor, lost, fence, wanted
        self._ends = KernelPoller(reactor, submit, other_ends, timeouts)
        self._watched: dict[str, _Watched] = {}

    def watch(self, peer: str, process: ProcessName | None) -> None:
        """A peer is paired. Asking again does no harm."""
        if process is None or peer in self._watched or (pidfd := open_process(process)) is None:
            return
        self._watched[peer] = _Watched(process, pidfd, ancestors(process.pid))
        self._reactor.watch(pidfd, partial(self._on_exit, peer))

    def tidy(self) -> None:
        """Stop watching peers that have no current or possible hand-offs with us."""
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
        self._reactor.at((self, peer), self._reactor.now() + self._grace_s, at_last)

    def _are_others(self, exited: ProcessName, ends: Holders) -> bool:
        """Whether no connection of ours can be one of the exited process, or of a helper that it had forked.

        The holder of a connection's other end must meet one of two conditions. It is a living peer that the exited
        process has not forked. Or it was started before the exited process.
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
