"""Faults on request, for tests of what watches engines. Offered only with --enable-faults."""

from typing import Annotated, Any

import msgspec

from pdpool_connector.protocol.frames import Accepted, Ack, Done, Drained, Failed, Frame, Sending
from pdpool_connector.reference.ranks import Ranks
from pdpool_connector.reference.request import RequestError
from pdpool_connector.reference.request_body import decode_body
from pdpool_connector.reference.scheduler import Scheduler

MAX_DELAY_S = 600.0
STATUS_FRAMES = (Accepted, Sending, Done, Failed, Drained, Ack)


class FaultsBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /faults`: each field given is set, the others stay.

    freeze_scheduler: the scheduler's loop stands still; connector and HTTP live on.
    freeze_ranks: the loops of these ranks (1 and up) stand still, those of the others go on; [] thaws all.
    freeze_gauges: /metrics keeps its last values.
    leak_request: the next sequence that ends stays in its queue with its pages; false lets go of such.
    drop_handoff: the connector's outgoing frames are lost.
    delay_handoff_s: the connector's outgoing frames are held back so long; 0 ends it.
    stop_status: the connector's frames that say how a hand-off stands are lost, the others pass.
    """

    freeze_scheduler: bool | None = None
    freeze_ranks: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] | None = None
    freeze_gauges: bool | None = None
    leak_request: bool | None = None
    drop_handoff: bool | None = None
    delay_handoff_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_DELAY_S)] | None = None
    stop_status: bool | None = None


class FrameFaults:
    """What happens to the connector's outgoing frames. The HTTP thread sets its fields, the connector's reads them."""

    def __init__(self) -> None:
        self.drop = False
        self.delay_s = 0.0
        self.drop_status = False

    def __call__(self, frame: Frame) -> float | None:
        """Seconds to hold a frame back, None to drop it."""
        lost = self.drop or (self.drop_status and isinstance(frame, STATUS_FRAMES))
        return None if lost else self.delay_s


def apply_faults(raw: bytes, scheduler: Scheduler, frames: FrameFaults, ranks: Ranks | None) -> dict[str, Any]:
    """Set the faults that a body names. Returns those in force. Raises RequestError for unknown ones."""
    body = decode_body(raw, FaultsBody)
    if body.freeze_ranks is not None:
        _freeze_ranks(body.freeze_ranks, ranks)
    if body.freeze_gauges is not None:
        scheduler.freeze_gauges = body.freeze_gauges
    if body.leak_request is not None:
        scheduler.leak(body.leak_request)
    if body.drop_handoff is not None:
        frames.drop = body.drop_handoff
    if body.delay_handoff_s is not None:
        frames.delay_s = body.delay_handoff_s
    if body.stop_status is not None:
        frames.drop_status = body.stop_status
    if body.freeze_scheduler is not None:
        scheduler.freeze(body.freeze_scheduler)
    return {
        "freeze_scheduler": scheduler.frozen,
        "freeze_ranks": sorted(ranks.frozen) if ranks is not None else [],
        "freeze_gauges": scheduler.freeze_gauges,
        "leak_request": scheduler.leaking,
        "drop_handoff": frames.drop,
        "delay_handoff_s": frames.delay_s,
        "stop_status": frames.drop_status,
    }


def _freeze_ranks(wanted: tuple[int, ...], ranks: Ranks | None) -> None:
    others = ranks.numbers if ranks is not None else []
    if strangers := set(wanted) - set(others):
        have = f"this engine has the ranks 0 to {len(others)}" if others else "this engine has one rank (--tp-size)"
        hint = "; rank 0 is frozen by freeze_scheduler" if 0 in strangers else ""
        raise RequestError(f"freeze_ranks names {min(strangers)}: {have}{hint}", param="freeze_ranks")
    if ranks is not None:
        ranks.freeze(frozenset(wanted))
