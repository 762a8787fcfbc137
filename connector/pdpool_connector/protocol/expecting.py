"""Requests that decode's engine has and has not opened yet: what decode repeats, and what prefill knows of it.

A hint on both sides: a row that is lost, or finds no room, ends nothing. It lets prefill tell a request whose decode
died before it opened it from one whose decode is busy.
"""

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import ExpectAttempt, OpenAttempt
from pdpool_connector.protocol.expiring_table import ExpiringTable
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.missed import PER_PLACE, PartFrame
from pdpool_connector.protocol.rooms import may_meet
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timers import Timers

Place = tuple[int, int, str, bytes]
"""Room, sibling, request id and prompt: all that names a request which has no attempt yet."""


@dataclass(slots=True, eq=False)
class Expectation:
    """One request of decode's engine; `expires` on the caller's clock."""

    attempt: AttemptId
    params: ExpectAttempt
    expires: float

    @property
    def room(self) -> int:
        """Its room."""
        return self.params.room

    @property
    def sibling(self) -> int:
        """Its index among those that share the room."""
        return self.params.sibling


class Expecting:
    """Decode's, by the prefill that will serve them; at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[str, dict[Place, Expectation]] = {}

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._rows.values())

    def __contains__(self, prefill: str) -> bool:
        return prefill in self._rows

    def add(self, row: Expectation) -> bool:
        """Take a row in; False when there is no room for it."""
        if len(self) >= self._limit:
            return False
        self._rows.setdefault(row.params.prefill, {})[_place(row.params)] = row
        return True

    def drop(self, params: OpenAttempt) -> None:
        """The engine has opened or refused it."""
        if not self._rows:
            return
        rows = self._rows.get(params.prefill, {})
        rows.pop(_place(params), None)
        if not rows:
            self._rows.pop(params.prefill, None)

    def clear(self) -> None:
        """Nothing will be opened any more."""
        self._rows.clear()

    def rows(self, prefill: str) -> Collection[Expectation]:
        """Those of a prefill."""
        return self._rows.get(prefill, {}).values()

    def expire(self, prefill: str, now: float) -> None:
        """Forget those whose time is over."""
        kept = {place: row for place, row in self._rows.pop(prefill, {}).items() if row.expires > now}
        if kept:
            self._rows[prefill] = kept


class Expected:
    """Prefill's: what decodes have said that they have. At most `limit`, half of it of one decode, `PER_PLACE` in one.

    Rows leave when their decode opens or ends the request, with the decode, or by their deadline: the machine's timer
    ("expected", attempt) calls `forget`.
    """

    def __init__(self, limit: int, timers: Timers[tuple[str, Hashable]]) -> None:
        self._limit, self._timers = limit, timers
        self._rows: dict[AttemptId, f.Expect] = {}
        self._of_peer: dict[str, dict[AttemptId, f.Expect]] = {}
        self._at: dict[tuple[int, int], dict[AttemptId, f.Expect]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def note(self, frame: f.Expect, now: float) -> None:
        """A decode has said so, or says so again."""
        of_peer, here = self._of_peer.get(frame.sender, ()), self._at.get((frame.room, frame.sibling), ())
        full = len(self) >= self._limit or len(of_peer) >= self._limit // 2 or len(here) >= PER_PLACE
        if full or frame.attempt in self._rows:
            return
        for index, key in self._indexes(frame):
            index.setdefault(key, {})[frame.attempt] = frame
        self._rows[frame.attempt] = frame
        self._timers.set(("expected", frame.attempt), now + frame.deadline_s)

    def met(self, frame: PartFrame) -> None:
        """A decode has opened a request, or ended it."""
        if not self._rows:
            return
        for row in list(self._at.get((frame.room, frame.sibling), {}).values()):
            if row.sender == frame.sender and _name(row) == _name(frame):
                self.forget(row.attempt)

    def take(self, peer: str) -> list[f.Expect]:
        """A decode is gone: what it expected."""
        rows = list(self._of_peer.get(peer, {}).values())
        for row in rows:
            self.forget(row.attempt)
        return rows

    def elsewhere(self, gone: f.Expect) -> bool:
        """Whether another decode expects the same request."""
        rows = self._at.get((gone.room, gone.sibling), {}).values()
        return any(row.part == gone.part and may_meet(row.prompt, gone.prompt) for row in rows)

    def forget(self, attempt: AttemptId) -> None:
        """Its time is over."""
        frame = self._rows.pop(attempt)
        self._timers.cancel(("expected", attempt))
        for index, key in self._indexes(frame):
            del index[key][attempt]
            if not index[key]:
                del index[key]

    def _indexes(self, frame: f.Expect) -> tuple[tuple[dict[Any, dict[AttemptId, f.Expect]], Hashable], ...]:
        return ((self._of_peer, frame.sender), (self._at, (frame.room, frame.sibling)))


class _Ended(NamedTuple):
    cause: Cause
    message: str
    announced: AttemptId


class Parted:
    """Prefill's: how requests ended that a decode had announced when it was lost.

    If only its connection was cut, it comes back to them: when it opens one it is told, and when it gives one up that
    is known already. One row is for one request of one process, so that it meets nothing else. At most `limit`, half of
    it of one decode, each for `keep_s`: the machine's timer ("parted", this) calls `expire`.
    """

    def __init__(self, limit: int, keep_s: float, timers: Timers[tuple[str, Hashable]]) -> None:
        self._rows: ExpiringTable[tuple[Hashable, ...], _Ended] = ExpiringTable(limit, keep_s, timers, ("parted", self))

    def __len__(self) -> int:
        return len(self._rows)

    def note(self, frame: f.Expect, ended: tuple[Cause, str], now: float) -> None:
        """An announced request has ended with the loss of its decode, had before, or will when it comes: why."""
        self._rows.put(_row(frame), _Ended(*ended, frame.attempt), frame.sender, now)

    def repeats(self, frame: f.Expect) -> bool:
        """Whether it announces what it had announced, and not the same request anew."""
        ended = self._rows.get(_row(frame))
        return ended is not None and ended.announced == frame.attempt

    def meet(self, frame: PartFrame) -> tuple[Cause, str] | None:
        """The decode is back, and opens it, gives it up or announces it anew: why it has ended; once."""
        ended = self._rows.pop(_row(frame)) if len(self._rows) else None
        return None if ended is None else (ended.cause, ended.message)

    def expire(self, now: float) -> None:
        """Forget what is due."""
        self._rows.expire(now)


def _row(frame: PartFrame) -> tuple[Hashable, ...]:
    return (frame.sender, frame.room, frame.sibling, *_name(frame))


def _place(params: ExpectAttempt | OpenAttempt) -> Place:
    return (params.room, params.sibling, params.request_id, params.prompt)


def _name(frame: PartFrame) -> tuple[str, bytes, int]:
    return (frame.request_id, frame.prompt, frame.part)
