"""Prefill's side of the hand-off, sans I/O, up to the point where pages move: how its halves meet.

The router posts a request to both sides at once, so prefill learns of it twice, in either order: from its own engine
(a request) and from decode (an attempt for each of decode's ranks that this rank serves). A `HandOff` is what has come
of it.
"""

from abc import abstractmethod
from itertools import count

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.ending import LIVE, EndingMachine
from pdpool_connector.protocol.events import (
    Fenced,
    OpenRequest,
    PeerLost,
    Received,
    Report,
    SendPages,
)
from pdpool_connector.protocol.exchange import Exchange, HandOff, InvalidSendError
from pdpool_connector.protocol.missed import Missed, PartFrame
from pdpool_connector.protocol.states import PrefillState, Trigger
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.tombstones import forgotten

S = PrefillState
Refusal = tuple[Cause, str]


class MeetingMachine(EndingMachine):
    """What both directions share: requests and attempts, and which of them belong together."""

    def __init__(self, incarnation: str, timing: Timeouts | None = None) -> None:
        super().__init__(incarnation, timing)
        self._serials = count()
        self._on_event |= {OpenRequest: self._on_request, SendPages: self._on_send_pages}
        self._on_frame |= {f.Open: self._on_open, f.Expect: self._on_expect, f.Query: self._on_query}
        self._on_timer |= {"unexpected": self._on_unexpected}

    # --- What each direction does in its own way ---

    @abstractmethod
    def _pump(self, exchange: Exchange) -> None:
        """Do what the queued sends ask for, now that the exchange has both halves."""

    @abstractmethod
    def _answer(self, exchange: Exchange) -> None:
        """Say to decode how a known attempt stands."""

    # --- The two halves, and how they meet ---

    def _on_received(self, event: Received) -> None:
        """Drop what does not come from the attempt's own decode, or mixes attempts up, before anything looks at it."""
        frame = event.frame
        known = self._by_attempt.get(frame.attempt) or self._graves.get(frame.attempt)
        if frame.attempt.decode != frame.sender:
            self._ignore("stranger", f"{type(frame).__name__} for attempt {frame.attempt} from {frame.sender[:8]}")
        elif known is not None and (known.room, known.sibling) != (frame.room, frame.sibling):
            self._ignore("mismatch", f"attempt {frame.attempt} is for room {known.room}, not {frame.room}")
        else:
            super()._on_received(event)

    def _on_request(self, event: OpenRequest) -> None:
        key = (event.room, event.sibling)
        there = self._rooms.find(*key, event.prompt)
        same = there is not None and there.request is None and there.offered_as == event.request_id
        missed = None if same else self._missed.meet_request(key, event)
        refusal = event.refused or self._unwelcome()
        if missed is not None:
            self._refuse_request(event, missed.cause, missed.message)
        elif there is not None and there.request is not None:
            why = f"room {event.room} sibling {event.sibling} is in use by request {there.request.request_id!r}"
            self._refuse_request(event, event.refused_as if refusal else Cause.CONFLICT, refusal or why)
        else:
            self._admit(there or HandOff(next(self._serials), event.room, event.sibling), event, refusal)

    def _unwelcome(self) -> str:
        """Why no request is taken, if so."""
        if self.draining:
            return "prefill is draining and takes no new requests"
        limit = self.timing.max_attempts
        return f"prefill has {limit} hand-offs under way, which is its limit" if len(self._by_handle) >= limit else ""

    def _admit(self, handoff: HandOff, event: OpenRequest, refusal: str) -> None:
        """Take a request in; one that is refused ends at once, so that decode is told, whether it has come or will."""
        handoff.request = event
        self._by_handle[event.handle] = handoff
        self._rooms.enter(handoff, event.prompt)
        self._timers.set(("life", handoff), self._now + event.deadline_s)
        parked = list(handoff.exchanges.values())
        self._await_parts(handoff)
        for exchange in parked:
            self._move(exchange, Trigger.REQUESTED)
        if refusal:
            self._fail(handoff, event.refused_as, refusal)
            return
        if not parked:
            self._await_word(handoff)
        for exchange in parked:
            self._met(exchange)
        self._report(handoff)

    def _await_word(self, handoff: HandOff) -> None:
        """Some decode is to say soon that it has the request, and that it has it still."""
        if self.timing.expected_within_s is not None:
            self._timers.set(("unexpected", handoff), self._now + self.timing.expected_within_s)

    def _await_parts(self, handoff: HandOff) -> None:
        """One exchange waits on behalf of all parts that have not come."""
        if handoff.incomplete:
            handoff.unclaimed = Exchange(handoff)
            self._move(handoff.unclaimed, Trigger.REQUESTED)

    def _refuse_request(self, event: OpenRequest, cause: Cause, message: str) -> None:
        refused = TransferStatus(phase=Phase.FAILED, cause=cause, message=message, releasable=True)
        self._effects.append(Report(event.handle, refused))

    # --- What decode expects ---

    def _on_expect(self, frame: f.Expect) -> None:
        there = self._rooms.find(frame.room, frame.sibling, frame.prompt)
        if there is not None and not there.awaits(frame):
            self._ignore("stale", f"Expect for room {frame.room} sibling {frame.sibling}, which has been opened")
            return
        if there is None and self._parted.repeats(frame):
            self._ignore("stale", f"Expect for room {frame.room} sibling {frame.sibling}, which has ended")
            return
        self._parted.meet(frame)
        self._expected.note(frame, self._now)
        if there is not None and there.request is not None and not there.exchanges:
            self._await_word(there)

    def _on_unexpected(self, handoff: HandOff) -> None:
        """A decode that cannot say that it has the request may have it all the same."""
        if any(version < f.EXPECT_VERSION for version in self._versions.values()):
            self._await_word(handoff)
        else:
            seconds = f"{self.timing.expected_within_s:g} s"
            self._fail(handoff, Cause.TIMED_OUT, f"no decode engine has announced the request for {seconds}")

    def _on_lost(self, event: PeerLost) -> None:
        super()._on_lost(event)
        self._lose_expected(event.peer, event.message)

    def _on_fenced(self, event: Fenced) -> None:
        super()._on_fenced(event)
        self._lose_expected(event.peer, f"decode was fenced: {event.proof}")

    def _lose_expected(self, peer: str, message: str) -> None:
        """What nobody else will open ends; a decode that was only cut off is told so when it comes back to it."""
        for frame in self._expected.take(peer):
            lost = (Cause.PEER_LOST, f.text(message))
            ended = lost if self._expected.elsewhere(frame) else self._lose_part(frame, *lost)
            self._parted.note(frame, ended, self._now)

    # --- Attempts ---

    def _on_open(self, offer: f.Open) -> None:
        self._expected.met(offer)
        if (known := self._by_attempt.get(offer.attempt)) is not None:
            self._answer(known)
            return
        if self._graves.get(offer.attempt) is not None:
            self._verdicts.answer(offer, self._now)
            self._ignore("stale", f"Open for attempt {offer.attempt}, which has ended")
            return
        there = self._rooms.find(offer.room, offer.sibling, offer.prompt)
        if there is not None and _supersedes(offer, there):
            self._fail(there, Cause.SUPERSEDED, f"decode opened the request again as attempt {offer.attempt}")
            there = None
        if (refusal := self._refusal(offer, there)) is not None:
            self._bury(offer, *refusal)
        elif (full := self._full(offer)) is not None:
            self._bury(offer, Cause.REFUSED, full)
            self._lose_part(offer, Cause.REFUSED, full)
        else:
            self._take(offer, there)

    def _met_missed(self, frame: PartFrame, there: HandOff | None) -> Missed | None:
        """The hand-off that this attempt belongs to, if that has ended already."""
        key = (frame.room, frame.sibling)
        if there is not None and frame.request_id in (there.offered_as, there.request and there.request.request_id):
            return self._missed.meet_superseded(key, frame)
        return self._missed.meet_part(key, frame)

    def _take(self, offer: f.Open, there: HandOff | None) -> None:
        handoff = there or HandOff(next(self._serials), offer.room, offer.sibling)
        exchange = handoff.unclaimed or Exchange(handoff)
        handoff.unclaimed = None
        self._timers.cancel(("unexpected", handoff))
        exchange.offer = offer
        handoff.exchanges[offer.part] = exchange
        handoff.note(offer)
        self._rooms.enter(handoff, offer.prompt)
        self._by_attempt[offer.attempt] = exchange
        self._of_peer.setdefault(offer.attempt.decode, {})[offer.attempt] = exchange
        self._offered[offer.attempt.decode] += offer.id_bytes
        if there is None:
            self._timers.set(("life", handoff), self._now + min(offer.deadline_s, self.timing.meet_s))
        if handoff.request is not None:
            self._await_parts(handoff)
        self._move(exchange, Trigger.OPENED)
        if exchange.state is S.PARKED:
            self._answer(exchange)
        else:
            self._met(exchange)
            self._report(handoff)

    def _refusal(self, offer: f.Open, there: HandOff | None) -> Refusal | None:
        """Why an offer cannot be taken."""
        if offer.part >= offer.parts:
            return Cause.INVALID, f"part is {offer.part} of parts {offer.parts}: it must be less than parts"
        if self._graves.stale(offer.attempt):
            return Cause.REFUSED, f"attempt {offer.attempt} is older than one that is already forgotten"
        ended = self._parted.meet(offer)
        if (missed := self._met_missed(offer, there)) is not None:
            return missed.cause, missed.message
        if (there is None or there.request is None) and ended is not None:
            return ended
        if there is not None and (conflict := _conflict(offer, there)) is not None:
            return conflict
        if self.draining and there is None:
            return Cause.REFUSED, "prefill is draining and takes no new requests"
        return None

    def _full(self, offer: f.Open) -> str | None:
        """Why no further attempt of this decode can be taken, if so."""
        peer = offer.attempt.decode
        most, live, of_peer = self.timing.max_attempts, len(self._by_attempt), len(self._of_peer.get(peer, ()))
        if self._graves.full(peer, reserved=live, reserved_of_peer=of_peer):
            return "prefill remembers as many ended attempts as it can; try again in a few seconds"
        if live >= most or of_peer >= most // 2:
            return f"prefill has as many attempts under way as it takes ({most}, half of it for one peer)"
        most = self.timing.max_offered_bytes
        if self._offered.total() + offer.id_bytes > most or self._offered[peer] + offer.id_bytes > most // 2:
            return f"prefill keeps as many ids of pages as it takes ({most // 4}, half of it for one peer)"
        return None

    def _met(self, exchange: Exchange) -> None:
        self._answer(exchange)
        self._pump(exchange)

    def _on_send_pages(self, event: SendPages) -> None:
        handoff = self._by_handle.get(event.handle)
        if handoff is None or handoff.state not in LIVE:
            return
        try:
            handoff.queue(event)
        except InvalidSendError as error:
            self._fail(handoff, Cause.INVALID, str(error))
            return
        for exchange in list(handoff.exchanges.values()):
            self._pump(exchange)

    # --- What decode says and is told ---

    def _abort_unseen(self, frame: f.Abort | f.Drained, cause: Cause, *, heard: bool = False) -> None:
        """The end has overtaken its attempt."""
        self._expected.met(frame)
        self._bury(frame, cause, frame.message, heard=heard)
        if self._parted.meet(frame) is None:
            self._lose_part(frame, cause, frame.message)

    def _lose_part(self, frame: PartFrame, cause: Cause, message: str) -> Refusal:
        """A part came and cannot be had: that ends the hand-off that it belongs to, or will when that comes.

        Returns why it ends, which is another reason where it had before.
        """
        there = self._rooms.find(frame.room, frame.sibling, frame.prompt)
        if (ended := self._met_missed(frame, there)) is not None:
            return ended.cause, ended.message
        message = f.text(message)
        if there is not None and there.awaits(frame):
            there.note(frame)
            self._fail(there, cause, message)
        else:
            part = (frame.prompt, frame.parts, {frame.part})
            missed = Missed(frame.request_id, cause, message, True, *part)
            self._missed.remember((frame.room, frame.sibling), missed, frame.sender, self._now)
        return cause, message

    def _on_query(self, frame: f.Query) -> None:
        exchange = self._by_attempt.get(frame.attempt)
        if exchange is not None:
            self._answer(exchange)
        elif not self._verdicts.answer(frame, self._now):
            self._remember(forgotten(frame))


def _supersedes(newer: f.Open, handoff: HandOff) -> bool:
    """The same decode process opened the same part of the same request again, as it does after a retraction."""
    exchange = handoff.exchanges.get(newer.part)
    if exchange is None:
        return False
    older = exchange.open
    return (
        newer.attempt.decode == older.attempt.decode
        and newer.attempt.number > older.attempt.number
        and newer.request_id == older.request_id
    )


def _conflict(offer: f.Open, handoff: HandOff) -> Refusal | None:
    """Why an offer does not belong to the hand-off that has its room."""
    claimed = handoff.exchanges.get(offer.part) or next(iter(handoff.exchanges.values()), None)
    if claimed is None or handoff.awaits(offer):
        return None
    if claimed.open.request_id == offer.request_id and claimed.open.parts != offer.parts:
        what = f"parts is {offer.parts} in this attempt and {claimed.open.parts} in {claimed.attempt}"
        return Cause.INVALID, f"{what}, which is for the same request"
    return Cause.CONFLICT, f"room {offer.room} sibling {offer.sibling} is in use by attempt {claimed.attempt}"
