"""Informs a prefill rank that decode's hand-offs with it have failed because the two do not fit.

No attempt is ever opened with such a prefill, whose requests would wait for `match_s` otherwise. So decode connects to
the rank's control port, sends Hello, waits until that is refused, and sends an Abort for each attempt. Best effort:
nothing is repeated, and the connection closes when all are answered, or after `hello_s`. Owner thread only.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.attempt import DecodeAttempt
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.versions import readable
from pdpool_connector.runtime.instance_connection import MisfitRank
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.transport.address import parse_address
from pdpool_connector.transport.bootstrap import RankInfo
from pdpool_connector.transport.control import ControlLink
from pdpool_connector.transport.curve import CurveKey
from pdpool_connector.transport.drops import Drops

MAX_NOTICES: Final = 64
"""Connections at a time to prefill ranks that do not fit; each has a socket for some milliseconds."""


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


class MisfitNotices:
    """The connections under way, at most `MAX_NOTICES`."""

    def __init__(self, reactor: Reactor, context: zmq.Context[Any], drops: Drops, timeouts: Timeouts) -> None:
        self._reactor, self._context, self._drops, self._timeouts = reactor, context, drops, timeouts
        self._notices: set[MisfitNotice] = set()

    @property
    def room(self) -> int:
        """How many more there may be."""
        return MAX_NOTICES - len(self._notices)

    def add(self, misfit: MisfitRank, failed: Sequence[DecodeAttempt], hello: f.Hello, key: CurveKey | None) -> None:
        """Send a rank that does not fit an Abort for each failed attempt, with the values that differ.

        Raises:
            OSError, zmq.ZMQError: No socket is left.
        """
        notice = MisfitNotice(
            misfit.info,
            hello,
            [_abort(misfit, attempt) for attempt in failed],
            reactor=self._reactor,
            context=self._context,
            drops=self._drops,
            key=key,
            timeouts=self._timeouts,
            closed=self._notices.discard,
        )
        self._notices.add(notice)

    def close(self) -> None:
        """Close all connections."""
        for notice in list(self._notices):
            notice.close()


def _abort(misfit: MisfitRank, attempt: DecodeAttempt) -> f.Abort:
    return f.Abort(
        version=readable(*misfit.info.protocol),
        sender=attempt.attempt.decode,
        attempt=attempt.attempt,
        room=attempt.room,
        request_id=attempt.params.request_id,
        rank_index=misfit.rank_index,
        rank_count=misfit.rank_count,
        prompt=attempt.params.prompt,
        cause=attempt.cause or Cause.INVALID,
        message=attempt.message,
    )
