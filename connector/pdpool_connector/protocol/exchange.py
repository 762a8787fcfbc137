"""One hand-off as prefill sees it: the engine's request, and one exchange with each decode rank that asks for it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import OpenRequest, SendPages
from pdpool_connector.protocol.frames import PAGE_ID_BYTES, AttemptId
from pdpool_connector.protocol.states import PREFILL_PHASES, PrefillState
from pdpool_connector.protocol.status import Cause, TransferStatus

S = PrefillState
ENDED = frozenset({S.DONE, S.FAILED})
FAILING = frozenset({S.DRAINING, S.HELD, S.FAILED})


class InvalidSendError(Exception):
    """A send of the engine's that does not fit the ones before, or what decode has offered."""


class Piece(NamedTuple):
    """What decode wants of one send: ids of our pages and of decode's, aux slots and state items in the same order.

    `start`: the logical page that comes first.
    """

    start: int
    source: bytes
    target: bytes
    aux: tuple[int, int] | None
    state: tuple[bytes, bytes]
    last: bool

    @property
    def empty(self) -> bool:
        """True when there is nothing to move."""
        return not self.source and self.aux is None and not self.state[0]


@dataclass(slots=True, eq=False)
class HandOff:
    """The engine's `request`, and the exchanges of its parts.

    `parts`: how many there are, 0 until a decode rank has told it; `offered_as`: the request id that decode's ranks
    give, None until then. `exchanges`: claimed ones by part. `unclaimed`: waits for whichever part comes next, while
    the request is there and some part is not. `came`: parts that need not be waited for, because they have opened or
    were aborted unseen.
    `sends`: all of them, for each exchange cuts its own pieces from them, in its own time. `prompt`: of all its halves;
    empty while none has told it.
    """

    serial: int
    room: int
    sibling: int
    prompt: bytes = b""
    request: OpenRequest | None = None
    parts: int = 0
    offered_as: str | None = None
    exchanges: "dict[int, Exchange]" = field(default_factory=dict)
    unclaimed: "Exchange | None" = None
    came: set[int] = field(default_factory=set)
    sends: list[SendPages] = field(default_factory=list)
    state: PrefillState | None = None
    cause: Cause | None = None
    message: str = ""
    reported: TransferStatus | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Room and sibling, by which the halves find each other."""
        return (self.room, self.sibling)

    @property
    def all(self) -> "list[Exchange]":
        """Every exchange, the one that waits for its part included."""
        claimed = list(self.exchanges.values())
        return claimed if self.unclaimed is None else [*claimed, self.unclaimed]

    @property
    def incomplete(self) -> bool:
        """True while some part has not come, or nobody knows how many there are."""
        return len(self.came) < self.parts or not self.parts

    def awaits(self, frame: f.Open | f.Expect | f.Abort | f.Drained) -> bool:
        """True when `frame` can be the word of a part that has not come yet."""
        fits = self.parts in (0, frame.parts) and frame.part not in self.came
        return fits and self.offered_as in (None, frame.request_id)

    def note(self, frame: f.Open | f.Expect | f.Abort | f.Drained) -> None:
        """A part that was awaited has come, or will not."""
        self.parts, self.offered_as = frame.parts, frame.request_id
        self.came.add(frame.part)

    def queue(self, send: SendPages) -> None:
        """Take a send in. Raises InvalidSendError when it does not continue the one before."""
        before = self.sends[-1] if self.sends else None
        if before is not None and before.last:
            raise InvalidSendError("pages were sent after the last")
        if send.state and not send.last:
            raise InvalidSendError("state items were sent before the last pages; they go with them")
        if before is not None and send.start != (end := before.start + _count(before.pages)):
            raise InvalidSendError(f"send starts at page {send.start}, the one before ended at {end}")
        self.sends.append(send)

    def let_go(self) -> None:
        """It has ended and been told of: without the way back from its exchanges its memory is free at once."""
        self.exchanges.clear()
        self.unclaimed = None

    def status(self) -> TransferStatus:
        """What the engine is told of all of it together."""
        assert self.state is not None
        prefix_pages = bytes_moved = 0
        for number, exchange in enumerate(self.exchanges.values()):
            mine = exchange.open.prefix_pages
            prefix_pages = min(prefix_pages, mine) if number else mine
            bytes_moved += exchange.bytes_moved
        phase, releasable = PREFILL_PHASES[self.state], self.state in ENDED
        return TransferStatus(phase, self.cause, self.message, prefix_pages, bytes_moved, releasable)

    def aggregate(self) -> PrefillState:
        """Its state, from those of its exchanges."""
        states = [one.state for one in self.all if one.state is not None]
        return states[0] if len(states) == 1 else aggregate(states)


@dataclass(slots=True, eq=False)
class Exchange:
    """One part of a hand-off: what one decode rank has offered, and what is on its way there.

    `taken`: how many of the hand-off's sends have been cut for it. `closed`: the last one is among them. WRITE:
    `in_flight` are the writes under way, `unsettled` says that one ended without anybody knowing whether it has,
    `sums` are the checksums of those that ended.
    READ: `exposed` says that decode may read pages of ours, `announced` how many pieces it was told of, `unnoted` those
    of them that it has not taken note of, `heard` that it has said how the attempt ended.
    """

    handoff: HandOff
    state: PrefillState | None = None
    offer: f.Open | None = None
    taken: int = 0
    closed: bool = False
    in_flight: set[int] = field(default_factory=set)
    unsettled: bool = False
    sums: list[int | None] = field(default_factory=list)
    exposed: bool = False
    announced: int = 0
    unnoted: list[Piece] = field(default_factory=list)
    heard: bool = False
    bytes_moved: int = 0
    retry_s: float = 0.0

    @property
    def open(self) -> f.Open:
        """Decode's offer; only asked of exchanges that have one."""
        assert self.offer is not None
        return self.offer

    @property
    def room(self) -> int:
        """The hand-off's room."""
        return self.handoff.room

    @property
    def sibling(self) -> int:
        """The hand-off's index among those that share the room."""
        return self.handoff.sibling

    @property
    def prompt(self) -> bytes:
        """The hand-off's prompt."""
        return self.handoff.prompt

    @property
    def attempt(self) -> AttemptId:
        """The attempt that has claimed it."""
        assert self.offer is not None
        return self.offer.attempt

    @property
    def loud(self) -> tuple[str, ...]:
        """The process that is not proved quiet, or to which we are not: its decode."""
        return (self.attempt.decode,)

    @property
    def pages(self) -> int:
        """How many pages decode has asked for, and so how many of ours are read for it."""
        return _count(self.offer.pages) if self.offer is not None else 0

    @property
    def state_items(self) -> int:
        """The same of items of the state pool."""
        return _count(self.offer.state) if self.offer is not None else 0

    @property
    def checksum(self) -> int | None:
        """The sum of its writes' checksums modulo 2**63; None when not every one of them has any."""
        known = [part for part in self.sums if part is not None]
        return sum(known) & (1 << 63) - 1 if known and len(known) == len(self.sums) else None

    @property
    def quiet(self) -> bool:
        """True when nothing can touch our pages for it: no write of ours, no read of decode's."""
        return not self.in_flight and not self.unsettled and not self.exposed

    def cut(self) -> Iterator[Piece]:
        """Take the queued sends that have not been taken, less the pages that decode holds; the offer must be there.

        Raises InvalidSendError when a send leaves a gap at the front, or the last ends elsewhere than decode's offer.
        """
        offer, sends = self.open, self.handoff.sends
        first = offer.prefix_pages
        end = first + _count(offer.pages)
        while self.taken < len(sends):
            send = sends[self.taken]
            stop = send.start + _count(send.pages)
            if stop > end or (send.last and stop != end):
                sent = f"up to {stop}{', the last' if send.last else ''}"
                raise InvalidSendError(f"prefill sends pages {sent}; decode offered {first}..{end}")
            if not self.taken and send.start > first:
                raise InvalidSendError(f"first send starts at page {send.start}, decode holds only the first {first}")
            if send.last and len(send.state) != len(offer.state):
                items = f"{_count(send.state)} state items; decode offered {_count(offer.state)}"
                raise InvalidSendError(f"prefill sends {items}")
            skipped = max(first - send.start, 0) * PAGE_ID_BYTES
            at = max(send.start - first, 0) * PAGE_ID_BYTES
            source = send.pages[skipped:]
            aux = (send.aux_slot, offer.aux_slot) if send.aux_slot is not None and offer.aux_slot >= 0 else None
            self.taken, self.closed = self.taken + 1, send.last
            state = (send.state, offer.state) if send.last else (b"", b"")
            yield Piece(max(send.start, first), source, offer.pages[at : at + len(source)], aux, state, send.last)


def aggregate(states: Iterable[PrefillState]) -> PrefillState:
    """The state of a hand-off whose exchanges are in `states`: that of the part that is furthest behind.

    One part that has failed outweighs what became of the others, and a part that is done waits for them.
    """
    present = frozenset(states)
    if len(present) == 1:
        return next(iter(present))
    if present & FAILING:
        return S.HELD if S.HELD in present else S.FAILED if present <= ENDED else S.DRAINING
    if present & {S.WAITING, S.PARKED}:
        return S.WAITING if S.WAITING in present else S.PARKED
    return S.SENDING if present & {S.SENDING, S.DONE} else S.READY


def _count(pages: bytes) -> int:
    return len(pages) // PAGE_ID_BYTES
