"""One hand-off as prefill sees it: the two halves, and the pages on their way from one to the other."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import OpenRequest, SendPages
from pdpool_connector.protocol.frames import PAGE_ID_BYTES, AttemptId
from pdpool_connector.protocol.outcome import Cause
from pdpool_connector.protocol.states import PrefillState


class InvalidSendError(Exception):
    """A send of the engine's that does not fit the ones before, or what decode has offered."""


class Piece(NamedTuple):
    """Pages of one send that decode wants: page ids of ours and of decode's, as bytes, and the two aux slots."""

    source: bytes
    target: bytes
    aux: tuple[int, int] | None
    last: bool


@dataclass(slots=True, eq=False)
class Exchange:
    """One hand-off: the engine's `request`, decode's `offer`, or both.

    `sends` wait for the offer; `next_page` is where the next one has to begin. `begun`, `closed`: the first, the last
    one has been cut.
    """

    serial: int
    room: int
    sibling: int
    state: PrefillState | None = None
    request: OpenRequest | None = None
    offer: f.Open | None = None
    sends: deque[SendPages] = field(default_factory=deque)
    next_page: int | None = None
    begun: bool = False
    closed: bool = False
    in_flight: set[int] = field(default_factory=set)
    unsettled: bool = False
    bytes_moved: int = 0
    cause: Cause | None = None
    message: str = ""
    retry_s: float = 0.0

    @property
    def key(self) -> tuple[int, int]:
        """Room and sibling, by which the halves find each other."""
        return (self.room, self.sibling)

    @property
    def attempt(self) -> AttemptId:
        """The attempt that has claimed it; only asked of exchanges that have one."""
        assert self.offer is not None
        return self.offer.attempt

    @property
    def pages(self) -> int:
        """How many pages decode has asked for, and so how many of ours are read for it."""
        return _count(self.offer.pages) if self.offer is not None else 0

    @property
    def quiet(self) -> bool:
        """True when none of its writes can be under way."""
        return not self.in_flight and not self.unsettled

    def queue(self, send: SendPages) -> None:
        """Take a send in. Raises InvalidSendError when it does not continue the one before."""
        if self.closed or (self.sends and self.sends[-1].last):
            raise InvalidSendError("pages were sent after the last")
        if self.next_page is not None and send.start != self.next_page:
            raise InvalidSendError(f"send starts at page {send.start}, the one before ended at {self.next_page}")
        self.next_page = send.start + _count(send.pages)
        self.sends.append(send)

    def cut(self) -> Iterator[Piece]:
        """Take the queued sends out, less the pages that decode holds already; the offer must be there.

        Raises InvalidSendError when a send leaves a gap at the front, or does not end where decode's pages end.
        """
        assert self.offer is not None
        first = self.offer.prefix_pages
        end = first + _count(self.offer.pages)
        while self.sends:
            send = self.sends.popleft()
            stop = send.start + _count(send.pages)
            if stop > end or (send.last and stop != end):
                sent = f"up to {stop}{', the last' if send.last else ''}"
                raise InvalidSendError(f"prefill sends pages {sent}; decode offered {first}..{end}")
            if not self.begun and send.start > first:
                raise InvalidSendError(f"first send starts at page {send.start}, decode holds only the first {first}")
            skipped = max(first - send.start, 0) * PAGE_ID_BYTES
            at = max(send.start - first, 0) * PAGE_ID_BYTES
            source = send.pages[skipped:]
            aux = (send.aux_slot, self.offer.aux_slot) if send.aux_slot is not None else None
            self.begun, self.closed = True, send.last
            yield Piece(source, self.offer.pages[at : at + len(source)], aux, send.last)


def _count(pages: bytes) -> int:
    return len(pages) // PAGE_ID_BYTES
