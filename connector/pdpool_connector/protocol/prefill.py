"""Prefill's side of the hand-off, sans I/O.

The router posts a request to both sides at once, so prefill learns of it twice, in either order: from its own engine
(a request) and from decode (an attempt, which offers memory). An `Exchange` is one or both halves. It is found by
handle, by attempt, and, while its other half may still come, by room and sibling; it leaves all tables in `_finalize`,
which every end passes through once. What remains is a tombstone that answers late frames.
"""

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
    StopWriting,
    Write,
    WriteEnded,
    WriteResult,
)
from pdpool_connector.protocol.exchange import Exchange, InvalidSendError, Piece
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.machine import Machine
from pdpool_connector.protocol.missed import Missed, MissedHalves
from pdpool_connector.protocol.outcome import Cause, Phase, TransferStatus, told_by_peer
from pdpool_connector.protocol.states import (
    FAILURES,
    PREFILL_PHASES,
    PREFILL_TRANSITIONS,
    Cue,
    PrefillState,
    TransitionError,
)
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
_WRITE_CAUSES = {WriteResult.INVALID: Cause.INVALID}


class PrefillMachine(Machine[PrefillState]):
    """Hand-offs of one prefill process; see `Machine` for how it is driven."""

    def __init__(self, incarnation: str, timing: Timing | None = None) -> None:
        super().__init__(incarnation, PREFILL_LABELS, timing or Timing())
        self._serials = count()
        self._writes = count()
        self._by_handle: dict[int, Exchange] = {}
        self._by_attempt: dict[AttemptId, Exchange] = {}
        self._by_key: dict[tuple[int, int], Exchange] = {}
        self._of_peer: dict[str, dict[AttemptId, Exchange]] = {}
        self._verdicts = Verdicts(self.timing, self._timers, self._send)
        self._graves = self._verdicts.graves
        self._missed_requests = MissedHalves(self.timing.max_attempts, self.timing.verdict_s, self._timers)
        self._missed_attempts = MissedHalves(self.timing.max_attempts, self.timing.verdict_s, self._timers)
        self._on_event |= {
            OpenRequest: self._on_request,
            SendPages: self._on_send_pages,
            WriteEnded: self._on_write_ended,
            AbortTransfer: self._on_abort_transfer,
            Fenced: self._on_fenced,
            Shutdown: self._on_shutdown,
        }
        self._on_frame |= {f.Open: self._on_open, f.Abort: self._on_abort, f.Ack: self._on_ack, f.Query: self._on_query}
        self._on_timer |= {
            "life": self._on_life_over,
            "drain": self._on_drain_over,
            "told": self._tell_failed,
            "verdict": lambda attempt: self._verdicts.tell(attempt, self._now),
            "grave": self._verdicts.forget,
            "missed": lambda table: table.expire(self._now),
            "peer": self._on_peer_long_gone,
        }

    @property
    def rows(self) -> int:
        """Everything this machine keeps about hand-offs, remembered ends included; 0 when nothing is left behind."""
        live = {exchange.serial for exchange in (*self._by_handle.values(), *self._by_attempt.values())}
        return len(live) + len(self._graves) + len(self._missed_requests) + len(self._missed_attempts)

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

    # --- The two halves, and how they meet ---

    def _on_request(self, event: OpenRequest) -> None:
        key = (event.room, event.sibling)
        there = self._by_key.get(key)
        parked = there if there is not None and there.state is S.PARKED else None
        same = parked is not None and parked.offer is not None and parked.offer.request_id == event.request_id
        missed = None if same else self._missed_attempts.meet(key, event.request_id)
        if self.draining:
            self._refuse_request(event, Cause.REFUSED, "prefill is draining and takes no new requests")
        elif len(self._by_handle) >= self.timing.max_attempts:
            limit = self.timing.max_attempts
            self._refuse_request(event, Cause.REFUSED, f"prefill has {limit} hand-offs under way, which is its limit")
        elif there is not None and parked is None:
            assert there.request is not None
            why = f"room {event.room} sibling {event.sibling} is in use by request {there.request.request_id!r}"
            self._refuse_request(event, Cause.REFUSED, why)
        elif missed is not None:
            self._refuse_request(event, missed.cause, missed.message)
        elif parked is not None:
            self._admit(parked, event)
            self._move(parked, Cue.REQUESTED)
            self._met(parked)
        else:
            exchange = Exchange(next(self._serials), event.room, event.sibling)
            self._by_key[key] = exchange
            self._admit(exchange, event)
            self._move(exchange, Cue.REQUESTED)
            self._report(exchange)

    def _admit(self, exchange: Exchange, event: OpenRequest) -> None:
        exchange.request = event
        self._by_handle[event.handle] = exchange
        self._timers.set(("life", exchange), self._now + event.deadline_s)

    def _refuse_request(self, event: OpenRequest, cause: Cause, message: str) -> None:
        refused = TransferStatus(phase=Phase.FAILED, cause=cause, message=message, releasable=True)
        self._effects.append(Report(event.handle, refused))

    def _on_open(self, offer: f.Open) -> None:
        if (known := self._by_attempt.get(offer.attempt)) is not None:
            self._answer(known)
            return
        if self._graves.get(offer.attempt) is not None:
            self._verdicts.tell(offer.attempt, self._now)
            return
        there = self._by_key.get((offer.room, offer.sibling))
        if there is not None and there.offer is not None and _supersedes(offer, there.offer):
            self._fail(there, Cause.SUPERSEDED, f"decode opened the request again as attempt {offer.attempt}")
            there = None
        if (refusal := self._refusal(offer, there)) is not None:
            self._bury(offer, Cause.REFUSED, refusal)
            return
        if (missed := self._met_missed_request(offer)) is not None:
            self._bury(offer, missed.cause, missed.message)
            return
        self._take(offer, there)

    def _met_missed_request(self, frame: f.Open | f.Abort) -> Missed | None:
        """The request that this attempt belongs to, if that has ended already."""
        key = (frame.room, frame.sibling)
        there = self._by_key.get(key)
        if there is not None and there.request is not None and there.request.request_id == frame.request_id:
            return None
        return self._missed_requests.meet(key, frame.request_id)

    def _take(self, offer: f.Open, waiting: Exchange | None) -> None:
        exchange = waiting or Exchange(next(self._serials), offer.room, offer.sibling)
        exchange.offer = offer
        self._by_key[exchange.key] = exchange
        self._by_attempt[offer.attempt] = exchange
        self._of_peer.setdefault(offer.attempt.decode, {})[offer.attempt] = exchange
        self._move(exchange, Cue.OPENED)
        if waiting is None:
            self._timers.set(("life", exchange), self._now + min(offer.deadline_s, self.timing.meet_s))
            self._answer(exchange)
        else:
            self._met(exchange)

    def _refusal(self, offer: f.Open, there: Exchange | None) -> str | None:
        peer = offer.attempt.decode
        if self._graves.stale(offer.attempt):
            return f"attempt {offer.attempt} is older than one that is already forgotten"
        if there is not None and there.offer is not None:
            return f"room {offer.room} sibling {offer.sibling} is in use by attempt {there.offer.attempt}"
        if self.draining and there is None:
            return "prefill is draining and takes no new requests"
        most, live, of_peer = self.timing.max_attempts, len(self._by_attempt), len(self._of_peer.get(peer, ()))
        if self._graves.full(peer, reserved=live, reserved_of_peer=of_peer):
            return "prefill remembers as many ended attempts as it can; try again in a few seconds"
        if live >= most or of_peer >= most // 2:
            return f"prefill has as many attempts under way as it takes ({most}, half of it for one peer)"
        return None

    def _met(self, exchange: Exchange) -> None:
        self._answer(exchange)
        self._report(exchange)
        self._pump(exchange)

    # --- Writing ---

    def _on_send_pages(self, event: SendPages) -> None:
        exchange = self._by_handle.get(event.handle)
        if exchange is None or exchange.state not in LIVE:
            return
        try:
            exchange.queue(event)
        except InvalidSendError as error:
            self._fail(exchange, Cause.INVALID, str(error))
            return
        if exchange.offer is not None:
            self._pump(exchange)

    def _pump(self, exchange: Exchange) -> None:
        """Turn queued sends into writes, now that the destination is known."""
        try:
            for piece in exchange.cut():
                if piece.source or piece.aux is not None:
                    self._write(exchange, piece)
        except InvalidSendError as error:
            self._fail(exchange, Cause.INVALID, str(error))
        self._complete_if_landed(exchange)

    def _write(self, exchange: Exchange, piece: Piece) -> None:
        peer = exchange.attempt.decode
        if exchange.state is S.READY:
            self._move(exchange, Cue.SUBMITTED)
            self._report(exchange)
            if not piece.last:
                self._answer(exchange)
        write = next(self._writes)
        exchange.in_flight.add(write)
        self._effects.append(Write(exchange.attempt, write, peer, piece.source, piece.target, piece.aux))

    def _on_write_ended(self, event: WriteEnded) -> None:
        exchange = self._by_attempt.get(event.attempt)
        if exchange is None or event.write not in exchange.in_flight:
            return
        exchange.in_flight.remove(event.write)
        exchange.bytes_moved += event.bytes_moved
        if event.result is WriteResult.UNSETTLED:
            exchange.unsettled = True
        if exchange.state in LIVE and event.result is not WriteResult.LANDED:
            cause = _WRITE_CAUSES.get(event.result, Cause.TRANSFER_FAILED)
            self._fail(exchange, cause, event.message or f"a write was {event.result}")
        elif exchange.state in LIVE:
            self._complete_if_landed(exchange)
        else:
            self._settle(exchange)

    def _complete_if_landed(self, exchange: Exchange) -> None:
        if exchange.state in LIVE and exchange.closed and exchange.quiet:
            self._move(exchange, Cue.COMPLETED)
            self._finalize(exchange)

    # --- Ends ---

    def _fail(self, exchange: Exchange, cause: Cause, message: str) -> None:
        """The one way into failure. The first cause stays; later ones find the exchange not live any more."""
        if exchange.state not in LIVE:
            return
        exchange.cause, exchange.message = cause, message[: f.MAX_TEXT]
        exchange.sends.clear()
        if exchange.quiet:
            self._move(exchange, Cue.ENDED)
            self._finalize(exchange)
            return
        self._move(exchange, Cue.BROKEN)
        self._leave_room(exchange)
        self._timers.cancel(("life", exchange))
        self._timers.set(("drain", exchange), self._now + self.timing.drain_s)
        self._effects.append(StopWriting(exchange.attempt, exchange.attempt.decode))
        self._report(exchange)
        exchange.retry_s = self.timing.retry_first_s
        self._tell_failed(exchange)
        self._settle(exchange)

    def _settle(self, exchange: Exchange) -> None:
        """A failed exchange ends once it is quiet; what can never be proved here becomes a hold at once."""
        if exchange.quiet:
            self._move(exchange, Cue.QUIET)
            self._finalize(exchange)
        elif not exchange.in_flight and exchange.state is S.DRAINING:
            self._move(exchange, Cue.UNPROVEN)

    def _finalize(self, exchange: Exchange) -> None:
        """Take an ended exchange out of every table, leave a tombstone, and tell both sides. Once for each exchange."""
        for timer in ("life", "drain", "told"):
            self._timers.cancel((timer, exchange))
        self._leave_room(exchange)
        self._report(exchange)
        if exchange.request is not None:
            self._by_handle.pop(exchange.request.handle, None)
        if exchange.offer is not None:
            del self._by_attempt[exchange.attempt]
            peers = self._of_peer[exchange.attempt.decode]
            del peers[exchange.attempt]
            if not peers:
                del self._of_peer[exchange.attempt.decode]
            self._bury(exchange.offer, exchange.cause, exchange.message, exchange.bytes_moved)
        self._remember_missed(exchange)

    def _leave_room(self, exchange: Exchange) -> None:
        if self._by_key.get(exchange.key) is exchange:
            del self._by_key[exchange.key]

    def _remember_missed(self, exchange: Exchange) -> None:
        """Half a hand-off has failed: its other half, should it come, is told so. A superseded one has a successor."""
        request, offer, cause = exchange.request, exchange.offer, exchange.cause
        if cause is None or cause is Cause.SUPERSEDED:
            return
        if request is not None and offer is None:
            self._missed_requests.remember(exchange.key, request.request_id, cause, exchange.message, self._now)
        elif offer is not None and request is None:
            self._missed_attempts.remember(exchange.key, offer.request_id, cause, exchange.message, self._now)

    def _on_life_over(self, exchange: Exchange) -> None:
        waited = "the request never came" if exchange.request is None else f"it was {exchange.state}"
        self._fail(exchange, Cause.TIMED_OUT, f"deadline passed at prefill while {waited}")

    def _on_drain_over(self, exchange: Exchange) -> None:
        if exchange.state is S.DRAINING:
            self._move(exchange, Cue.UNPROVEN)

    def _on_abort_transfer(self, event: AbortTransfer) -> None:
        exchange = self._by_handle.get(event.handle)
        if exchange is not None:
            self._fail(exchange, event.cause, event.message or "aborted by the engine of prefill")

    def _on_drain(self, event: Drain) -> None:
        """What waits for its request waits in vain from now on: decode is told now, not at its deadline."""
        super()._on_drain(event)
        for exchange in list(self._by_attempt.values()):
            if exchange.state is S.PARKED:
                self._fail(exchange, Cause.REFUSED, "prefill is draining and takes no new requests")

    def _on_shutdown(self, _: Shutdown) -> None:
        self.draining = True
        for exchange in [*self._by_handle.values(), *self._by_attempt.values()]:
            self._fail(exchange, Cause.SHUTDOWN, "prefill is shutting down")

    # --- Peers ---

    def _on_peer_ready(self, event: PeerReady) -> None:
        super()._on_peer_ready(event)
        self._timers.cancel(("peer", event.peer))

    def _on_lost(self, event: PeerLost) -> None:
        super()._on_lost(event)
        self._timers.set(("peer", event.peer), self._now + self.timing.verdict_s)
        for exchange in self.exchanges_of(event.peer):
            self._fail(exchange, Cause.PEER_LOST, event.message)

    def _on_peer_long_gone(self, peer: str) -> None:
        if peer in self._of_peer or not self._graves.forget_peer(peer):
            self._timers.set(("peer", peer), self._now + self.timing.verdict_s)

    def _on_fenced(self, event: Fenced) -> None:
        for exchange in self.exchanges_of(event.peer):
            self._fail(exchange, Cause.PEER_LOST, f"decode was fenced: {event.proof}")
            if exchange.state in (S.DRAINING, S.HELD):
                exchange.in_flight.clear()
                exchange.unsettled = False
                self._settle(exchange)

    # --- What decode says and is told ---

    def _on_abort(self, frame: f.Abort) -> None:
        cause = told_by_peer(frame.cause, Cause.PEER_ABORTED)
        exchange = self._by_attempt.get(frame.attempt)
        if exchange is not None:
            self._fail(exchange, cause, frame.message)
        elif not self._verdicts.answer(frame, self._now):
            self._abort_unseen(frame, cause)

    def _abort_unseen(self, frame: f.Abort, cause: Cause) -> None:
        """The abort has overtaken its attempt. It ends the engine's request, or will when that comes."""
        self._bury(frame, cause, frame.message)
        if self._met_missed_request(frame) is not None:
            return
        waiting = self._by_key.get((frame.room, frame.sibling))
        if waiting is not None and waiting.state is S.WAITING:
            self._fail(waiting, cause, frame.message)
        else:
            key = (frame.room, frame.sibling)
            self._missed_attempts.remember(key, frame.request_id, cause, frame.message, self._now)

    def _on_query(self, frame: f.Query) -> None:
        exchange = self._by_attempt.get(frame.attempt)
        if exchange is not None:
            self._answer(exchange)
        elif not self._verdicts.answer(frame, self._now):
            self._verdicts.reach(forgotten(frame), self._now)

    def _on_ack(self, frame: f.Ack) -> None:
        if not self._verdicts.acknowledge(frame.attempt, self._now):
            self._ignore("stale", f"Ack for attempt {frame.attempt}, which has not ended here")

    def _answer(self, exchange: Exchange) -> None:
        """Say how a known attempt stands."""
        assert exchange.offer is not None
        if exchange.state in (S.PARKED, S.READY):
            self._send(exchange.attempt.decode, f.Accepted, exchange.offer)
        elif exchange.state is S.SENDING:
            self._send(exchange.attempt.decode, f.Sending, exchange.offer)
        else:
            self._send_failed(exchange)

    def _send_failed(self, exchange: Exchange) -> None:
        assert exchange.offer is not None
        self._send(exchange.attempt.decode, f.Failed, exchange.offer, cause=exchange.cause, message=exchange.message)

    def _tell_failed(self, exchange: Exchange) -> None:
        """Say that it has failed and drains; again later, until it is drained or decode has to ask."""
        self._send_failed(exchange)
        if exchange.state is S.DRAINING:
            self._timers.set(("told", exchange), self._now + exchange.retry_s)
            exchange.retry_s = min(2 * exchange.retry_s, self.timing.retry_max_s)

    def _bury(self, about: f.Open | f.Abort, cause: Cause | None, message: str, bytes_moved: int = 0) -> None:
        tombstone = Tombstone(about.attempt, about.room, about.sibling, cause, message, bytes_moved)
        self._verdicts.reach(tombstone, self._now)

    # --- Small change ---

    def _move(self, exchange: Exchange, cue: Cue) -> None:
        before = exchange.state
        after = PREFILL_TRANSITIONS.get((before, cue))
        if after is None:
            raise TransitionError(f"prefill has no transition for {cue} in {before}")
        self.census.move(exchange.serial, before, after, self._now, progress=cue not in FAILURES)
        exchange.state = after

    def _report(self, exchange: Exchange) -> None:
        if exchange.request is None or exchange.state is None:
            return
        status = TransferStatus(
            phase=PREFILL_PHASES[exchange.state],
            cause=exchange.cause,
            message=exchange.message,
            prefix_pages=exchange.offer.prefix_pages if exchange.offer is not None else 0,
            bytes_moved=exchange.bytes_moved,
            releasable=exchange.state in (S.DONE, S.FAILED),
        )
        self._effects.append(Report(exchange.request.handle, status))


def _supersedes(newer: f.Open, older: f.Open) -> bool:
    """The same decode process opened the same request again, as it does after a retraction."""
    return (
        newer.attempt.decode == older.attempt.decode
        and newer.attempt.number > older.attempt.number
        and newer.request_id == older.request_id
    )
