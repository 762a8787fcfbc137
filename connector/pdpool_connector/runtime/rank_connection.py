"""One control connection of decode's to one prefill rank, until it ends. It is never repaired, but replaced.

Owner thread only.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import zmq

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.reactor import Call, Reactor
from pdpool_connector.transport.address import parse_address
from pdpool_connector.transport.bootstrap import RankInfo
from pdpool_connector.transport.control import BATCH, ControlLink
from pdpool_connector.transport.curve import CurveKey
from pdpool_connector.transport.drops import Drops


class RankConnectionOwner(Protocol):
    """What a rank connection reports. Of the three ends one comes, once; the connection is closed by then."""

    def on_rank_paired(self, peer: str) -> None:
        """The rank has our memory."""

    def on_rank_frame(self, frame: f.AttemptFrame) -> None:
        """A frame about an attempt came from the paired rank."""

    def on_rank_ended(self, peer: str, message: str, *, paired: bool) -> None:
        """The connection ended, Hello was not answered, or the rank does not know us any more."""

    def on_rank_refused(self, peer: str, message: str, *, retry: bool) -> None:
        """The rank will not pair, for good or for now."""

    def on_rank_left(self, peer: str, message: str) -> None:
        """The rank has sent Goodbye."""


class RankConnection:
    """See the module's docstring. `name`: of the rank, for messages. `hello`: what we pair with."""

    def __init__(
        self,
        info: RankInfo,
        name: str,
        hello: f.Hello,
        owner: RankConnectionOwner,
        *,
        filtered: Callable[[f.Frame, Call], None],
        reactor: Reactor,
        context: zmq.Context[Any],
        drops: Drops,
        key: CurveKey | None,
        timeouts: Timeouts,
    ) -> None:
        self.peer = info.incarnation
        self.control = info.control
        self.paired = False
        self.version = f.VERSION_MIN
        self.memory = b""
        """What the rank has registered (`RemoteMemory`), once it is paired."""
        self.last_seen = reactor.now()
        self._name, self._owner, self._reactor, self._drops = name, owner, reactor, drops
        self._open = True
        self._secured = key is not None
        self._hello_s = timeouts.hello_s
        self._control = ControlLink(context, parse_address(info.control), drops, reactor, key, timeouts)
        reactor.watch(self._control.socket, self._on_frames)
        reactor.watch(self._control.monitor, self._on_monitor)
        filtered(hello, partial(self._greet, hello))
        reactor.at(("hello", self), reactor.now() + timeouts.hello_s, self._on_hello_over)

    def send(self, frame: f.Frame) -> None:
        """Queue a frame."""
        self._control.send(frame)

    def close(self) -> None:
        """Close without a report. Idempotent."""
        if self._open:
            self._open = self.paired = False
            self._reactor.cancel(("hello", self))
            self._reactor.unwatch(self._control.socket)
            self._reactor.unwatch(self._control.monitor)
            self._control.close()

    def _greet(self, hello: f.Hello) -> None:
        if self._open:
            self._control.send(hello)

    def _on_hello_over(self) -> None:
        keys = ", or has other CURVE keys" if self._secured else ""
        self._end(f"{self._name} did not answer Hello within {self._hello_s:g} s{keys}")

    def _on_frames(self) -> None:
        self._receive()

    def _receive(self) -> int:
        received = 0
        for frame in self._control.receive():
            received += 1
            self._on_frame(frame)
            if not self._open:
                break
        return received

    def _on_monitor(self) -> None:
        """The connection may have ended. Frames that arrived before are read first, in this turn or the next."""
        if self._receive() < BATCH and self._open and self._control.ended():
            when = "" if self.paired else " before it was paired (do both sides have the same CURVE keys, or none?)"
            self._end(f"the control connection to {self._name} ended{when}")

    def _on_frame(self, frame: f.AnyFrame) -> None:
        self.last_seen = self._reactor.now()
        if frame.sender != self.peer:
            self._drops.note("stranger", f"{type(frame).__name__} from {frame.sender[:8]}, not from {self._name}")
        elif isinstance(frame, f.HelloOk):
            self._on_hello_ok(frame)
        elif isinstance(frame, f.HelloRefused):
            self._on_hello_refused(frame)
        elif isinstance(frame, f.Goodbye):
            self.close()
            self._owner.on_rank_left(self.peer, f"{self._name} has closed its connector: {f.text(frame.reason)}")
        elif isinstance(frame, f.AttemptFrame) and self.paired:
            self._owner.on_rank_frame(frame)
        else:
            self._drops.note("direction", f"{type(frame).__name__} is not for decode now")

    def _on_hello_ok(self, frame: f.HelloOk) -> None:
        if not self.paired:
            self.paired, self.version, self.memory = True, frame.version, frame.memory
            self._reactor.cancel(("hello", self))
            self._owner.on_rank_paired(self.peer)

    def _on_hello_refused(self, frame: f.HelloRefused) -> None:
        message = f"{self._name} refused to pair: {f.text(frame.reason)}"
        if self.paired and frame.retry:
            self._end(message)  # it does not know us any more, and may pair again at once
        else:
            self.close()
            self._owner.on_rank_refused(self.peer, message, retry=frame.retry)

    def _end(self, message: str) -> None:
        paired = self.paired
        self.close()
        self._owner.on_rank_ended(self.peer, message, paired=paired)
