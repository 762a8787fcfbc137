"""Prefill's side in READ: decode is told which pages have been computed, reads them, and says when it reads no more.

Whatever decode has been told of, it may read until it says otherwise: from the first `Computed` on, only decode's word
or a fence gives the pages back. Before that prefill ends an attempt by itself, as in WRITE.
"""

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.ending import LIVE
from pdpool_connector.protocol.events import PeerReady
from pdpool_connector.protocol.exchange import Exchange, InvalidSendError, Piece
from pdpool_connector.protocol.meeting import MeetingMachine
from pdpool_connector.protocol.states import PREFILL_READ_TRANSITIONS, PrefillState, Trigger
from pdpool_connector.protocol.status import Cause, cause_from_peer
from pdpool_connector.protocol.timeouts import Timeouts

S = PrefillState


class PrefillReadMachine(MeetingMachine):
    """Hand-offs of one prefill process that decode reads from; see `Machine` for how it is driven."""

    _transitions = PREFILL_READ_TRANSITIONS

    def __init__(self, incarnation: str, timing: Timeouts | None = None) -> None:
        super().__init__(incarnation, timing)
        self._on_frame |= {
            f.Fetching: self._on_fetching,
            f.Done: self._on_done,
            f.Failed: self._on_failed,
            f.Drained: self._on_drained,
        }
        self._on_timer |= {"announce": self._remind, "told": self._tell_aborted}

    # --- Announcing ---

    def _pump(self, exchange: Exchange) -> None:
        """Announce queued sends."""
        if exchange.state not in LIVE:
            return
        try:
            for piece in exchange.cut():
                if piece.last or not piece.empty:
                    self._announce(exchange, piece)
        except InvalidSendError as error:
            self._fail(exchange.handoff, Cause.INVALID, str(error))

    def _announce(self, exchange: Exchange, piece: Piece) -> None:
        exchange.exposed = True
        if exchange.state is S.READY:
            self._move(exchange, Trigger.SUBMITTED)
            self._report(exchange.handoff)
        exchange.unnoted.append(piece)
        self._send_computed(exchange, exchange.announced, piece)
        exchange.announced += 1
        exchange.retry_s = self.timing.retry_first_s
        self._timers.set(("announce", exchange), self._now + exchange.retry_s)

    def _remind(self, exchange: Exchange) -> None:
        """Repeat what decode has not taken note of; when that is nothing, ask how it stands."""
        if exchange.unnoted:
            self._answer(exchange)
            exchange.retry_s = min(2 * exchange.retry_s, self.timing.retry_max_s)
        else:
            self._send(exchange.attempt.decode, f.Query, exchange)
        pause = exchange.retry_s if exchange.unnoted else self.timing.query_s
        self._timers.set(("announce", exchange), self._now + pause)

    def _on_fetching(self, frame: f.Fetching) -> None:
        exchange = self._by_attempt.get(frame.attempt)
        if exchange is None or exchange.state is not S.SENDING or frame.taken > exchange.announced:
            self._ignore("stale", f"Fetching {frame.taken} for attempt {frame.attempt}, which has not announced it")
            return
        while exchange.announced - len(exchange.unnoted) < frame.taken:
            del exchange.unnoted[0]
        if not exchange.unnoted:
            self._timers.set(("announce", exchange), self._now + self.timing.query_s)

    # --- OutcomeLog ---

    def _on_done(self, frame: f.Done) -> None:
        exchange = self._by_attempt.get(frame.attempt)
        if exchange is None:
            self._note_end(frame, None)
            return
        exchange.exposed, exchange.heard = False, True
        exchange.bytes_moved = frame.bytes_moved
        if exchange.state is S.SENDING and exchange.closed:
            self._move(exchange, Trigger.COMPLETED)
            self._finalize(exchange)
            self._report(exchange.handoff)
        else:
            self._fail(exchange.handoff, Cause.INVALID, "decode said done before it was told of the last pages")
            self._settle_failed(exchange)

    def _on_drained(self, frame: f.Drained) -> None:
        cause = cause_from_peer(frame.cause, Cause.TRANSFER_FAILED)
        exchange = self._by_attempt.get(frame.attempt)
        if exchange is None:
            self._note_end(frame, cause)
            return
        exchange.exposed, exchange.heard = False, True
        self._fail(exchange.handoff, cause, frame.message)
        self._settle_failed(exchange)

    def _on_failed(self, frame: f.Failed) -> None:
        exchange = self._by_attempt.get(frame.attempt)
        if exchange is None:
            self._verdicts.answer(frame, self._now)
        else:
            self._fail(exchange.handoff, cause_from_peer(frame.cause, Cause.TRANSFER_FAILED), frame.message)

    def _note_end(self, frame: f.Done | f.Drained, cause: Cause | None) -> None:
        """Decode's last word on an attempt that is not live: take note, and let it end what it has overtaken."""
        known = self._verdicts.acknowledge(frame, self._now) or self._graves.stale(frame.attempt)
        if isinstance(frame, f.Drained) and cause is not None and not known:
            self._abort_unseen(frame, cause, heard=True)
        else:
            self._send(frame.sender, f.Ack, frame)
            self._ignore("stale", f"{type(frame).__name__} for attempt {frame.attempt}, which has ended")

    def _settle_failed(self, exchange: Exchange) -> None:
        if exchange.state in (S.DRAINING, S.HELD):
            self._settle(exchange)

    def _begin_drain(self, exchange: Exchange) -> None:
        """Only decode can stop; where it cannot be heard, there is nothing to wait for within any deadline."""
        self._timers.cancel(("announce", exchange))
        exchange.unnoted.clear()
        self._tell_aborted(exchange)
        if exchange.attempt.decode not in self._versions:
            self._move(exchange, Trigger.UNPROVEN)

    def _prove_quiet(self, exchange: Exchange) -> None:
        exchange.exposed = False

    # --- What decode is told ---

    def _on_peer_ready(self, event: PeerReady) -> None:
        """A connection that was rebuilt may have swallowed frames."""
        super()._on_peer_ready(event)
        for exchange in self.under_way(event.peer):
            exchange.retry_s = self.timing.retry_first_s
            self._answer(exchange)

    def _answer(self, exchange: Exchange) -> None:
        if exchange.state in (S.DRAINING, S.HELD):
            self._send_abort(exchange)
            return
        if not exchange.unnoted:
            self._send(exchange.attempt.decode, f.Accepted, exchange)
        for sequence, piece in enumerate(exchange.unnoted, exchange.announced - len(exchange.unnoted)):
            self._send_computed(exchange, sequence, piece)

    def _send_computed(self, exchange: Exchange, sequence: int, piece: Piece) -> None:
        self._send(
            exchange.attempt.decode,
            f.Computed,
            exchange,
            sequence=sequence,
            start=piece.start,
            pages=piece.source,
            last=piece.last,
            aux_slot=piece.aux[0] if piece.aux is not None else f.NO_AUX,
            state=piece.state[0],
        )

    def _tell_aborted(self, exchange: Exchange) -> None:
        """Say that it has failed; again later, until decode says that it reads no more."""
        self._send_abort(exchange)
        self._timers.set(("told", exchange), self._now + exchange.retry_s)
        exchange.retry_s = min(2 * exchange.retry_s, self.timing.retry_max_s)

    def _send_abort(self, exchange: Exchange) -> None:
        handoff, offer = exchange.handoff, exchange.open
        self._send(
            offer.attempt.decode,
            f.Abort,
            exchange,
            request_id=offer.request_id,
            cause=handoff.cause,
            message=handoff.message,
            part=offer.part,
            parts=offer.parts,
            prompt=offer.prompt,
        )
