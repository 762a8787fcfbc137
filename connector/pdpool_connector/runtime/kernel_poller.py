"""Polls the kernel's tables until they show an expected state, never on the owner thread."""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.reactor import Reactor

log = logging.getLogger(__name__)

Seen = TypeVar("Seen")


class _Wait(NamedTuple, Generic[Seen]):
    over: Callable[[Seen], bool]
    then: Callable[[], None]
    wanted: Callable[[], bool]


class KernelPoller(Generic[Seen]):
    """Owner thread only.

    Args:
        reactor: Gives timers and turns.
        submit: Runs a coroutine elsewhere.
        look: Reads the tables of process `pid`: slower than the owner thread may pause, and may raise OSError.
        timeouts: Pauses between two looks.
    """

    def __init__(
        self,
        reactor: Reactor,
        submit: Callable[[Coroutine[Any, Any, Seen]], "Future[Seen]"],
        look: Callable[[int], Seen],
        timeouts: Timeouts,
    ) -> None:
        self._first_s, self._max_s = timeouts.kernel_poll_first_s, timeouts.kernel_poll_max_s
        self._reactor, self._submit, self._read = reactor, submit, look
        self._under_way: set[str] = set()

    def begin(
        self,
        peer: str,
        over: Callable[[Seen], bool],
        then: Callable[[], None],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Call `then` once `over` returns True for what was seen; end without it once `wanted` returns False.

        One poll for each peer at a time: while one is under way, a second call does nothing.
        """
        if peer not in self._under_way:
            self._under_way.add(peer)
            self._look(peer, _Wait(over, then, wanted), self._first_s)

    def _look(self, peer: str, wait: _Wait[Seen], pause_s: float) -> None:
        seen = self._submit(asyncio.to_thread(self._read, os.getpid()))
        seen.add_done_callback(lambda done: self._reactor.post(partial(self._on_seen, peer, wait, pause_s, done)))

    def _on_seen(self, peer: str, wait: _Wait[Seen], pause_s: float, seen: "Future[Seen]") -> None:
        if seen.cancelled() or not wait.wanted():
            self._under_way.discard(peer)
        elif (error := seen.exception()) is None and wait.over(seen.result()):
            self._under_way.discard(peer)
            wait.then()
        else:
            if error is not None and pause_s < self._max_s:  # not once a second for good
                log.warning(
                    "cannot see which connections of peer %s are left: %s: %s", peer[:8], type(error).__name__, error
                )
            again = partial(self._look, peer, wait, min(2 * pause_s, self._max_s))
            self._reactor.at((self, peer), self._reactor.now() + pause_s, again)
