"""What both machines share: `handle(event, now) -> effects`, timers, queue counts, and headers of frames."""

from collections.abc import Callable, Hashable, Mapping
from typing import ClassVar, Final, Generic, Protocol, TypeVar

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
Timer = tuple[str, Hashable]
"""Kind of a timer, which names the method that it calls, and the argument of that method."""

MAX_FENCED: Final = 4096
"""Fenced processes that are remembered. A fenced process is gone; only a late answer of a registry, or a connection
whose end is not noticed yet, can still name it."""


class About(Protocol):
    """What a frame can be about: anything with an attempt and a room."""

    @property
    def attempt(self) -> AttemptId:
        """The attempt."""

    @property
    def room(self) -> int:
        """Its room."""


class Machine(Generic[State]):
    """Base of both sides. Deterministic: the same events at the same times give the same effects.

    The caller drives it by `handle`, and calls `handle` with `Tick` when `next_deadline` has been reached. `handle`
    raises only for a fault of the machine itself. Effects that were decided before the fault are kept, and the next
    call returns them.

    The tables name methods, so that a copy of a machine holds no reference to the original.
    """

    EVENTS: ClassVar[Mapping[type, str]] = {
        PeerReady: "_on_peer_ready",
        PeerLost: "_on_lost",
        Fenced: "_on_fenced",
        Received: "_on_received",
        Drain: "_on_drain",
        Tick: "_on_tick",
    }
    """Method for each type of event."""
    FRAMES: ClassVar[Mapping[type, str]] = {}
    """Method for each type of frame that this side receives."""
    TIMERS: ClassVar[Mapping[str, str]] = {}
    """Method for each kind of timer."""

    def __init__(self, incarnation: str, labels: Mapping[State, tuple[str, ...]], timeouts: Timeouts) -> None:
        self.incarnation = incarnation
        self.queues: QueueCounts[State] = QueueCounts(labels)
        self.timeouts = timeouts
        self.draining = False
        self.fired: list[Timer] = []
        """Timers that were due at the last tick, for the flight recorder."""
        self._now = 0.0
        self._timers: Timers[Timer] = Timers()
        self._effects: list[Effect] = []
        self._versions: dict[str, int] = {}
        """Protocol version by paired process."""
        self._fenced: dict[str, None] = {}

    @property
    def next_deadline(self) -> float | None:
        """When `Tick` is due at the latest; None when no timer runs."""
        return self._timers.next()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event in.

        Args:
            event: what has happened.
            now: seconds on the caller's monotonic clock. A time before the last one counts as the last one.

        Returns:
            What is to be done, in this order.
        """
        if now > self._now:
            self._now = now
        getattr(self, self.EVENTS[type(event)])(event)
        effects, self._effects = self._effects, []
        return effects

    def fenced(self, peer: str) -> bool:
        """Whether a process is proved to touch no memory any more. Nothing is begun with it again."""
        return peer in self._fenced

    def _on_tick(self, _: Tick) -> None:
        self.fired = []
        while (due := self._timers.pop_due(self._now)) is not None:
            kind, key = due
            self.fired.append(due)
            try:
                getattr(self, self.TIMERS[kind])(key)
            except Exception:
                # The deadline must not be lost together with the fault.
                self._timers.set(due, self._now + self.timeouts.retry_max_s)
                raise

    def _on_drain(self, _: Drain) -> None:
        self.draining = True

    def _on_received(self, event: Received) -> None:
        frame = event.frame
        method = self.FRAMES.get(type(frame))
        if frame.sender not in self._versions:
            self._ignore("unpaired", f"{type(frame).__name__} from {frame.sender[:8]}, which is not paired")
        elif method is None:
            self._ignore("direction", f"{type(frame).__name__} is not for this side")
        else:
            getattr(self, method)(frame)

    def _on_peer_ready(self, event: PeerReady) -> None:
        if event.peer in self._fenced:
            self._ignore("fenced", f"{event.peer[:8]} was fenced, it is not paired again")
        else:
            self._versions[event.peer] = event.version

    def _on_lost(self, event: PeerLost) -> None:
        self._versions.pop(event.peer, None)

    def _on_fenced(self, event: Fenced) -> None:
        """A fenced process counts as lost, whether or not its loss was noticed."""
        self._versions.pop(event.peer, None)
        self._fenced[event.peer] = None
        if len(self._fenced) > MAX_FENCED:
            del self._fenced[next(iter(self._fenced))]

    def _send(self, peer: str, kind: Callable[..., AttemptFrame], about: About, **fields: object) -> None:
        """Send a frame about an attempt. Nothing is sent to a peer that is not paired: pairing repeats the frame."""
        version = self._versions.get(peer)
        if version is None:
            return
        header = {"version": version, "sender": self.incarnation, "attempt": about.attempt, "room": about.room}
        self._effects.append(Send(peer, kind(**header, **fields)))

    def _ignore(self, reason: str, detail: str) -> None:
        self._effects.append(Ignored(reason, detail))
