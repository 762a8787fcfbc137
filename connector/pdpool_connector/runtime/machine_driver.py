"""Runs a state machine in a live connector: passes events in and performs the effects. In turns of the reactor only."""

import logging
from collections.abc import Callable
from functools import partial
from itertools import count

from pdpool_connector.flight.files import Flight
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.events import AbortTransfer, Effect, Event, Ignored, Report, Send
from pdpool_connector.protocol.frames import Frame
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.status import Cause, Phase
from pdpool_connector.runtime.config import FrameFilter
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.transport.drops import Drops

log = logging.getLogger(__name__)


class MachineDriver:
    """Keeps a fault within the attempt that it met.

    Args:
        machine: The state machine of one side.
        reactor: Owns the machine; gives time and timers.
        drops: Counts frames that change nothing.
        flight: Records events and effects, if it is there.
        frame_filter: Holds outgoing frames back, or drops them.
        transmit: Sends a frame to a paired peer.
        publish: Gives a hand-off's new status to its engine.
        perform: Performs any other effect.
    """

    def __init__(
        self,
        machine: PrefillMachine | DecodeMachine,
        reactor: Reactor,
        drops: Drops,
        flight: Flight | None,
        frame_filter: FrameFilter | None,
        *,
        transmit: Callable[[str, Frame], None],
        publish: Callable[[Report], None],
        perform: Callable[[Effect], None],
    ) -> None:
        self._machine, self._reactor, self._drops, self._flight = machine, reactor, drops, flight
        self.frame_filter = frame_filter
        self._transmit, self._publish, self._perform = transmit, publish, perform
        self._delayed = count()
        self.failed: list[Report] = []
        """Failures that are published only after peers were sent them."""
        self.torn = False
        """A turn was cut short by an exception that ends the program: the machine's state is unknown, and it stops."""

    def drive(self, event: Event) -> None:
        """Pass an event to the machine, and perform the effects."""
        if self.torn:
            return
        for effect in self._handle(event):
            try:
                self._apply(effect)
            except Exception:
                self._reactor.faults += 1
                log.exception("an effect failed: %s", type(effect).__name__)

    def send(self, frame: Frame, send: Callable[[], None]) -> None:
        """Call `send` for a frame: at once, later or never, as the frame filter says."""
        delay = self.frame_filter(frame) if self.frame_filter is not None else 0.0
        if delay is None:
            self._drops.note("filtered", type(frame).__name__)
        elif delay > 0:
            self._reactor.at(("delayed", next(self._delayed)), self._reactor.now() + delay, send)
        else:
            send()

    def publish_failed(self) -> None:
        """Publish failures, now that peers have been sent them."""
        failed, self.failed = self.failed, []
        for report in failed:
            self._reactor.guard(partial(self._publish, report))

    def _handle(self, event: Event) -> list[Effect]:
        now = self._reactor.now()
        try:
            effects = self._machine.handle(event, now)
        except Exception as error:
            self._reactor.faults += 1
            log.exception("the state machine failed on %s", type(event).__name__)
            if self._flight is not None:
                self._flight.note(event, now, (), self._machine.fired, type(error).__name__)
            return self._give_up_after_fault(event)
        if self._flight is not None:
            self._flight.note(event, now, effects, self._machine.fired)
        self._machine.fired = []  # it would keep ended hand-offs alive until the next tick
        return effects

    def _give_up_after_fault(self, event: Event) -> list[Effect]:
        handle = getattr(event, "handle", None)
        if not isinstance(handle, int) or isinstance(event, AbortTransfer):
            return []
        return self._handle(AbortTransfer(handle, "a fault in the connector; see its log", Cause.INTERNAL))

    def _apply(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            if self.frame_filter is None:
                self._transmit(effect.peer, effect.frame)
            else:
                self.send(effect.frame, partial(self._transmit, effect.peer, effect.frame))
        elif isinstance(effect, Report):
            if effect.status.phase is Phase.FAILED:
                self.failed.append(effect)
            else:
                self._publish(effect)
        elif isinstance(effect, Ignored):
            self._drops.note(effect.reason, effect.detail)
        else:
            self._perform(effect)
