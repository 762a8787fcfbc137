"""Decode's memory of prefills that did not answer a short while ago. Requests do not wait long for them again.

A network fault between one prefill and one decode would otherwise cost each of their requests `connect_s`, while a
router has other pairs. The connection is still tried for these requests, and the try goes on after they have failed. So
a prefill that answers again is found however long that takes. Owner thread only.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from pdpool_connector.protocol.events import Unreachable
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.reactor import Reactor

MAX_PREFILLS: Final = 1024
"""Addresses come from requests, so there is a bound. What is beyond it is not remembered."""


class SilentPrefills:
    """See the module's docstring. `fail` ends what waits for a bootstrap address."""

    def __init__(self, reactor: Reactor, timeouts: Timeouts, fail: Callable[[Unreachable], None]) -> None:
        self._reactor, self._timeouts, self._fail = reactor, timeouts, fail
        self._known: dict[str, tuple[float, str]] = {}
        """When each was given up and why, by bootstrap address."""
        self._timed: set[str] = set()

    def __contains__(self, prefill: str) -> bool:
        """Whether it was given up within `silent_s`."""
        known = self._known.get(prefill)
        return known is not None and self._reactor.now() - known[0] < self._timeouts.silent_s

    def add(self, prefill: str, message: str) -> None:
        """It did not answer for `connect_s`."""
        self._known = {one: known for one, known in self._known.items() if one in self}
        if prefill in self._known or len(self._known) < MAX_PREFILLS:
            self._known[prefill] = self._reactor.now(), message

    def remove(self, prefill: str) -> None:
        """It is linked."""
        self._known.pop(prefill, None)
        self._timed.discard(prefill)
        self._reactor.cancel(("silent", prefill))

    def limit(self, prefill: str) -> None:
        """A request waits for it: for at most `connect_again_s` if it was silent."""
        if prefill in self and prefill not in self._timed:
            self._timed.add(prefill)
            due = self._reactor.now() + self._timeouts.connect_again_s
            self._reactor.at(("silent", prefill), due, partial(self._give_up, prefill, *self._known[prefill]))

    def _give_up(self, prefill: str, since: float, message: str) -> None:
        self._timed.discard(prefill)
        silent = (
            f"prefill {prefill} was given up {self._reactor.now() - since:.0f} s ago and is still silent: {message}"
        )
        self._fail(Unreachable(prefill, Cause.PEER_LOST, silent))
