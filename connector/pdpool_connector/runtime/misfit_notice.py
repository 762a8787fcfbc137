"""Informs a prefill rank that decode's hand-offs with it have failed because the two do not fit.

No attempt is ever opened with such a prefill, whose requests would wait for `match_s` otherwise. So decode connects to
the rank's control port, sends Hello, waits until that is refused, and sends an Abort for each attempt. Best effort:
nothing is repeated, and the connection closes when all are answered, or after `hello_s`. Owner thread only.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.transport.address import parse_address
from pdpool_connector.transport.bootstrap import RankInfo
from pdpool_connector.transport.control import ControlLink
from pdpool_connector.transport.curve import CurveKey
from pdpool_connector.transport.drops import Drops

log = logging.getLogger(__name__)


class MisfitNotice:
    """One connection to one rank. `closed` is called once. Raises OSError or zmq.ZMQError when no socket is left."""

    def __init__(
        self,
        info: RankInfo,
        hello: f.Hello,
        aborts: Sequence[f.Abort],
        *,
        reactor: Reactor,
        context: zmq.Context[Any],
        drops: Drops,
        key: CurveKey | None,
        timeouts: Timeouts,
        closed: Callable[["MisfitNotice"], None],
    ) -> None:
        self._peer, self._aborts, self._reactor, self._closed = info.incarnation, aborts, reactor, closed
        self._version = aborts[0].version
        self._unanswered = {abort.attempt for abort in aborts}
        self._open = True
        self._control = ControlLink(context, parse_address(info.control), drops, reactor, key, timeouts)
        reactor.watch(self._control.socket, self._on_frames)
        reactor.watch(self._control.monitor, self._on_monitor)
        reactor.at(("notice", self), reactor.now() + timeouts.hello_s, self.close)
        self._control.send(hello)

    def close(self) -> None:
        """Close. Idempotent."""
        if self._open:
            self._open = False
            self._reactor.cancel(("notice", self))
            self._reactor.unwatch(self._control.socket)
            self._reactor.unwatch(self._control.monitor)
            self._control.close()
            self._closed(self)

    def _on_frames(self) -> None:
        for frame in self._control.receive():
            if frame.sender == self._peer:
                self._on_frame(frame)
            if not self._open:
                return

    def _on_monitor(self) -> None:
        if self._open and self._control.ended():
            self.close()

    def _on_frame(self, frame: f.AnyFrame) -> None:
        if isinstance(frame, f.HelloOk | f.HelloRefused):
            for abort in self._aborts:
                self._control.send(abort)
        elif isinstance(frame, f.Ended) and frame.attempt in self._unanswered:
            self._unanswered.discard(frame.attempt)
            self._control.send(
                f.Ack(version=self._version, sender=frame.attempt.decode, attempt=frame.attempt, room=frame.room)
            )
            if not self._unanswered:
                self.close()
