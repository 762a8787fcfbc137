"""What a fault does to a connector's outgoing frames: the same at every rank of an engine."""

from dataclasses import dataclass

from pdpool_connector.protocol.frames import Accepted, Ack, Done, Drained, Failed, Frame, Sending

STATUS_FRAMES = (Accepted, Sending, Done, Failed, Drained, Ack)


@dataclass(frozen=True, slots=True)
class FrameFault:
    """Frames are lost (`drop`), those that say how a hand-off stands only (`drop_status`), or late by `delay_s`."""

    drop: bool = False
    delay_s: float = 0.0
    drop_status: bool = False


class FrameFaults:
    """The filter of one rank's connector. Another thread than the connector's may set `fault`."""

    def __init__(self) -> None:
        self.fault = FrameFault()

    def __call__(self, frame: Frame) -> float | None:
        """Seconds to hold a frame back, None to drop it."""
        fault = self.fault
        lost = fault.drop or (fault.drop_status and isinstance(frame, STATUS_FRAMES))
        return None if lost else fault.delay_s
