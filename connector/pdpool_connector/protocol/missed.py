"""Halves of hand-offs that ended before their other half came."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import OpenRequest
from pdpool_connector.protocol.expiring_table import ExpiringTable
from pdpool_connector.protocol.rooms import may_meet
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timers import Timers

PartFrame = f.Open | f.Expect | f.Abort | f.Drained
"""Frames that tell which request, and which part of it, an attempt is for."""
PER_PLACE: Final = 64
"""What is kept of one room and sibling, so that no frame makes us look at more; rooms are drawn at random."""


@dataclass(slots=True, eq=False)
class Missed:
    """A hand-off that ended while the engine's request (`request`) or some part of it had yet to come.

    Whatever comes of the same prompt is told why. `parts` is 0 while nobody knows how many there are; `came` are those
    that came. `request_id` is decode's from then on, until then that of the engine's request.
    """

    request_id: str
    cause: Cause
    message: str
    request: bool
    prompt: bytes = b""
    parts: int = 0
    came: set[int] = field(default_factory=set)

    def lacks(self, frame: PartFrame) -> bool:
        """True when the part that `frame` speaks of may belong to it and has not come: all parts bear one id."""
        same = (self.parts, self.request_id) == (frame.parts, frame.request_id)
        return not self.parts or (same and frame.part not in self.came)

    @property
    def complete(self) -> bool:
        """True when nothing more can come."""
        return not self.request and 0 < self.parts <= len(self.came)


class MissedHalves:
    """Ended hand-offs by room and sibling, oldest first; each half that comes late is met once.

    The router posts both halves of a request at the same time, so the halves of one room and prompt match in order; an
    equal request id on both sides is better evidence and goes first. Bounded: beyond `limit` in all, half of it for one
    decode, or `PER_PLACE`, an ended half is not remembered, and its other half waits for its own deadline. The
    machine's timer ("missed", this) calls `expire`.
    """

    def __init__(self, limit: int, keep_s: float, timers: Timers[tuple[str, Hashable]]) -> None:
        self._rows: ExpiringTable[Missed, tuple[int, int]] = ExpiringTable(limit, keep_s, timers, ("missed", self))
        self._at: dict[tuple[int, int], list[Missed]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def remember(self, key: tuple[int, int], missed: Missed, decode: str, now: float) -> None:
        """Keep an ended hand-off for a while, if anything of it may still come. `decode` had a part in it, or ""."""
        here = self._at.get(key, ())
        if not missed.complete and len(here) < PER_PLACE and self._rows.put(missed, key, decode, now):
            self._at.setdefault(key, []).append(missed)

    def meet_request(self, key: tuple[int, int], event: OpenRequest) -> Missed | None:
        """The ended hand-off that the engine's request belongs to, if there is one."""
        found = self._find(key, event, lambda row: row.request)
        if found is not None:
            found.request = False
            self._drop_if_complete(found)
        return found

    def meet_part(self, key: tuple[int, int], frame: PartFrame) -> Missed | None:
        """The ended hand-off that an attempt for a part belongs to, if there is one."""
        return self._note_part(self._find(key, frame, lambda row: row.lacks(frame)), frame)

    def meet_superseded(self, key: tuple[int, int], frame: PartFrame) -> Missed | None:
        """The same, where a successor of equal request id lives: only what it superseded can still be meant."""
        return self._note_part(
            self._find(key, frame, lambda row: row.cause is Cause.SUPERSEDED and row.lacks(frame)), frame
        )

    def expire(self, now: float) -> None:
        """Forget what is due, and come back for the rest."""
        for row, key in self._rows.expire(now):
            self._leave(key, row)

    def _note_part(self, found: Missed | None, frame: PartFrame) -> Missed | None:
        if found is not None:
            found.request_id, found.parts = frame.request_id, frame.parts
            found.came.add(frame.part)
            self._drop_if_complete(found)
        return found

    def _find(
        self, key: tuple[int, int], half: OpenRequest | PartFrame, fits: Callable[[Missed], bool]
    ) -> Missed | None:
        if not self._at:
            return None
        rows = [row for row in self._at.get(key, ()) if may_meet(row.prompt, half.prompt) and fits(row)]
        return next((row for row in rows if row.request_id == half.request_id), rows[0] if rows else None)

    def _drop_if_complete(self, row: Missed) -> None:
        if row.complete and (key := self._rows.pop(row)) is not None:
            self._leave(key, row)

    def _leave(self, key: tuple[int, int], row: Missed) -> None:
        here = self._at[key]
        here.remove(row)
        if not here:
            del self._at[key]
