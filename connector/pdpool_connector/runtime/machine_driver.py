"""The machine in a live connector: events go in, and what it says is performed. In turns of the reactor only."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import count

from pdpool_connector.flight.files import Flight
from pdpool_connector.flight.replay import AnyMachine
from pdpool_connector.protocol.events import AbortTransfer, Effect, Event, Ignored, Report, Send
from pdpool_connector.protocol.frames import Frame
from pdpool_connector.protocol.status import Cause, Phase
from pdpool_connector.runtime.config import ConnectorConfig
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.transport.drops import Drops

log = logging.getLogger(__name__)


class MachineDriver(ABC):
    """Keeps a fault within the attempt that met it. `flight` records what happens, if it is there."""

    role: str
    config: ConnectorConfig

    def __init__(self, machine: AnyMachine, reactor: Reactor, drops: Drops, flight: Flight | None) -> None:
        self._machine, self._reactor, self._drops, self._flight = machine, reactor, drops, flight
        self._delayed = count()
        self._failed: list[Report] = []
        """Published when peers have been told."""
        self._torn = False
        """A turn was cut short by what ends the program: the machine is not to be trusted, and runs no more."""

    @abstractmethod
    def _transmit(self, peer: str, frame: Frame) -> None: ...

    @abstractmethod
    def _publish(self, report: Report) -> None: ...

    @abstractmethod
    def _perform(self, effect: Effect) -> None: ...

    def _drive(self, event: Event) -> None:
        """Run the machine, and perform what it says."""
        if self._torn:
            return
        for effect in self._handle(event):
            try:
                self._apply(effect)
            except Exception:
                self._reactor.faults += 1
                log.exception("the %s connector failed at %s", self.role, type(effect).__name__)

    def _handle(self, event: Event) -> list[Effect]:
        now = time.monotonic()
        try:
            effects = self._machine.handle(event, now)
        except Exception as error:
            self._reactor.faults += 1
            log.exception("the %s machine failed on %s", self.role, type(event).__name__)
            if self._flight is not None:
                self._flight.note(event, now, (), self._machine.fired, type(error).__name__)
            return self._give_up_after_fault(event)
        if self._flight is not None:
            self._flight.note(event, now, effects, self._machine.fired)
        return effects

    def _give_up_after_fault(self, event: Event) -> list[Effect]:
        handle = getattr(event, "handle", None)
        if not isinstance(handle, int) or isinstance(event, AbortTransfer):
            return []
        return self._handle(AbortTransfer(handle, "a fault in the connector; see its log", Cause.INTERNAL))

    def _apply(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            if self.config.frame_filter is None:
                self._transmit(effect.peer, effect.frame)
            else:
                self._filtered(effect.frame, partial(self._transmit, effect.peer, effect.frame))
        elif isinstance(effect, Report):
            if effect.status.phase is Phase.FAILED:
                self._failed.append(effect)
            else:
                self._publish(effect)
        elif isinstance(effect, Ignored):
            self._drops.note(effect.reason, effect.detail)
        else:
            self._perform(effect)

    def _filtered(self, frame: Frame, send: Callable[[], None]) -> None:
        delay = self.config.frame_filter(frame) if self.config.frame_filter is not None else 0.0
        if delay is None:
            self._drops.note("filtered", type(frame).__name__)
        elif delay > 0:
            self._reactor.at(("delayed", next(self._delayed)), time.monotonic() + delay, send)
        else:
            send()
