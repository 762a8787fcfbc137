"""What both machines share: `handle(event, now) -> effects`, timers, the census, and frames' headers."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

from pdpool_connector.protocol.events import (
    Drain,
    Effect,
    Event,
    Fenced,
    Ignored,
    PeerLost,
    PeerReady,
    Received,
    Send,
    Tick,
)
from pdpool_connector.protocol.frames import AttemptFrame, AttemptId
from pdpool_connector.protocol.queue_counts import QueueCounts
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.timers import Timers

State = TypeVar("State")

MAX_FENCED: Final = 4096
"""Fenced processes that are remembered. One is fenced when it is gone, so that all that can still name it is what was
under way by then: an answer of a registry, a connection whose end has not been noticed."""


class About(Protocol):
    """What a frame can be about: anything that knows its attempt, room and sibling."""

    @property
    def attempt(self) -> AttemptId:
        """Whose frame it is."""

    @property
    def room(self) -> int:
        """Its room."""

    @property
    def sibling(self) -> int:
        """Its index among those that share the room."""


class Machine(Generic[State]):
    """Base of both sides. Deterministic: the same events at the same times give the same effects.

    `handle` may raise only for a fault of the machine itself; what had been decided until then is kept and comes out of
    the next call. The caller calls it again, with `Tick`, when `next_deadline` has come.
    """

    def __init__(self, incarnation: str, labels: Mapping[State, tuple[str, ...]], timing: Timeouts) -> None:
        self.incarnation = incarnation
        self.census: QueueCounts[State] = QueueCounts(labels)
        self.timing = timing
        self.draining = False
        self.fired: list[tuple[str, Hashable]] = []
        """Timers that the last tick found due, for whoever records what happened."""
        self._now = 0.0
        self._timers: Timers[tuple[str, Hashable]] = Timers()
        self._effects: list[Effect] = []
        self._versions: dict[str, int] = {}
        self._fenced: dict[str, None] = {}
        self._on_event: dict[type, Callable[[Any], None]] = {
            PeerReady: self._on_peer_ready,
            PeerLost: self._on_lost,
            Fenced: self._on_fenced,
            Received: self._on_received,
            Drain: self._on_drain,
            Tick: self._on_tick,
        }
        self._on_frame: dict[type, Callable[[Any], None]] = {}
        self._on_timer: dict[str, Callable[[Any], None]] = {}

    @property
    def next_deadline(self) -> float | None:
        """When `Tick` is due at the latest; None when nothing is awaited."""
        return self._timers.next()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take an event in and return what is to be done, in order."""
        if now > self._now:
            self._now = now
        self._on_event[type(event)](event)
        effects, self._effects = self._effects, []
        return effects

    def _on_tick(self, _: Tick) -> None:
        self.fired = []
        while (due := self._timers.pop_due(self._now)) is not None:
            kind, key = due
            self.fired.append(due)
            try:
                self._on_timer[kind](key)
            except Exception:
                # A deadline must not be lost with the fault that it met.
                self._timers.set(due, self._now + self.timing.retry_max_s)
                raise

    def _on_drain(self, _: Drain) -> None:
        self.draining = True

    def _on_received(self, event: Received) -> None:
        """Dispatch a frame to the method for its type, if it comes from a paired process."""
        frame = event.frame
        handler = self._on_frame.get(type(frame))
        if frame.sender not in self._versions:
            self._ignore("unpaired", f"{type(frame).__name__} from {frame.sender[:8]}, which is not paired")
        elif handler is None:
            self._ignore("direction", f"{type(frame).__name__} is not for this side")
        else:
            handler(frame)

    def fenced(self, peer: str) -> bool:
        """True for a process that was proved to touch memory no more: nothing is begun with it again."""
        return peer in self._fenced

    def _on_peer_ready(self, event: PeerReady) -> None:
        if event.peer in self._fenced:
            self._ignore("fenced", f"{event.peer[:8]} was fenced, it is not paired again")
        else:
            self._versions[event.peer] = event.version

    def _on_lost(self, event: PeerLost) -> None:
        self._versions.pop(event.peer, None)

    def _on_fenced(self, event: Fenced) -> None:
        """From here on it is not there, whether or not its loss was noticed before or will be."""
        self._versions.pop(event.peer, None)
        self._fenced[event.peer] = None
        if len(self._fenced) > MAX_FENCED:
            del self._fenced[next(iter(self._fenced))]

    def _send(self, peer: str, kind: Callable[..., AttemptFrame], about: About, **fields: object) -> None:
        """Send a frame about an attempt; to a peer that is not paired nothing is sent, and nothing is lost by it."""
        version = self._versions.get(peer)
        if version is None:
            return
        frame = kind(
            version=version,
            sender=self.incarnation,
            attempt=about.attempt,
            room=about.room,
            sibling=about.sibling,
            **fields,
        )
        self._effects.append(Send(peer, frame))

    def _ignore(self, reason: str, detail: str) -> None:
        self._effects.append(Ignored(reason, detail))
