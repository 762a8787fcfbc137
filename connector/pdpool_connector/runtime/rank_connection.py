"""One control connection of decode's to one prefill rank, from connecting to its end. It is never mended, but replaced.

Owner thread only.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import zmq

from pdpool_connector.protocol import frames as f
from pdpool_connector.runtime.reactor import Call, Reactor
from pdpool_connector.transport.address import parse_address
from pdpool_connector.transport.bootstrap import RankInfo
from pdpool_connector.transport.control import BATCH, ControlLink
from pdpool_connector.transport.curve import CurveKey
from pdpool_connector.transport.drops import Drops

HELLO_S = 3.0
"""Time from hello to an answer before both are tried anew; prefill's engine connects meanwhile, and goes on with it."""


class RankConnectionOwner(Protocol):
    """What a line tells its instance link. Each of the three ends comes once, and the line is closed by then."""

    def line_paired(self, peer: str) -> None:
        """The rank has our memory."""

    def line_frame(self, frame: f.AttemptFrame) -> None:
        """The paired rank said something about an attempt."""

    def line_ended(self, peer: str, message: str, *, paired: bool) -> None:
        """The connection ended, before or after it was paired, hello was not answered, or the rank has forgotten us."""

    def line_refused(self, peer: str, message: str, *, retry: bool) -> None:
        """The rank will not pair, for good or for now."""

    def line_left(self, peer: str, message: str) -> None:
        """The rank has said goodbye."""


class RankConnection:
    """See the module's docstring. `name` is for messages; `hello` is what to pair with."""

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
    ) -> None:
        self.peer = info.incarnation
        self.control = info.control
        self.paired = False
        self.version = f.VERSION_MIN
        self.memory = b""
        """What the rank has registered (`RemoteMemory`), once it is paired."""
        self.last_seen = time.monotonic()
        self._name, self._owner, self._reactor, self._drops = name, owner, reactor, drops
        self._open = True
        self._secured = key is not None
        self._control = ControlLink(context, parse_address(info.control), drops, reactor, key)
        reactor.watch(self._control.socket, self._on_frames)
        reactor.watch(self._control.monitor, self._on_monitor)
        filtered(hello, partial(self._greet, hello))
        reactor.at(("hello", self), time.monotonic() + HELLO_S, self._on_hello_over)

    def send(self, frame: f.Frame) -> None:
        """Queue a frame."""
        self._control.send(frame)

    def close(self) -> None:
        """Close; nothing is told of it. Idempotent."""
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
        self._end(f"{self._name} did not answer hello within {HELLO_S} s{keys}")

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
        """The connection may have ended. What arrived before counts, so it is heard first, in this turn or the next."""
        if self._receive() < BATCH and self._open and self._control.ended():
            when = "" if self.paired else " before it was paired (do both sides have the same CURVE keys, or none?)"
            self._end(f"the control connection to {self._name} ended{when}")

    def _on_frame(self, frame: f.AnyFrame) -> None:
        self.last_seen = time.monotonic()
        if frame.sender != self.peer:
            self._drops.note("stranger", f"{type(frame).__name__} from {frame.sender[:8]}, not from {self._name}")
        elif isinstance(frame, f.HelloOk):
            self._on_welcome(frame)
        elif isinstance(frame, f.HelloRefused):
            self._on_refusal(frame)
        elif isinstance(frame, f.Goodbye):
            self.close()
            self._owner.line_left(self.peer, f"{self._name} says goodbye: {f.text(frame.reason)}")
        elif isinstance(frame, f.AttemptFrame) and self.paired:
            self._owner.line_frame(frame)
        else:
            self._drops.note("direction", f"{type(frame).__name__} is not for decode now")

    def _on_welcome(self, frame: f.HelloOk) -> None:
        if not self.paired:
            self.paired, self.version, self.memory = True, frame.version, frame.memory
            self._reactor.cancel(("hello", self))
            self._owner.line_paired(self.peer)

    def _on_refusal(self, frame: f.HelloRefused) -> None:
        message = f"{self._name} refused to pair: {f.text(frame.reason)}"
        if self.paired and frame.retry:
            self._end(message)  # it has forgotten us, and may know us again at once
        else:
            self.close()
            self._owner.line_refused(self.peer, message, retry=frame.retry)

    def _end(self, message: str) -> None:
        paired = self.paired
        self.close()
        self._owner.line_ended(self.peer, message, paired=paired)
