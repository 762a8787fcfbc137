"""Decode's connection to one prefill, from bootstrap address to paired process, and again when it ends.

A link asks the bootstrap registry (on a worker thread), connects to the control port, says hello, and is paired when
prefill has answered. When the connection ends it starts over at once: the same process answering means that nothing was
lost; another one, or none within the grace, is evidence that the old one is gone. Owner thread only.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import Any, Protocol

import zmq

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.outcome import Cause
from pdpool_connector.runtime.reactor import Call, Reactor
from pdpool_connector.transport.address import parse_address
from pdpool_connector.transport.bootstrap import BootstrapError, BootstrapInfo, ask_bootstrap
from pdpool_connector.transport.control import BATCH, ControlLink
from pdpool_connector.transport.drops import Drops

log = logging.getLogger(__name__)

ASK_S = 2.0
"""Time for one question to a bootstrap registry."""
HELLO_S = 3.0
"""Time from hello to an answer before both are tried anew; prefill's engine connects meanwhile, and goes on with it."""
GRACE_S = 1.0
"""A connection that ended is evidence of death unless the same process answers again within this time."""
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
OWED_S = 10.0
"""Pause between attempts to hear again of a process whose silence holds pages back; there is no end to these."""


class LinkOwner(Protocol):
    """What a link tells its connector."""

    def link_paired(self, link: "Link", peer: str, version: int) -> None:
        """`peer` is at the other end and has our memory."""

    def link_lost(self, link: "Link", peer: str, message: str) -> None:
        """There is evidence that the process that was paired is gone."""

    def link_failed(self, link: "Link", cause: Cause, message: str) -> None:
        """The address could not be paired; the link is closed, or, while it is owed something, tries on slowly."""

    def link_frame(self, link: "Link", frame: f.AttemptFrame) -> None:
        """The paired process said something about an attempt."""

    def link_wanted(self, link: "Link") -> bool:
        """True while attempts wait for this address."""

    def link_owed(self, link: "Link") -> bool:
        """True while pages are held that only a word of the process there can free."""


class Stage(Enum):
    """How far a link has come."""

    ASKING = "asking"
    GREETING = "greeting"
    PAIRED = "paired"
    PAUSING = "pausing"
    CLOSED = "closed"


class Link:
    """See the module's docstring."""

    def __init__(
        self,
        prefill: str,
        hello: Callable[[], f.Hello],
        owner: LinkOwner,
        *,
        filtered: Callable[[f.Frame, Call], None],
        reactor: Reactor,
        context: zmq.Context[Any],
        pool: ThreadPoolExecutor,
        drops: Drops,
        networks: tuple[str, ...],
        connect_s: float,
    ) -> None:
        self.prefill = prefill
        self.stage = Stage.PAUSING
        self.peer: str | None = None
        self.version = f.VERSION_MIN
        self.last_seen = time.monotonic()
        self.control = ""
        self._filtered = filtered
        self._hello, self._owner, self._reactor, self._context = hello, owner, reactor, context
        self._pool, self._drops, self._networks, self._connect_s = pool, drops, networks, connect_s
        self._control: ControlLink | None = None
        self._expected: str | None = None
        self._backoff = BACKOFF_FIRST_S
        self._slow = False
        self._give_up = time.monotonic() + connect_s
        self._ask()

    def hurry(self) -> None:
        """Somebody waits for it again: do not sit out the long pause between attempts to hear of a lost process."""
        if self._slow and self.stage is Stage.PAUSING:
            self._slow = False
            self._backoff = BACKOFF_FIRST_S
            self._give_up = time.monotonic() + self._connect_s
            self._reactor.cancel(("pause", self))
            self._ask()

    def send(self, frame: f.Frame) -> None:
        """Send to the paired process; dropped and counted when there is none."""
        if self._control is None:
            self._drops.note("unsent", f"{type(frame).__name__}: no connection to {self.prefill}")
        else:
            self._control.send(frame)

    def close(self) -> None:
        """Close for good."""
        self.stage = Stage.CLOSED
        for timer in ("pause", "hello", "grace"):
            self._reactor.cancel((timer, self))
        self._disconnect()

    def _ask(self) -> None:
        self.stage = Stage.ASKING
        future = self._pool.submit(ask_bootstrap, self.prefill, self._networks, ASK_S)
        future.add_done_callback(lambda done: self._reactor.post(partial(self._on_answer, done)))

    def _on_answer(self, answer: "Future[BootstrapInfo]") -> None:
        if self.stage is not Stage.ASKING or answer.cancelled():
            return
        error = answer.exception()
        if isinstance(error, BootstrapError):
            self._again(str(error), final=Cause.REFUSED if error.final else None)
        elif error is not None:
            self._again(f"bootstrap {self.prefill}: {type(error).__name__}: {error}")
        else:
            self._connect(answer.result())

    def _connect(self, info: BootstrapInfo) -> None:
        oldest, newest = info.protocol
        if newest < f.VERSION_MIN or oldest > f.VERSION_MAX:
            ours = f"{f.VERSION_MIN}..{f.VERSION_MAX}"
            self._fail(Cause.INVALID, f"protocol version is {oldest}..{newest} at prefill and {ours} at decode")
            return
        if len(info.ranks) != 1:
            self._fail(Cause.INVALID, f"prefill {self.prefill} has {len(info.ranks)} ranks; this version speaks to one")
            return
        if self.peer is not None and self.peer != info.incarnation:
            self._lose(f"prefill {self.prefill} was restarted")
        self._expected = info.incarnation
        self.stage = Stage.GREETING
        self.control = info.ranks[0].control
        self._control = ControlLink(self._context, parse_address(self.control), self._drops)
        self._reactor.watch(self._control.socket, self._on_readable)
        self._reactor.watch(self._control.monitor, self._on_readable)
        hello = self._hello()
        self._filtered(hello, partial(self._greet, hello, self._control))
        self._reactor.at(("hello", self), time.monotonic() + HELLO_S, self._on_hello_over)

    def _greet(self, hello: f.Hello, control: ControlLink) -> None:
        if self._control is control:
            control.send(hello)

    def _on_hello_over(self) -> None:
        self._disconnect()
        self._again(f"prefill {self.prefill} did not answer hello within {HELLO_S} s")

    def _on_readable(self) -> None:
        control = self._control
        if control is None:
            return
        received = 0
        for frame in control.receive():
            received += 1
            self._on_frame(frame)
            if self._control is not control:
                return
        if received < BATCH and control.ended():
            self._on_ended()

    def _on_frame(self, frame: f.AnyFrame) -> None:
        self.last_seen = time.monotonic()
        if frame.sender != self._expected:
            self._drops.note("stranger", f"{type(frame).__name__} from {frame.sender[:8]}, not from {self.prefill}")
        elif isinstance(frame, f.HelloOk):
            self._on_welcome(frame)
        elif isinstance(frame, f.HelloRefused):
            self._disconnect()
            final = None if frame.retry else Cause.INVALID
            self._again(f"prefill {self.prefill} refused to pair: {frame.reason}", final=final)
        elif isinstance(frame, f.Goodbye):
            self._disconnect()
            self._lose(f"prefill {self.prefill} has shut down: {frame.reason}")
            self._again(f"prefill {self.prefill} has shut down")
        elif isinstance(frame, f.AttemptFrame) and self.stage is Stage.PAIRED:
            self._owner.link_frame(self, frame)
        else:
            self._drops.note("direction", f"{type(frame).__name__} is not for decode now")

    def _on_welcome(self, frame: f.HelloOk) -> None:
        if self.stage is not Stage.GREETING:
            return
        self.stage = Stage.PAIRED
        self.peer, self.version = frame.sender, frame.version
        self._backoff = BACKOFF_FIRST_S
        self._reactor.cancel(("hello", self))
        self._reactor.cancel(("grace", self))
        self._owner.link_paired(self, frame.sender, frame.version)

    def _on_ended(self) -> None:
        was_paired = self.stage is Stage.PAIRED
        self._disconnect()
        if not was_paired:
            self._again(f"prefill {self.prefill} closed the control connection before it was paired")
            return
        message = f"the connection to prefill {self.prefill} ended, and the same process did not answer again"
        self._reactor.at(("grace", self), time.monotonic() + GRACE_S, partial(self._on_grace_over, message))
        self._give_up = time.monotonic() + self._connect_s
        self._ask()

    def _on_grace_over(self, message: str) -> None:
        self._lose(message)
        if not self._owner.link_wanted(self) and not self._owner.link_owed(self):
            self._fail(Cause.PEER_LOST, message)

    def _lose(self, message: str) -> None:
        self._reactor.cancel(("grace", self))
        peer, self.peer = self.peer, None
        self._give_up = time.monotonic() + self._connect_s
        if peer is not None:
            log.warning("%s", message)
            self._owner.link_lost(self, peer, message)

    def _again(self, message: str, *, final: Cause | None = None) -> None:
        """Try once more after a pause, unless that is pointless (`final`), too late, or nobody wants it any more."""
        now = time.monotonic()
        wanted = self.peer is not None or self._owner.link_wanted(self)
        self.stage = Stage.PAUSING
        if final is None and wanted and now < self._give_up:
            self._reactor.at(("pause", self), now + self._backoff, self._ask)
            self._backoff = min(2 * self._backoff, BACKOFF_MAX_S)
        elif self._owner.link_owed(self):
            if self.peer is not None:
                self._lose(message)
            self._owner.link_failed(self, final or Cause.PEER_LOST, message)
            self._slow = True
            self._give_up = now + OWED_S + self._connect_s
            self._reactor.at(("pause", self), now + OWED_S, self._ask)
        else:
            self._fail(final or Cause.PEER_LOST, message)

    def _fail(self, cause: Cause, message: str) -> None:
        if self.peer is not None:
            self._lose(message)
        self.close()
        self._owner.link_failed(self, cause, message)

    def _disconnect(self) -> None:
        self._reactor.cancel(("hello", self))
        if self._control is not None:
            self._reactor.unwatch(self._control.socket)
            self._reactor.unwatch(self._control.monitor)
            self._control.close()
            self._control = None
