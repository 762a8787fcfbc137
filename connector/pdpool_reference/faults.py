"""Faults on request, for tests of what watches engines. Served only with --enable-faults."""

from dataclasses import replace
from typing import Annotated, Any

import msgspec

from pdpool_reference.frame_faults import FrameFaults
from pdpool_reference.ranks import Ranks
from pdpool_reference.request import RequestError
from pdpool_reference.request_body import decode_body
from pdpool_reference.scheduler import Scheduler

MAX_DELAY_S = 600.0


class FaultsBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /faults`: sets the given fields and leaves the others.

    Args:
        freeze_scheduler: The scheduler's loop hangs; connector and HTTP live on.
        freeze_ranks: The loops of exactly these ranks (1 and up) hang; [] frees all.
        freeze_gauges: `/metrics` keeps its last values.
        leak_request: The next sequence that ends stays in its queue with its pages, at decode in `decode_transfer`;
            false frees all such.
        drop_handoff: Every rank's connector loses all outgoing frames.
        delay_handoff_s: Every rank's connector delays outgoing frames by so much; 0 ends it.
        stop_status: Every rank's connector loses the outgoing frames that answer a peer.
    """

    freeze_scheduler: bool | None = None
    freeze_ranks: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] | None = None
    freeze_gauges: bool | None = None
    leak_request: bool | None = None
    drop_handoff: bool | None = None
    delay_handoff_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_DELAY_S)] | None = None
    stop_status: bool | None = None


def apply_faults(raw: bytes, scheduler: Scheduler, frames: FrameFaults, ranks: Ranks | None) -> dict[str, Any]:
    """Set the faults in a body. Returns all faults in force. Raises RequestError for an unknown one."""
    body = decode_body(raw, FaultsBody)
    if body.freeze_ranks is not None:
        _freeze_ranks(body.freeze_ranks, ranks)
    if body.freeze_gauges is not None:
        scheduler.freeze_gauges = body.freeze_gauges
    if body.leak_request is not None:
        scheduler.leak(body.leak_request)
    _set_frame_fault(body, frames, ranks)
    if body.freeze_scheduler is not None:
        scheduler.freeze(body.freeze_scheduler)
    return {
        "freeze_scheduler": scheduler.frozen,
        "freeze_ranks": sorted(ranks.frozen) if ranks is not None else [],
        "freeze_gauges": scheduler.freeze_gauges,
        "leak_request": scheduler.leaking,
        "drop_handoff": frames.fault.drop,
        "delay_handoff_s": frames.fault.delay_s,
        "stop_status": frames.fault.drop_status,
    }


def _set_frame_fault(body: FaultsBody, frames: FrameFaults, ranks: Ranks | None) -> None:
    asked = {"drop": body.drop_handoff, "delay_s": body.delay_handoff_s, "drop_status": body.stop_status}
    given: dict[str, Any] = {field: value for field, value in asked.items() if value is not None}
    if given:
        frames.fault = replace(frames.fault, **given)
        if ranks is not None:
            ranks.order_all(frames.fault)


def _freeze_ranks(wanted: tuple[int, ...], ranks: Ranks | None) -> None:
    others = ranks.numbers if ranks is not None else []
    if strangers := set(wanted) - set(others):
        have = f"this engine has the ranks 0 to {len(others)}" if others else "this engine has one rank (--tp-size)"
        hint = "; rank 0 is frozen by freeze_scheduler" if 0 in strangers else ""
        raise RequestError(f"freeze_ranks names {min(strangers)}: {have}{hint}", param="freeze_ranks")
    if ranks is not None:
        ranks.freeze(frozenset(wanted))
