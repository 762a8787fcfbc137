"""Prefill's side of the hand-off, sans I/O, up to the point where pages move: how halves meet, and how all of it ends.

The router posts a request to both sides at once, so prefill learns of it twice, in either order: from its own engine
(a request) and from decode (an attempt for each of decode's ranks that this rank serves). A `HandOff` is what has come
of it. It is found by handle, its exchanges by attempt, and, while something may still come, by room and sibling. Each
exchange leaves all tables in `_finalize`, which every end passes through once; what remains is a tombstone that answers
late frames. What fails in one exchange fails the others of its hand-off.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import count

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Drain,
    Fenced,
    OpenRequest,
    PeerLost,
    PeerReady,
    Received,
    Report,
    SendPages,
    Shutdown,
)
from pdpool_connector.protocol.exchange import ENDED, Exchange, HandOff, InvalidSendError, aggregate
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.machine import Machine
from pdpool_connector.protocol.missed import Missed, MissedHalves
from pdpool_connector.protocol.outcome import Cause, Phase, TransferStatus
from pdpool_connector.protocol.states import FAILURES, Cue, PrefillState, TransitionError
from pdpool_connector.protocol.timing import Timing
from pdpool_connector.protocol.verdicts import Tombstone, Verdicts, forgotten

S = PrefillState
PREFILL_LABELS = {
    S.WAITING: ("waiting", "prefill_bootstrap"),
    S.PARKED: ("parked",),
    S.READY: ("ready", "prefill_bootstrap"),
    S.SENDING: ("sending", "prefill_inflight"),
    S.DRAINING: ("draining",),
    S.HELD: ("held",),
}
"""Which states the public queues span."""

LIVE = frozenset({S.WAITING, S.PARKED, S.READY, S.SENDING})
Refusal = tuple[Cause, str]


class MeetingMachine(Machine[PrefillState], ABC):
    """What both directions share; `_transitions` is the table of the one that it is."""

    _transitions: Mapping[tuple[PrefillState | None, Cue], PrefillState]

    def __init__(self, incarnation: str, timing: Timing | None = None) -> None:
        super().__init__(incarnation, PREFILL_LABELS, timing or Timing())
        self._serials = count()
        self._by_handle: dict[int, HandOff] = {}
        self._by_key: dict[tuple[int, int], HandOff] = {}
        self._by_attempt: dict[AttemptId, Exchange] = {}
        self._of_peer: dict[str, dict[AttemptId, Exchange]] = {}
        self._verdicts = Verdicts(self.timing, self._timers, self._send)
        self._graves = self._verdicts.graves
        self._missed = MissedHalves(self.timing.max_attempts, self.timing.verdict_s, self._timers)
        self._on_event |= {
            OpenRequest: self._on_request,
            SendPages: self._on_send_pages,
            AbortTransfer: self._on_abort_transfer,
            Fenced: self._on_fenced,
            Shutdown: self._on_shutdown,
        }
        self._on_frame |= {f.Open: self._on_open, f.Ack: self._on_ack, f.Query: self._on_query}
        self._on_timer |= {
            "life": self._on_life_over,
            "drain": self._on_drain_over,
            "verdict": lambda key: self._verdicts.tell(key, self._now),
            "grave": self._verdicts.forget,
            "missed": lambda table: table.expire(self._now),
            "peer": self._on_peer_long_gone,
        }

    @property
    def rows(self) -> int:
        """Everything this machine keeps about hand-offs, remembered ends included; 0 when nothing is left behind."""
        handoffs = [*self._by_handle.values(), *self._by_key.values()]
        handoffs += [exchange.handoff for exchange in self._by_attempt.values()]
        return len({handoff.serial for handoff in handoffs}) + len(self._graves) + len(self._missed)

    @property
    def tombstones(self) -> int:
        """How many ended attempts are remembered."""
        return len(self._graves)

    def exchanges_of(self, peer: str) -> list[Exchange]:
        """What is under way with a peer, ends not yet proved quiet included."""
        return list(self._of_peer.get(peer, {}).values())

    def held(self) -> list[Exchange]:
        """Exchanges whose source pages stay back until a proof of quiet."""
        if not self.census.count("held"):
            return []
        return [exchange for exchange in self._by_attempt.values() if exchange.state is S.HELD]

    # --- What each direction does in its own way ---

    @abstractmethod
    def _pump(self, exchange: Exchange) -> None:
        """Do what the queued sends ask for, now that the exchange has both halves."""

    @abstractmethod
    def _begin_drain(self, exchange: Exchange) -> None:
        """It has failed while pages are touched: stop what can be stopped, and tell decode until it is quiet."""

    @abstractmethod
    def _answer(self, exchange: Exchange) -> None:
        """Say to decode how a known attempt stands."""

    @abstractmethod
    def _prove_quiet(self, exchange: Exchange) -> None:
        """There is proof that nothing of it is under way any more."""

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
        there = self._by_key.get(key)
        same = there is not None and there.request is None and there.offered_as == event.request_id
        missed = None if same else self._missed.meet_request(key, event.request_id)
        if self.draining:
            self._refuse_request(event, Cause.REFUSED, "prefill is draining and takes no new requests")
        elif len(self._by_handle) >= self.timing.max_attempts:
            limit = self.timing.max_attempts
            self._refuse_request(event, Cause.REFUSED, f"prefill has {limit} hand-offs under way, which is its limit")
        elif there is not None and there.request is not None:
            why = f"room {event.room} sibling {event.sibling} is in use by request {there.request.request_id!r}"
            self._refuse_request(event, Cause.CONFLICT, why)
        elif missed is not None:
            self._refuse_request(event, missed.cause, missed.message)
        else:
            self._admit(there or HandOff(next(self._serials), event.room, event.sibling), event)

    def _admit(self, handoff: HandOff, event: OpenRequest) -> None:
        handoff.request = event
        self._by_handle[event.handle] = handoff
        self._by_key[handoff.key] = handoff
        self._timers.set(("life", handoff), self._now + event.deadline_s)
        parked = list(handoff.exchanges.values())
        self._await_parts(handoff)
        for exchange in parked:
            self._move(exchange, Cue.REQUESTED)
            self._met(exchange)
        self._report(handoff)

    def _await_parts(self, handoff: HandOff) -> None:
        """One exchange waits on behalf of all parts that have not come."""
        if handoff.incomplete:
            handoff.unclaimed = Exchange(handoff)
            self._move(handoff.unclaimed, Cue.REQUESTED)

    def _refuse_request(self, event: OpenRequest, cause: Cause, message: str) -> None:
        refused = TransferStatus(phase=Phase.FAILED, cause=cause, message=message, releasable=True)
        self._effects.append(Report(event.handle, refused))

    def _on_open(self, offer: f.Open) -> None:
        if (known := self._by_attempt.get(offer.attempt)) is not None:
            self._answer(known)
            return
        if self._graves.get(offer.attempt) is not None:
            self._verdicts.answer(offer, self._now)
            self._ignore("stale", f"Open for attempt {offer.attempt}, which has ended")
            return
        there = self._by_key.get((offer.room, offer.sibling))
        if there is not None and _supersedes(offer, there):
            self._fail(there, Cause.SUPERSEDED, f"decode opened the request again as attempt {offer.attempt}")
            there = None
        if (refusal := self._refusal(offer, there)) is not None:
            self._bury(offer, *refusal)
        elif (full := self._full(offer.attempt.decode)) is not None:
            self._bury(offer, Cause.REFUSED, full)
            self._lose_part(offer, Cause.REFUSED, full)
        elif (missed := self._met_missed(offer, there)) is not None:
            self._bury(offer, missed.cause, missed.message)
        else:
            self._take(offer, there)

    def _met_missed(self, frame: f.Open | f.Abort | f.Drained, there: HandOff | None) -> Missed | None:
        """The hand-off that this attempt belongs to, if that has ended already."""
        key = (frame.room, frame.sibling)
        if there is not None and frame.request_id in (there.offered_as, there.request and there.request.request_id):
            return self._missed.meet_superseded(key, frame.request_id, frame.part, frame.parts)
        return self._missed.meet_part(key, frame.request_id, frame.part, frame.parts)

    def _take(self, offer: f.Open, there: HandOff | None) -> None:
        handoff = there or HandOff(next(self._serials), offer.room, offer.sibling)
        exchange = handoff.unclaimed or Exchange(handoff)
        handoff.unclaimed = None
        handoff.parts, exchange.offer = offer.parts, offer
        handoff.exchanges[offer.part] = exchange
        handoff.came.add(offer.part)
        self._by_key[handoff.key] = handoff
        self._by_attempt[offer.attempt] = exchange
        self._of_peer.setdefault(offer.attempt.decode, {})[offer.attempt] = exchange
        if there is None:
            self._timers.set(("life", handoff), self._now + min(offer.deadline_s, self.timing.meet_s))
        if handoff.request is not None:
            self._await_parts(handoff)
        self._move(exchange, Cue.OPENED)
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
        if there is not None and (conflict := _conflict(offer, there)) is not None:
            return conflict
        if self.draining and there is None:
            return Cause.REFUSED, "prefill is draining and takes no new requests"
        return None

    def _full(self, peer: str) -> str | None:
        """Why no further attempt of this decode can be taken, if so."""
        most, live, of_peer = self.timing.max_attempts, len(self._by_attempt), len(self._of_peer.get(peer, ()))
        if self._graves.full(peer, reserved=live, reserved_of_peer=of_peer):
            return "prefill remembers as many ended attempts as it can; try again in a few seconds"
        if live >= most or of_peer >= most // 2:
            return f"prefill has as many attempts under way as it takes ({most}, half of it for one peer)"
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

    # --- Ends ---

    def _fail(self, handoff: HandOff, cause: Cause, message: str) -> None:
        """The one way into failure. The first cause stays; later ones find the hand-off not live any more."""
        if handoff.cause is not None or handoff.state not in LIVE:
            return
        handoff.cause, handoff.message = cause, message[: f.MAX_TEXT]
        self._leave_room(handoff)
        self._remember_missed(handoff)
        for exchange in handoff.all:
            if exchange.state in ENDED:
                continue
            if exchange.quiet:
                self._move(exchange, Cue.ENDED)
                self._finalize(exchange)
            else:
                self._move(exchange, Cue.BROKEN)
                self._timers.set(("drain", exchange), self._now + self.timing.drain_s)
                exchange.retry_s = self.timing.retry_first_s
                self._begin_drain(exchange)
        self._report(handoff)

    def _settle(self, exchange: Exchange) -> None:
        """A failed exchange ends once it is quiet."""
        if exchange.quiet:
            self._move(exchange, Cue.QUIET)
            self._finalize(exchange)
            self._report(exchange.handoff)

    def _finalize(self, exchange: Exchange) -> None:
        """Take an ended exchange out of every table and leave a tombstone. Once for each exchange."""
        for timer in ("drain", "told", "announce"):
            self._timers.cancel((timer, exchange))
        handoff = exchange.handoff
        if exchange.offer is not None:
            del self._by_attempt[exchange.attempt]
            peers = self._of_peer[exchange.attempt.decode]
            del peers[exchange.attempt]
            if not peers:
                del self._of_peer[exchange.attempt.decode]
            cause = handoff.cause if exchange.state is S.FAILED else None
            sums = (exchange.bytes_moved, exchange.checksum)
            self._bury(exchange.offer, cause, handoff.message, *sums, heard=exchange.heard)
        if handoff.state in ENDED:
            self._leave_room(handoff)
            if handoff.request is not None:
                self._by_handle.pop(handoff.request.handle, None)

    def _leave_room(self, handoff: HandOff) -> None:
        self._timers.cancel(("life", handoff))
        if self._by_key.get(handoff.key) is handoff:
            del self._by_key[handoff.key]

    def _remember_missed(self, handoff: HandOff) -> None:
        """What has yet to come of a failed hand-off is told so when it comes. A superseded one has a successor."""
        request, cause = handoff.request, handoff.cause
        request_id = handoff.offered_as or (request.request_id if request is not None else "")
        assert cause is not None
        awaited = request is None and cause is not Cause.SUPERSEDED
        missed = Missed(request_id, cause, handoff.message, awaited, handoff.parts, set(handoff.came))
        self._missed.remember(handoff.key, missed, self._now)

    def _on_life_over(self, handoff: HandOff) -> None:
        waited = "the request never came" if handoff.request is None else f"it was {handoff.state}"
        if handoff.request is not None and handoff.parts > len(handoff.came):
            waited += f", {len(handoff.came)} of {handoff.parts} decode ranks having come"
        self._fail(handoff, Cause.TIMED_OUT, f"deadline passed at prefill while {waited}")

    def _on_drain_over(self, exchange: Exchange) -> None:
        if exchange.state is S.DRAINING:
            self._move(exchange, Cue.UNPROVEN)

    def _on_abort_transfer(self, event: AbortTransfer) -> None:
        handoff = self._by_handle.get(event.handle)
        if handoff is not None:
            self._fail(handoff, event.cause, event.message or "aborted by the engine of prefill")

    def _on_drain(self, event: Drain) -> None:
        """What waits for its request waits in vain from now on: decode is told now, not at its deadline."""
        super()._on_drain(event)
        for handoff in list(self._by_key.values()):
            if handoff.request is None:
                self._fail(handoff, Cause.REFUSED, "prefill is draining and takes no new requests")

    def _on_shutdown(self, _: Shutdown) -> None:
        self.draining = True
        for handoff in [*self._by_handle.values(), *self._by_key.values()]:
            self._fail(handoff, Cause.SHUTDOWN, "prefill is shutting down")

    # --- Peers ---

    def _on_peer_ready(self, event: PeerReady) -> None:
        super()._on_peer_ready(event)
        self._timers.cancel(("peer", event.peer))

    def _on_lost(self, event: PeerLost) -> None:
        super()._on_lost(event)
        self._timers.set(("peer", event.peer), self._now + self.timing.verdict_s)
        for exchange in self.exchanges_of(event.peer):
            self._fail(exchange.handoff, Cause.PEER_LOST, event.message)

    def _on_peer_long_gone(self, peer: str) -> None:
        if peer in self._of_peer or not self._graves.forget_peer(peer):
            self._timers.set(("peer", peer), self._now + self.timing.verdict_s)

    def _on_fenced(self, event: Fenced) -> None:
        for exchange in self.exchanges_of(event.peer):
            self._fail(exchange.handoff, Cause.PEER_LOST, f"decode was fenced: {event.proof}")
            if exchange.state in (S.DRAINING, S.HELD):
                self._prove_quiet(exchange)
                self._settle(exchange)

    # --- What decode says and is told ---

    def _abort_unseen(self, frame: f.Abort | f.Drained, cause: Cause, *, heard: bool = False) -> None:
        """The end has overtaken its attempt."""
        self._bury(frame, cause, frame.message, heard=heard)
        self._lose_part(frame, cause, frame.message)

    def _lose_part(self, frame: f.Open | f.Abort | f.Drained, cause: Cause, message: str) -> None:
        """A part came and cannot be had: that ends the hand-off that it belongs to, or will when that comes."""
        there = self._by_key.get((frame.room, frame.sibling))
        if self._met_missed(frame, there) is not None:
            return
        if there is not None and there.awaits(frame):
            there.parts = frame.parts
            there.came.add(frame.part)
            self._fail(there, cause, message)
        else:
            missed = Missed(frame.request_id, cause, message, True, frame.parts, {frame.part})
            self._missed.remember((frame.room, frame.sibling), missed, self._now)

    def _on_query(self, frame: f.Query) -> None:
        exchange = self._by_attempt.get(frame.attempt)
        if exchange is not None:
            self._answer(exchange)
        elif not self._verdicts.answer(frame, self._now):
            self._verdicts.reach(forgotten(frame), self._now)

    def _on_ack(self, frame: f.Ack) -> None:
        if not self._verdicts.acknowledge(frame, self._now):
            self._ignore("stale", f"Ack for attempt {frame.attempt}, which has not ended here")

    def _bury(
        self,
        about: f.AttemptFrame,
        cause: Cause | None,
        message: str,
        bytes_moved: int = 0,
        checksum: int | None = None,
        *,
        heard: bool = False,
    ) -> None:
        header = (about.attempt, about.room, about.sibling)
        tombstone = Tombstone(*header, cause, message, bytes_moved, checksum, heard=heard)
        self._verdicts.reach(tombstone, self._now)

    # --- Small change ---

    def _move(self, exchange: Exchange, cue: Cue) -> None:
        before = exchange.state
        after = self._transitions.get((before, cue))
        if after is None:
            raise TransitionError(f"prefill has no transition for {cue} in {before}")
        exchange.state = after
        handoff = exchange.handoff
        was, handoff.state = handoff.state, aggregate(one.state for one in handoff.all if one.state is not None)
        if handoff.state is not was:
            self.census.move(handoff.serial, was, handoff.state, self._now, progress=cue not in FAILURES)

    def _report(self, handoff: HandOff) -> None:
        """Tell the engine how the whole stands, if that is news."""
        if handoff.request is not None and (status := handoff.status()) != handoff.reported:
            handoff.reported = status
            attempts = tuple(exchange.attempt for exchange in handoff.exchanges.values())
            self._effects.append(Report(handoff.request.handle, status, attempts))


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
