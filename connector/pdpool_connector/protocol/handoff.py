"""One hand-off at prefill: the engine's request, and one exchange with each decode rank that opened an attempt for it.

The request and the attempts are the *halves* of a hand-off. They come in any order and are matched in `rooms.py`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import OpenRequest, SendPages
from pdpool_connector.protocol.frames import PAGE_ID_BYTES, AttemptId
from pdpool_connector.protocol.release import prefill_may_release
from pdpool_connector.protocol.states import PREFILL_ENDED, PREFILL_LIVE, PREFILL_PHASES, PrefillState
from pdpool_connector.protocol.status import JUST_OPENED, Cause, TransferStatus

S = PrefillState


class InvalidSendError(Exception):
    """A send of the engine does not continue the one before, or does not fit what decode offered."""


class PageRun(NamedTuple):
    """What one send has for one decode rank, ready to be written.

    `source` and `target`: ids of our pages and of the peer's, as many. `aux`: our row and the peer's. `state`: for
    each state pool our item ids and the peer's.
    """

    source: bytes
    target: bytes
    aux: tuple[int, int] | None
    state: tuple[tuple[bytes, bytes], ...]
    last: bool

    @property
    def empty(self) -> bool:
        """True when there is nothing to write."""
        return not self.source and self.aux is None and not any(ours for ours, _ in self.state)


@dataclass(slots=True, eq=False)
class HandOff:
    """The engine's request and its exchanges.

    `request`: None until the engine has sent it. `decode_id`: the request id that decode gives, None until an attempt
    has come. `rank_count`: how many decode ranks take part, 0 until an attempt has come. `ranks`: those whose attempt
    has come or has ended unseen. `exchanges`: by rank index. `unclaimed`: an exchange in WAITING that stands for the
    ranks which have not come; None while there is no request, and when all ranks have come. `prompt`: of all halves,
    empty while no half has given one. `sends`: all sends of the engine; each exchange cuts its own runs from them.
    `deadline`: when the hand-off ends although all halves have come. `engine_ran_s`: see `EngineRan`, at its first
    event after an attempt came without the request.
    """

    serial: int
    room: int
    prompt: bytes = b""
    request: OpenRequest | None = None
    decode_id: str | None = None
    rank_count: int = 0
    ranks: set[int] = field(default_factory=set)
    exchanges: "dict[int, RankExchange]" = field(default_factory=dict)
    unclaimed: "RankExchange | None" = None
    sends: list[SendPages] = field(default_factory=list)
    deadline: float = float("inf")
    engine_ran_s: float | None = None
    state: PrefillState | None = None
    cause: Cause | None = None
    message: str = ""
    reported: TransferStatus = JUST_OPENED

    @property
    def all(self) -> "list[RankExchange]":
        """Every exchange, with the one that stands for the missing ranks."""
        claimed = list(self.exchanges.values())
        return claimed if self.unclaimed is None else [*claimed, self.unclaimed]

    @property
    def joint_state(self) -> PrefillState:
        """The state of all exchanges together, by `aggregate`."""
        parts = self.all
        if len(parts) == 1 and (only := parts[0].state) is not None:
            return only
        return aggregate(exchange.state for exchange in parts if exchange.state is not None)

    @property
    def lacks_ranks(self) -> bool:
        """True while an attempt of some decode rank has not come."""
        return not self.rank_count or len(self.ranks) < self.rank_count

    @property
    def complete(self) -> bool:
        """True when request and attempts of all ranks have come."""
        return self.request is not None and not self.lacks_ranks

    def add_rank(self, frame: f.RequestFrame) -> None:
        """A decode rank has opened its attempt, or has ended it unseen."""
        self.decode_id, self.rank_count = frame.request_id, frame.rank_count
        self.ranks.add(frame.rank_index)
        self.prompt = self.prompt or frame.prompt

    def add_send(self, send: SendPages) -> None:
        """Queue a send of the engine. Raises InvalidSendError when it does not continue the one before."""
        before = self.sends[-1] if self.sends else None
        if before is not None and before.last:
            raise InvalidSendError("pages were sent after the last")
        if send.state and not send.last:
            raise InvalidSendError("state items were sent before the last pages; they go with them")
        if before is not None and send.start != (end := before.start + _count(before.pages)):
            raise InvalidSendError(f"send starts at page {send.start}, the one before ended at {end}")
        self.sends.append(send)

    def clear(self) -> None:
        """Drop what only a live hand-off needs. Without the cycle to its exchanges its memory is free at once."""
        self.exchanges.clear()
        self.sends.clear()
        self.unclaimed = None

    def status(self) -> TransferStatus:
        """What the engine sees of all exchanges together."""
        assert self.state is not None
        prefix_pages, bytes_moved, releasable = None, 0, True
        for exchange in self.all:
            bytes_moved += exchange.bytes_moved
            releasable = releasable and prefill_may_release(exchange)
            if (offer := exchange.offer) is not None and (prefix_pages is None or offer.prefix_pages < prefix_pages):
                prefix_pages = offer.prefix_pages
        phase = PREFILL_PHASES[self.state]
        return TransferStatus(phase, self.cause, self.message, prefix_pages or 0, bytes_moved, releasable)


@dataclass(slots=True, eq=False)
class RankExchange:
    """What one decode rank has opened and offered, and what is on its way there.

    `taken`: how many of the hand-off's sends are cut for it. `closed`: the last send is among them. `in_flight`:
    writes that have not ended. `unproven`: a write ended, and the transfer backend cannot say whether its bytes are
    still in flight. `checksums`: of the writes that have ended.
    """

    handoff: HandOff
    state: PrefillState | None = None
    opened: f.Open | None = None
    offer: f.Offer | None = None
    taken: int = 0
    closed: bool = False
    in_flight: set[int] = field(default_factory=set)
    unproven: bool = False
    checksums: list[int | None] = field(default_factory=list)
    bytes_moved: int = 0
    retry_s: float = 0.0

    @property
    def room(self) -> int:
        """The hand-off's room."""
        return self.handoff.room

    @property
    def attempt(self) -> AttemptId:
        """The attempt that claimed this exchange; only asked of claimed ones."""
        assert self.opened is not None
        return self.opened.attempt

    @property
    def unsettled_peers(self) -> tuple[str, ...]:
        """The decode process for which our pages may still be read."""
        return () if self.settled else (self.attempt.decode,)

    @property
    def pages(self) -> int:
        """How many pages decode has offered, which is how many of ours are read for it."""
        return _count(self.offer.pages) if self.offer is not None else 0

    @property
    def state_items(self) -> tuple[int, ...]:
        """The same for the items of each state pool."""
        return tuple(map(_count, self.offer.state)) if self.offer is not None else ()

    @property
    def checksum(self) -> int | None:
        """Sum of the checksums of its writes modulo 2**63; None when a write has none."""
        known = [one for one in self.checksums if one is not None]
        return sum(known) & (1 << 63) - 1 if known and len(known) == len(self.checksums) else None

    @property
    def settled(self) -> bool:
        """True when no write of ours reads pages for it."""
        return not self.in_flight and not self.unproven

    def cut(self) -> Iterator[PageRun]:
        """Take the sends that are not taken yet, without the pages that decode already holds.

        Raises:
            InvalidSendError: the first send leaves a gap, the last send ends elsewhere than the offer, or the number of
                state items differs.
        """
        offer, sends = self.offer, self.handoff.sends
        assert offer is not None
        first = offer.prefix_pages
        end = first + _count(offer.pages)
        while self.taken < len(sends):
            send = sends[self.taken]
            stop = send.start + _count(send.pages)
            if stop > end or (send.last and stop != end):
                sent = f"{'the last send' if send.last else 'a send'} of prefill has {_inclusive(send.start, stop)}"
                raise InvalidSendError(f"{sent}, decode offered {_inclusive(first, end)}")
            if not self.taken and send.start > first:
                sent = f"the first send of prefill has {_inclusive(send.start, stop)}"
                raise InvalidSendError(f"{sent}, decode offered {_inclusive(first, end)}: pages between are missing")
            skipped = max(first - send.start, 0) * PAGE_ID_BYTES
            at = max(send.start - first, 0) * PAGE_ID_BYTES
            source = send.pages[skipped:]
            aux = (send.aux_slot, offer.aux_slot) if send.aux_slot is not None and offer.aux_slot >= 0 else None
            state = _paired_state(send, offer) if send.last else ()
            self.taken, self.closed = self.taken + 1, send.last
            yield PageRun(source, offer.pages[at : at + len(source)], aux, state, send.last)


def aggregate(states: Iterable[PrefillState]) -> PrefillState:
    """The state of a hand-off whose exchanges are in `states`: that of the exchange which is furthest behind.

    One failed exchange outweighs all others. Once a rank is SENDING or DONE, the hand-off is SENDING, unless a rank has
    not offered memory yet.
    """
    present = frozenset(states)
    if len(present) == 1:
        return next(iter(present))
    if S.HELD in present:
        return S.HELD
    if present & {S.QUIESCING, S.FAILED}:
        return S.FAILED if present <= PREFILL_ENDED else S.QUIESCING
    if present & {S.SENDING, S.DONE}:
        present = present - {S.READY, S.DONE} | {S.SENDING}
    return next(state for state in PREFILL_LIVE if state in present)


def _paired_state(send: SendPages, offer: f.Offer) -> tuple[tuple[bytes, bytes], ...]:
    sent, offered = list(map(_count, send.state)), list(map(_count, offer.state))
    if sent != offered:
        raise InvalidSendError(f"prefill sends state items {sent}, one number for each pool; decode offered {offered}")
    return tuple(zip(send.state, offer.state, strict=True))


def _inclusive(start: int, stop: int) -> str:
    """Pages `start`.. below `stop` for a message."""
    return f"pages {start} to {stop - 1} (inclusive)" if start < stop else f"no pages from page {start} on"


def _count(ids: bytes) -> int:
    return len(ids) // PAGE_ID_BYTES
