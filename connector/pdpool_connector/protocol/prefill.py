"""Prefill's side of a hand-off, without I/O: it matches requests with attempts, and writes pages into decode's memory.

A router sends a request to both sides at once. So prefill receives it twice, in either order: from its own engine as a
request, and from decode as attempts, one for each decode rank. `rooms.py` finds which of them belong together.
"""

from itertools import count
from types import MappingProxyType

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    EngineRan,
    OpenRequest,
    Received,
    Report,
    SendPages,
    Write,
    WriteEnded,
    WriteResult,
)
from pdpool_connector.protocol.handoff import HandOff, InvalidSendError, PageRun, RankExchange
from pdpool_connector.protocol.prefill_base import DRAINING, PrefillMachineBase
from pdpool_connector.protocol.rooms import MAX_PER_ROOM
from pdpool_connector.protocol.states import PREFILL_LIVE, PrefillState, Trigger
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus, cause_from_peer
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.tombstones import Tombstone

S = PrefillState
NOT_RECEIVED = "timed out at prefill: its engine runs, and has not received the request; see the answer of prefill"
FORGOTTEN = "prefill knows nothing of this attempt"


class PrefillMachine(PrefillMachineBase):
    """Hand-offs of one prefill process; see `Machine` for how it is driven."""

    EVENTS = MappingProxyType(
        {
            **PrefillMachineBase.EVENTS,
            OpenRequest: "_on_request",
            SendPages: "_on_send_pages",
            EngineRan: "_on_engine_ran",
            WriteEnded: "_on_write_ended",
        }
    )
    FRAMES = MappingProxyType(
        {
            f.Open: "_on_open",
            f.Offer: "_on_offer",
            f.Abort: "_on_abort",
            f.Query: "_on_query",
            f.Ack: "_on_ack",
        }
    )

    def __init__(self, incarnation: str, timeouts: Timeouts | None = None) -> None:
        super().__init__(incarnation, timeouts)
        self._writes = count()

    # --- Requests of the engine ---

    def _on_request(self, event: OpenRequest) -> None:
        found = self._rooms.find_for_request(event)
        if found is not None and found.cause is not None:
            found.request, found.prompt = event, found.prompt or event.prompt
            self._rooms.drop_if_complete(found)
            failed = TransferStatus(Phase.FAILED, cause=found.cause, message=found.message, releasable=True)
            self._effects.append(Report(event.handle, failed))
            return
        refusal = self._refusal_of_request(event, found)
        handoff = found or self._new_handoff(event.room)
        self._add_request(handoff, event)
        if refusal:
            self._fail(handoff, Cause.REFUSED, refusal)
        else:
            self._report(handoff)

    def _refusal_of_request(self, event: OpenRequest, found: HandOff | None) -> str:
        """Why a request is not taken; empty if it is."""
        if self.draining:
            return DRAINING
        if len(self._by_handle) >= self.timeouts.max_attempts:
            return f"prefill has {self.timeouts.max_attempts} hand-offs under way, which is its limit"
        return self._full_room(event.room) if found is None else ""

    def _full_room(self, room: int) -> str:
        if self._rooms.full(room):
            return f"room {room} has {MAX_PER_ROOM} hand-offs under way, which is the limit of a room"
        return ""

    def _new_handoff(self, room: int) -> HandOff:
        handoff = HandOff(next(self._serials), room)
        self._rooms.enter(handoff)
        return handoff

    def _add_request(self, handoff: HandOff, event: OpenRequest) -> None:
        """Add the request to a hand-off. One that is refused is added as well: decode then gets the reason."""
        handoff.request, handoff.prompt = event, handoff.prompt or event.prompt
        handoff.deadline = self._now + event.deadline_s
        self._by_handle[event.handle] = handoff
        parked = list(handoff.exchanges.values())
        self._await_missing_ranks(handoff)
        for exchange in parked:
            self._move(exchange, Trigger.REQUESTED)
            if exchange.offer is not None:
                self._move(exchange, Trigger.OFFERED)
        self._set_deadline(handoff)

    def _await_missing_ranks(self, handoff: HandOff) -> None:
        """One exchange in WAITING stands for all ranks that have not come."""
        if handoff.unclaimed is None and handoff.lacks_ranks:
            handoff.unclaimed = RankExchange(handoff)
            self._move(handoff.unclaimed, Trigger.REQUESTED)

    def _set_deadline(self, handoff: HandOff) -> None:
        """A half has come. The next one has `match_s` to come; once all are there, the request's deadline counts."""
        until = handoff.deadline
        if not handoff.complete:
            until = min(until, self._now + self.timeouts.match_s)
        self._timers.set(("life", handoff), until)

    def _on_engine_ran(self, event: EngineRan) -> None:
        """End attempts without a request once the engine has run for `engine_match_s`: it would have received it."""
        for handoff in self._rooms.live():
            if handoff.request is not None:
                continue
            if handoff.engine_ran_s is None:
                handoff.engine_ran_s = event.total_s
            elif event.total_s - handoff.engine_ran_s >= self.timeouts.engine_match_s:
                self._fail(handoff, Cause.TIMED_OUT, NOT_RECEIVED)

    # --- Attempts of decode ---

    def _on_received(self, event: Received) -> None:
        """Drop frames that do not come from the attempt's own decode, or that name another room."""
        frame = event.frame
        known = self._by_attempt.get(frame.attempt) or self._tombstones.get(frame.attempt)
        if frame.attempt.decode != frame.sender:
            self._ignore("stranger", f"{type(frame).__name__} for attempt {frame.attempt} from {frame.sender[:8]}")
        elif known is not None and known.room != frame.room:
            self._ignore("mismatch", f"attempt {frame.attempt} is for room {known.room}, not {frame.room}")
        else:
            super()._on_received(event)

    def _on_open(self, frame: f.Open) -> None:
        if (known := self._by_attempt.get(frame.attempt)) is not None:
            self._answer(known)
        elif (ended := self._tombstones.get(frame.attempt)) is not None:
            self._send_result(ended)
            self._ignore("stale", f"Open for attempt {frame.attempt}, which has ended")
        elif self._tombstones.forgotten(frame.attempt):
            self._refuse(frame, Cause.REFUSED, f"attempt {frame.attempt} is older than one that is already forgotten")
        else:
            self._on_new_attempt(frame)

    def _on_new_attempt(self, frame: f.Open) -> None:
        found = self._rooms.find_for_rank(frame)
        if found is not None and found.cause is not None:
            self._add_late_rank(found, frame)
            self._refuse(frame, found.cause, found.message)
        elif found is None and self.draining:
            self._refuse(frame, Cause.REFUSED, DRAINING)
        elif full := self._full(frame, found):
            self._refuse(frame, Cause.REFUSED, full)
            self._lose_rank(frame, Cause.REFUSED, full)
        else:
            self._add_attempt(found or self._new_handoff(frame.room), frame)

    def _add_attempt(self, handoff: HandOff, frame: f.Open) -> None:
        exchange = handoff.unclaimed or RankExchange(handoff)
        handoff.unclaimed = None
        exchange.opened = frame
        handoff.exchanges[frame.rank_index] = exchange
        handoff.add_rank(frame)
        decode = frame.attempt.decode
        self._by_attempt[frame.attempt] = exchange
        self._of_peer.setdefault(decode, {})[frame.attempt] = exchange
        if handoff.request is None:
            handoff.deadline = min(handoff.deadline, self._now + frame.deadline_s)
        else:
            self._await_missing_ranks(handoff)
        self._move(exchange, Trigger.OPENED)
        self._set_deadline(handoff)
        self._report(handoff)

    def _full(self, frame: f.Open, found: HandOff | None) -> str:
        """Why no further attempt of this decode is taken; empty if it is."""
        decode = frame.attempt.decode
        most, live, of_peer = self.timeouts.max_attempts, len(self._by_attempt), len(self._of_peer.get(decode, ()))
        if self._tombstones.full(decode, reserved=live, reserved_of_peer=of_peer):
            return "prefill remembers as many ended attempts as it can; try again in a few seconds"
        if live >= most or of_peer >= most // 2:
            return f"prefill has as many attempts under way as it takes ({most}, half of it for one peer)"
        return self._full_room(frame.room) if found is None else ""

    def _refuse(self, about: f.AttemptFrame, cause: Cause, message: str) -> None:
        self._end_attempt(Tombstone(about.attempt, about.room, cause, f.text(message)))

    def _lose_rank(self, frame: f.RequestFrame, cause: Cause, message: str) -> None:
        """A decode rank will not take part: that ends its hand-off, now or when another half comes."""
        found = self._rooms.find_for_rank(frame)
        if found is not None and found.cause is not None:
            self._add_late_rank(found, frame)
        elif found is not None:
            found.add_rank(frame)
            self._fail(found, cause, message)
        else:
            handoff = self._new_handoff(frame.room)
            handoff.add_rank(frame)
            handoff.cause, handoff.message = cause, f.text(message)
            self._rooms.end(handoff, frame.attempt.decode, self._now)

    def _add_late_rank(self, handoff: HandOff, frame: f.RequestFrame) -> None:
        """A rank has come to a hand-off that has ended."""
        handoff.add_rank(frame)
        self._rooms.drop_if_complete(handoff)

    # --- Memory of decode ---

    def _on_offer(self, frame: f.Offer) -> None:
        exchange = self._by_attempt.get(frame.attempt)
        if exchange is None:
            if not self._answer_ended(frame):
                self._ignore("unknown", f"Offer for attempt {frame.attempt}, which was not opened here")
        elif exchange.offer is None:
            self._add_offer(exchange, frame)
        elif _memory(frame) == _memory(exchange.offer):
            self._answer(exchange)
        else:
            self._ignore("mismatch", f"attempt {frame.attempt} has offered other memory before")

    def _add_offer(self, exchange: RankExchange, frame: f.Offer) -> None:
        handoff, decode = exchange.handoff, frame.attempt.decode
        most = self.timeouts.max_offered_bytes
        in_all, of_peer = self._offered_bytes.total() + frame.id_bytes, self._offered_bytes[decode] + frame.id_bytes
        if in_all > most or of_peer > most // 2:
            full = (
                f"prefill keeps as many ids of pages as it takes ({most // f.PAGE_ID_BYTES}, half of it for one peer)"
            )
            self._fail(handoff, Cause.REFUSED, full)
            return
        exchange.offer = frame
        self._offered_bytes[decode] = of_peer
        if exchange.state is S.MATCHED:
            self._move(exchange, Trigger.OFFERED)
            self._report(handoff)
            self._write_sends(exchange)

    # --- Writing ---

    def _on_send_pages(self, event: SendPages) -> None:
        handoff = self._by_handle.get(event.handle)
        if handoff is None or handoff.state not in PREFILL_LIVE:
            return
        try:
            handoff.add_send(event)
        except InvalidSendError as error:
            self._fail(handoff, Cause.INVALID, str(error))
            return
        for exchange in list(handoff.exchanges.values()):
            self._write_sends(exchange)

    def _write_sends(self, exchange: RankExchange) -> None:
        """Submit writes for the sends that are not cut for this rank yet, if it has offered memory."""
        if exchange.state not in (S.READY, S.SENDING):
            return
        try:
            for run in exchange.cut():
                if not run.empty:
                    self._write(exchange, run)
        except InvalidSendError as error:
            self._fail(exchange.handoff, Cause.INVALID, str(error))
        self._complete_if_landed(exchange)

    def _write(self, exchange: RankExchange, run: PageRun) -> None:
        if exchange.state is S.READY:
            self._move(exchange, Trigger.SUBMITTED)
            self._report(exchange.handoff)
        write, attempt = next(self._writes), exchange.attempt
        exchange.in_flight.add(write)
        self._effects.append(Write(attempt, write, attempt.decode, run.source, run.target, run.aux, run.state))

    def _on_write_ended(self, event: WriteEnded) -> None:
        exchange = self._by_attempt.get(event.attempt)
        if exchange is None or event.write not in exchange.in_flight:
            return
        exchange.in_flight.remove(event.write)
        exchange.bytes_moved += event.bytes_moved
        exchange.checksums.append(event.checksum)
        exchange.unproven |= event.result is WriteResult.UNSETTLED
        if exchange.state not in PREFILL_LIVE:
            self._settle(exchange)
        elif event.result is WriteResult.LANDED:
            self._complete_if_landed(exchange)
        else:
            cause = Cause.INVALID if event.result is WriteResult.INVALID else Cause.TRANSFER_FAILED
            self._fail(exchange.handoff, cause, event.message or f"a write was {event.result}")

    def _complete_if_landed(self, exchange: RankExchange) -> None:
        if exchange.state in PREFILL_LIVE and exchange.closed and exchange.settled:
            self._move(exchange, Trigger.COMPLETED)
            self._finalize(exchange)
            self._report(exchange.handoff)

    # --- Other frames of decode, and answers ---

    def _on_abort(self, frame: f.Abort) -> None:
        cause = cause_from_peer(frame.cause, Cause.PEER_ABORTED)
        exchange = self._by_attempt.get(frame.attempt)
        if exchange is None:
            if self._answer_ended(frame):
                self._ignore("stale", f"Abort for attempt {frame.attempt}, which has ended")
                return
            self._refuse(frame, cause, frame.message)
            if cause is not Cause.FORGOTTEN:  # that one names no request
                self._lose_rank(frame, cause, frame.message)
        elif exchange.state in PREFILL_LIVE:
            self._fail(exchange.handoff, cause, frame.message)
        else:
            self._answer(exchange)

    def _on_query(self, frame: f.Query) -> None:
        exchange = self._by_attempt.get(frame.attempt)
        if exchange is not None:
            self._answer(exchange)
        elif not self._answer_ended(frame):
            self._refuse(frame, Cause.FORGOTTEN, FORGOTTEN)

    def _on_ack(self, frame: f.Ack) -> None:
        if not self._tombstones.acknowledge(frame.attempt, self._now):
            self._ignore("stale", f"Ack for attempt {frame.attempt}, which has not ended here")

    def _answer_ended(self, frame: f.AttemptFrame) -> bool:
        """Answer a frame about an attempt that has ended; False if it was never seen here."""
        tombstone = self._tombstones.get(frame.attempt)
        if tombstone is None and self._tombstones.forgotten(frame.attempt):
            tombstone = Tombstone(frame.attempt, frame.room, Cause.FORGOTTEN, FORGOTTEN)
        if tombstone is not None:
            self._send_result(tombstone)
        return tombstone is not None


def _memory(offer: f.Offer) -> tuple[object, ...]:
    return (offer.pages, offer.prefix_pages, offer.aux_slot, offer.state)
