"""Faults in a connector's outgoing frames, the same at every rank of an engine."""

from dataclasses import dataclass

from pdpool_connector.protocol.frames import Accepted, Ack, Ended, Frame

STATUS_FRAMES = (Accepted, Ended, Ack)


@dataclass(frozen=True, slots=True)
class FrameFault:
    """Drop all frames (`drop`), drop those that answer a peer (`drop_status`), or delay all by `delay_s`."""

    drop: bool = False
    delay_s: float = 0.0
    drop_status: bool = False


class FrameFaults:
    """The frame filter of one rank's connector. Any thread may set `fault`."""

    def __init__(self) -> None:
        self.fault = FrameFault()

    def __call__(self, frame: Frame) -> float | None:
        """Return the seconds to delay a frame by, None to drop it."""
        fault = self.fault
        lost = fault.drop or (fault.drop_status and isinstance(frame, STATUS_FRAMES))
        return None if lost else fault.delay_s
