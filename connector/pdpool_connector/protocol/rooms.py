"""Where prefill finds the hand-off that a half belongs to: by room and prompt, in order of arrival.

A router sends both halves of a request at the same time, so the halves of one room and prompt match in order. Both
sides may have made up a request id of their own; where the ids are equal, they are better evidence than order. Halves
of different prompts never match. Halves of equal prompts have equal caches, so they are interchangeable: several
requests of one prompt live side by side in one room. A half without a prompt matches any.

A hand-off that ended before all its halves came stays for a while, so that each half which comes late gets the cause.
"""

from collections.abc import Hashable
from typing import Final

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.bounded_table import BoundedTable
from pdpool_connector.protocol.events import OpenRequest
from pdpool_connector.protocol.handoff import HandOff
from pdpool_connector.protocol.timers import Timers

MAX_PER_ROOM: Final = 64
"""Live hand-offs in one room, and ended ones beside them. It bounds the search for a half; routers draw rooms at
random, so that only the samples of one request share a room."""
ENDED_HALF: Final = "half"
"""Kind of the timer at which an ended hand-off is forgotten; the key is the hand-off."""


class Rooms:
    """Live hand-offs, and ended ones of which a half may still come, by room.

    Ended ones are bounded by `limit` in all, half of it for one decode, and by `MAX_PER_ROOM`. Beyond these bounds an
    ended hand-off is not remembered, and its late half waits for its own deadline.
    """

    def __init__(self, limit: int, keep_s: float, timers: Timers[tuple[str, Hashable]]) -> None:
        self._rooms: dict[int, list[HandOff]] = {}
        """In each room in order of arrival."""
        self._ended: BoundedTable[HandOff, HandOff] = BoundedTable(limit, timers, ENDED_HALF)
        self._keep_s = keep_s

    def live(self) -> list[HandOff]:
        """Every live hand-off."""
        return [handoff for here in self._rooms.values() for handoff in here if handoff.cause is None]

    @property
    def ended(self) -> int:
        """How many ended hand-offs are remembered."""
        return len(self._ended)

    def full(self, room: int) -> bool:
        """Whether a room has as many live hand-offs as it may have."""
        here = self._rooms.get(room, ())
        return len(here) >= MAX_PER_ROOM and sum(handoff.cause is None for handoff in here) >= MAX_PER_ROOM

    def find_for_request(self, request: OpenRequest) -> HandOff | None:
        """The hand-off, live or ended, that the engine's request belongs to."""
        fits = [one for one in self._rooms.get(request.room, ()) if one.request is None and _match(one, request.prompt)]
        return _best(fits, [one for one in fits if one.decode_id == request.request_id])

    def find_for_rank(self, frame: f.RequestFrame) -> HandOff | None:
        """The hand-off, live or ended, that a decode rank's attempt belongs to."""
        fits = [one for one in self._rooms.get(frame.room, ()) if _lacks(one, frame) and _match(one, frame.prompt)]
        return _best(fits, [one for one in fits if frame.request_id == _request_id(one)])

    def enter(self, handoff: HandOff) -> None:
        """Add a new hand-off behind those that are in its room."""
        self._rooms.setdefault(handoff.room, []).append(handoff)

    def leave(self, handoff: HandOff) -> None:
        """Remove a hand-off that is done."""
        here = self._rooms[handoff.room]
        here.remove(handoff)
        if not here:
            del self._rooms[handoff.room]

    def end(self, handoff: HandOff, decode: str, now: float) -> None:
        """A hand-off in its room has failed. Keep it if a half may still come; `decode` ("" for none) has a share."""
        ended_here = sum(one.cause is not None for one in self._rooms[handoff.room]) - 1
        if handoff.complete or ended_here >= MAX_PER_ROOM or self._ended.full(decode):
            self.leave(handoff)
        else:
            self._ended.put(handoff, handoff, decode, now + self._keep_s)

    def drop_if_complete(self, handoff: HandOff) -> None:
        """A late half has come to an ended hand-off: forget it, if that was the last."""
        if handoff.complete:
            self.forget(handoff)

    def forget(self, handoff: HandOff) -> None:
        """Remove an ended hand-off."""
        if self._ended.pop(handoff) is not None:
            self.leave(handoff)


def _match(handoff: HandOff, prompt: bytes) -> bool:
    """False for halves of different requests."""
    return handoff.prompt == prompt or not prompt or not handoff.prompt


def _lacks(handoff: HandOff, frame: f.RequestFrame) -> bool:
    """Whether this decode rank may belong to the hand-off. All ranks of one instance give one id and one count."""
    if handoff.decode_id is None:
        return True
    same = (handoff.decode_id, handoff.rank_count) == (frame.request_id, frame.rank_count)
    return same and frame.rank_index not in handoff.ranks


def _request_id(handoff: HandOff) -> str | None:
    """The id that an attempt of this hand-off should have."""
    if handoff.decode_id is not None:
        return handoff.decode_id
    return handoff.request.request_id if handoff.request is not None else None


def _best(fits: list[HandOff], same_id: list[HandOff]) -> HandOff | None:
    """The first with an equal request id, else the first."""
    return next(iter(same_id or fits), None)
