"""What the ranks of one instance make of a request together, by key and never by position. Pure.

The engine gathers each rank's view by a collective of its own (a rank without any hand-off takes part with an empty
view), so all ranks compute the same verdicts from the same views. A rank goes on showing a hand-off that has ended, for
it, until a verdict has ended it for all: what a rank no longer shows, the others cannot know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pdpool_connector.protocol.status import Cause, Phase, TransferStatus


class Key(NamedTuple):
    """By which ranks mean the same request."""

    room: int
    sibling: int
    request_id: str


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The one outcome of a request, for every rank that still shows it.

    `phase`: FAILED as soon as one rank has failed, whatever became of it on others; DONE only when all ranks have shown
    DONE; otherwise as far as the rank has come that is furthest behind. `rank`, `cause` and `message` name the failure
    that the others followed from. `absent`: ranks that do not show the request. `releasable`: it is over, and every
    rank that shows it may give its pages back; ranks whose allocators go in step give them back then, and not each when
    its own status says so.
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
    Cause.CONFLICT,
    Cause.TOO_LONG,
    Cause.REFUSED,
    Cause.ABORTED,
    Cause.SHUTDOWN,
    Cause.SUPERSEDED,
    Cause.PEER_LOST,
    Cause.TIMED_OUT,
    Cause.PEER_ABORTED,
    Cause.FORGOTTEN,
)
"""What a rank has found itself stands before what it was told, which may be an echo of another rank's failure."""


def agree(views: Sequence[Mapping[Key, TransferStatus]]) -> Mapping[Key, RankStatus]:
    """One verdict for each request that some rank shows; `views[i]` is what rank i shows."""
    keys = dict.fromkeys(key for view in views for key in view)
    return {key: _judge([view.get(key) for view in views]) for key in keys}


def _judge(statuses: Sequence[TransferStatus | None]) -> RankStatus:
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
