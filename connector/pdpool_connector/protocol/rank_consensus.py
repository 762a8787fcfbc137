"""The common status of a request on all ranks of one instance, found by key and never by position. Pure.

The engine gathers the view of each rank with a collective of its own; a rank without hand-offs takes part with an empty
view. So all ranks compute the same statuses from the same views. The other ranks know only what a rank shows. So a rank
shows a hand-off that has ended there until its common status has ended as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pdpool_connector.protocol.status import Cause, Phase, TransferStatus


class Key(NamedTuple):
    """What identifies a request on all ranks."""

    room: int
    request_id: str


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The common status of a request, for every rank that still shows it.

    `phase`: FAILED once one rank has failed; DONE only when all ranks show DONE; else the phase of the rank that is
    furthest behind. `rank`, `cause` and `message`: the failure that the others followed from. `absent`: ranks that do
    not show the request. `releasable`: it is over, and every rank that shows it may give its pages back. Ranks whose
    allocators must stay equal give pages back at that moment.
    """

    phase: Phase
    rank: int | None = None
    cause: Cause | None = None
    message: str = ""
    absent: tuple[int, ...] = ()
    releasable: bool = False


_ORDER: Final = (Phase.WAITING, Phase.READY, Phase.TRANSFERRING, Phase.DONE)
_ROOTS: Final = (
    Cause.INTERNAL,
    Cause.INVALID,
    Cause.CORRUPT,
    Cause.TRANSFER_FAILED,
    Cause.TOO_LONG,
    Cause.PURGED,
    Cause.REFUSED,
    Cause.ABORTED,
    Cause.SHUTDOWN,
    Cause.PEER_LOST,
    Cause.TIMED_OUT,
    Cause.PEER_ABORTED,
    Cause.FORGOTTEN,
)
"""Causes that a rank found itself come before those that it received, which may follow from another rank's failure."""


def agree(views: Sequence[Mapping[Key, TransferStatus]]) -> Mapping[Key, RankStatus]:
    """One status for each request that a rank shows; `views[i]` is what rank i shows."""
    keys = dict.fromkeys(key for view in views for key in view)
    return {key: _common_status([view.get(key) for view in views]) for key in keys}


def _common_status(statuses: Sequence[TransferStatus | None]) -> RankStatus:
    absent = tuple(rank for rank, status in enumerate(statuses) if status is None)
    shown = [status for status in statuses if status is not None]
    free = all(status.releasable for status in shown)
    failed = [
        (_ROOTS.index(status.cause or Cause.INTERNAL), status.message, rank)
        for rank, status in enumerate(statuses)
        if status is not None and status.phase is Phase.FAILED
    ]
    if failed:
        root, message, rank = min(failed)
        return RankStatus(Phase.FAILED, rank, _ROOTS[root], message, absent, free)
    reached = min(_ORDER.index(status.phase) for status in shown)
    return RankStatus(Phase.WAITING if absent else _ORDER[reached], absent=absent, releasable=free and not absent)
