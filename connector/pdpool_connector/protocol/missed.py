"""Halves of hand-offs that ended before their other half came."""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import OpenRequest
from pdpool_connector.protocol.outcome import Cause
from pdpool_connector.protocol.rooms import may_meet
from pdpool_connector.protocol.timers import Timers

PartFrame = f.Open | f.Expect | f.Abort | f.Drained
"""Frames that tell which request, and which part of it, an attempt is for."""


@dataclass(slots=True, eq=False)
class Missed:
    """A hand-off that ended while the engine's request (`request`) or some part of it had yet to come.

    Whatever comes of the same prompt is told why. `parts` is 0 while nobody knows how many there are; `came` are those
    that came.
    """

    request_id: str
    cause: Cause
    message: str
    request: bool
    prompt: bytes = b""
    parts: int = 0
    came: set[int] = field(default_factory=set)
    expires: float = 0.0

    def lacks(self, part: int, parts: int) -> bool:
        """True when part `part` of `parts` may belong to it and has not come."""
        return self.parts in (0, parts) and part not in self.came

    @property
    def complete(self) -> bool:
        """True when nothing more can come."""
        return not self.request and 0 < self.parts <= len(self.came)


class MissedHalves:
    """Ended hand-offs by room and sibling, oldest first; each half that comes late is met once.

    The router posts both halves of a request at the same time, so the halves of one room and prompt match in order; an
    equal request id on both sides is better evidence and goes first. Bounded: beyond `limit` an ended half is not
    remembered, and its other half waits for its own deadline. The machine's timer ("missed", this) calls `expire`.
    """

    def __init__(self, limit: int, keep_s: float, timers: Timers[tuple[str, Hashable]]) -> None:
        self._limit, self._keep_s, self._timers = limit, keep_s, timers
        self._rows: dict[tuple[int, int], deque[Missed]] = {}
        self._expiry: deque[tuple[float, tuple[int, int]]] = deque()

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._rows.values())

    def remember(self, key: tuple[int, int], missed: Missed, now: float) -> None:
        """Keep an ended hand-off for a while, if anything of it may still come."""
        if missed.complete or len(self._expiry) >= self._limit:
            return
        missed.expires = now + self._keep_s
        self._rows.setdefault(key, deque()).append(missed)
        self._expiry.append((missed.expires, key))
        self._timers.set(("missed", self), self._expiry[0][0])

    def meet_request(self, key: tuple[int, int], event: OpenRequest) -> Missed | None:
        """The ended hand-off that the engine's request belongs to, if there is one."""
        found = self._find(key, event, lambda row: row.request)
        if found is not None:
            found.request = False
            self._drop_if_complete(key, found)
        return found

    def meet_part(self, key: tuple[int, int], frame: PartFrame) -> Missed | None:
        """The ended hand-off that an attempt for a part belongs to, if there is one."""
        return self._note_part(key, self._find(key, frame, lambda row: row.lacks(frame.part, frame.parts)), frame)

    def meet_superseded(self, key: tuple[int, int], frame: PartFrame) -> Missed | None:
        """The same, where a successor of equal request id lives: only what it superseded can still be meant."""

        def fits(row: Missed) -> bool:
            superseded = row.cause is Cause.SUPERSEDED and row.request_id == frame.request_id
            return superseded and row.lacks(frame.part, frame.parts)

        return self._note_part(key, self._find(key, frame, fits), frame)

    def expire(self, now: float) -> None:
        """Forget what is due, and come back for the rest."""
        while self._expiry and self._expiry[0][0] <= now:
            _, key = self._expiry.popleft()
            rows = self._rows.get(key)
            if rows and rows[0].expires <= now:
                rows.popleft()
                if not rows:
                    del self._rows[key]
        if self._expiry:
            self._timers.set(("missed", self), self._expiry[0][0])

    def _note_part(self, key: tuple[int, int], found: Missed | None, frame: PartFrame) -> Missed | None:
        if found is not None:
            found.parts = frame.parts
            found.came.add(frame.part)
            self._drop_if_complete(key, found)
        return found

    def _find(
        self, key: tuple[int, int], half: OpenRequest | PartFrame, fits: Callable[[Missed], bool]
    ) -> Missed | None:
        if not self._rows:
            return None
        rows = [row for row in self._rows.get(key, ()) if may_meet(row.prompt, half.prompt) and fits(row)]
        return next((row for row in rows if row.request_id == half.request_id), rows[0] if rows else None)

    def _drop_if_complete(self, key: tuple[int, int], row: Missed) -> None:
        if row.complete:
            rows = self._rows[key]
            rows.remove(row)
            if not rows:
                del self._rows[key]
