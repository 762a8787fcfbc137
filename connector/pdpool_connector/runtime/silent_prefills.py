"""Decode's memory of prefills that do not answer: requests do not wait long for them, and the operator learns of it.

A network fault between one prefill and one decode would otherwise cost each of their requests `connect_s`, while a
router has other pairs. The connection is still tried for these requests, and the try goes on after they have failed.
Between requests it is tried every `silent_retry_s`, so that a prefill that answers again is found without a request.
Owner thread only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from pdpool_connector.protocol.events import Unreachable
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.runtime.stats import LinkStats

MAX_PREFILLS: Final = 1024
"""Addresses come from requests, so there is a bound. What is beyond it is not remembered."""
SILENT: Final = "silent"
"""State of a link in the statistics."""


@dataclass(slots=True)
class _Silence:
    """Since when a prefill is silent, when a request last wanted it, and how the last try failed."""

    since: float
    wanted: float
    message: str = ""
    limited: bool = False
    """Requests wait for it, and their time runs."""


class SilentPrefills:
    """See the module's docstring.

    Args:
        fail: Ends what waits for a bootstrap address.
        connect: Tries to connect to one, if it is not being tried.
    """

    def __init__(
        self,
        reactor: Reactor,
        timeouts: Timeouts,
        fail: Callable[[Unreachable], None],
        connect: Callable[[str], None],
    ) -> None:
        self._reactor, self._timeouts, self._fail, self._connect = reactor, timeouts, fail, connect
        self._known: dict[str, _Silence] = {}

    def on_failed(self, prefill: str, message: str, *, in_vain: bool) -> None:
        """A try has ended without an answer. `in_vain`: it has lasted for `connect_s`."""
        now, known = self._reactor.now(), self._known.get(prefill)
        if known is not None or (in_vain and len(self._known) < MAX_PREFILLS):
            self._known.setdefault(prefill, _Silence(now, now)).message = message
            self._wait(prefill)

    def remove(self, prefill: str) -> None:
        """It has answered, or its address refuses connections: its process has gone."""
        self._known.pop(prefill, None)
        for what in ("silent", "brief"):
            self._reactor.cancel((what, prefill))

    def limit(self, prefill: str) -> None:
        """A request waits for it: for at most `connect_again_s` if it is silent."""
        known, now = self._known.get(prefill), self._reactor.now()
        if known is None:
            return
        known.wanted = now
        if not known.limited:
            known.limited = True
            due = now + self._timeouts.connect_again_s
            self._reactor.at(("brief", prefill), due, partial(self._give_up, prefill))

    def stats(self, now: float) -> dict[str, LinkStats]:
        """Return the silent prefills by address, for `ConnectorStats`."""
        return {one: LinkStats(one, SILENT, (), known.message, now - known.since) for one, known in self._known.items()}

    def _give_up(self, prefill: str) -> None:
        known = self._known[prefill]
        known.limited = False
        silent_s = self._reactor.now() - known.since
        message = f"prefill {prefill} was given up {silent_s:.0f} s ago and is still silent: {known.message}"
        self._fail(Unreachable(prefill, Cause.PEER_LOST, message))

    def _wait(self, prefill: str) -> None:
        again = self._reactor.now() + self._timeouts.silent_retry_s
        self._reactor.at(("silent", prefill), again, partial(self._try_again, prefill))

    def _try_again(self, prefill: str) -> None:
        if self._reactor.now() - self._known[prefill].wanted >= self._timeouts.silent_s:
            self.remove(prefill)
            return
        self._wait(prefill)
        self._connect(prefill)
