"""Queues the Hellos that prefill has still to check: any process may send one, and hand-offs must not wait for that."""

import time
from collections.abc import Callable
from typing import Protocol

from pdpool_connector.protocol.frames import Hello
from pdpool_connector.transport.drops import Drops

SHARE = 0.25
"""Share of the owner thread's time for Hellos. The largest legal one takes 16 ms of it, a common one 0.5."""
MAX_WAITING = 256
"""As many as prefill has peers; the largest are left out, and their senders try again."""

Judge = Callable[[Hello, bytes, int], None]


class Turns(Protocol):
    """The owner's timers."""

    def at(self, key: str, when: float, call: Callable[[], None]) -> None:
        """Call at `when` on the clock."""


class HelloQueue:
    """One Hello waits for each connection, its last. The smallest is checked first: large ones delay no other.

    `judge` is called with the Hello, the route and the number of its connection. It is called at once while Hellos have
    not used up their share of the time. Owner thread only.
    """

    def __init__(self, judge: Judge, turns: Turns, drops: Drops, clock: Callable[[], float] = time.monotonic) -> None:
        self._judge, self._turns, self._drops, self._clock = judge, turns, drops, clock
        self._waiting: dict[int, tuple[Hello, bytes]] = {}
        self._free_at = 0.0

    def add(self, hello: Hello, route: bytes, connection: int) -> None:
        """Add a Hello."""
        if connection not in self._waiting and len(self._waiting) >= MAX_WAITING:
            self._drops.note("hello", f"{MAX_WAITING} others wait already")
            largest = max(self._waiting, key=self._size)
            if self._size(largest) <= len(hello.memory):
                return
            del self._waiting[largest]
        self._waiting[connection] = (hello, route)
        if len(self._waiting) == 1:
            self._go_on()

    def ended(self, connection: int) -> None:
        """The connection has ended: its Hello is forgotten."""
        self._waiting.pop(connection, None)

    def _go_on(self) -> None:
        if not self._waiting:
            return
        begun = self._clock()
        if begun < self._free_at:
            self._turns.at("hellos", self._free_at, self._go_on)
            return
        connection = min(self._waiting, key=self._size)
        hello, route = self._waiting.pop(connection)
        try:
            self._judge(hello, route, connection)
        finally:
            spent = self._clock() - begun
            self._free_at = begun + spent / SHARE
            self._turns.at("hellos", self._free_at, self._go_on)

    def _size(self, connection: int) -> int:
        return len(self._waiting[connection][0].memory)
