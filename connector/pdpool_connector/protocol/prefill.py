"""Prefill's side in WRITE: pages go out as soon as both halves have met, and prefill says when nothing is under way."""

from itertools import count

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.ending import LIVE
from pdpool_connector.protocol.events import StopWriting, Write, WriteEnded, WriteResult
from pdpool_connector.protocol.exchange import Exchange, InvalidSendError, Piece
from pdpool_connector.protocol.meeting import MeetingMachine
from pdpool_connector.protocol.states import PREFILL_TRANSITIONS, PrefillState, Trigger
from pdpool_connector.protocol.status import Cause, cause_from_peer
from pdpool_connector.protocol.timeouts import Timeouts

S = PrefillState
_WRITE_CAUSES = {WriteResult.INVALID: Cause.INVALID}


class PrefillMachine(MeetingMachine):
    """Hand-offs of one prefill process that writes into decode's memory; see `Machine` for how it is driven."""

    _transitions = PREFILL_TRANSITIONS

    def __init__(self, incarnation: str, timing: Timeouts | None = None) -> None:
        super().__init__(incarnation, timing)
        self._writes = count()
        self._on_event |= {WriteEnded: self._on_write_ended}
        self._on_frame |= {f.Abort: self._on_abort}
        self._on_timer |= {"told": self._tell_failed}

    # --- Writing ---

    def _pump(self, exchange: Exchange) -> None:
        """Turn queued sends into writes."""
        if exchange.state not in LIVE:
            return
        try:
            for piece in exchange.cut():
                if not piece.empty:
                    self._write(exchange, piece)
        except InvalidSendError as error:
            self._fail(exchange.handoff, Cause.INVALID, str(error))
        self._complete_if_landed(exchange)

    def _write(self, exchange: Exchange, piece: Piece) -> None:
        peer = exchange.attempt.decode
        if exchange.state is S.READY:
            self._move(exchange, Trigger.SUBMITTED)
            self._report(exchange.handoff)
            if not piece.last:
                self._answer(exchange)
        write = next(self._writes)
        exchange.in_flight.add(write)
        effect = Write(exchange.attempt, write, peer, piece.source, piece.target, piece.aux, piece.state)
        self._effects.append(effect)

    def _on_write_ended(self, event: WriteEnded) -> None:
        exchange = self._by_attempt.get(event.attempt)
        if exchange is None or event.write not in exchange.in_flight:
            return
        exchange.in_flight.remove(event.write)
        exchange.bytes_moved += event.bytes_moved
        exchange.sums.append(event.checksum)
        if event.result is WriteResult.UNSETTLED:
            exchange.unsettled = True
        if exchange.state in LIVE and event.result is not WriteResult.LANDED:
            cause = _WRITE_CAUSES.get(event.result, Cause.TRANSFER_FAILED)
            self._fail(exchange.handoff, cause, event.message or f"a write was {event.result}")
        elif exchange.state in LIVE:
            self._complete_if_landed(exchange)
        else:
            self._settle(exchange)

    def _complete_if_landed(self, exchange: Exchange) -> None:
        if exchange.state in LIVE and exchange.closed and exchange.quiet:
            self._move(exchange, Trigger.COMPLETED)
            self._finalize(exchange)
            self._report(exchange.handoff)

    # --- OutcomeLog ---

    def _begin_drain(self, exchange: Exchange) -> None:
        self._effects.append(StopWriting(exchange.attempt, exchange.attempt.decode))
        self._tell_failed(exchange)
        self._settle(exchange)

    def _settle(self, exchange: Exchange) -> None:
        """What can never be proved here becomes a hold at once."""
        super()._settle(exchange)
        if exchange.state is S.DRAINING and not exchange.in_flight:
            self._move(exchange, Trigger.UNPROVEN)

    def _prove_quiet(self, exchange: Exchange) -> None:
        exchange.in_flight.clear()
        exchange.unsettled = False

    # --- What decode says and is told ---

    def _on_abort(self, frame: f.Abort) -> None:
        cause = cause_from_peer(frame.cause, Cause.PEER_ABORTED)
        exchange = self._by_attempt.get(frame.attempt)
        if exchange is not None:
            self._fail(exchange.handoff, cause, frame.message)
        elif self._verdicts.answer(frame, self._now):
            self._ignore("stale", f"Abort for attempt {frame.attempt}, which has ended")
        else:
            self._abort_unseen(frame, cause)

    def _answer(self, exchange: Exchange) -> None:
        if exchange.state in (S.PARKED, S.READY):
            self._send(exchange.attempt.decode, f.Accepted, exchange)
        elif exchange.state is S.SENDING:
            self._send(exchange.attempt.decode, f.Sending, exchange)
        else:
            self._send_failed(exchange)

    def _send_failed(self, exchange: Exchange) -> None:
        handoff = exchange.handoff
        self._send(exchange.attempt.decode, f.Failed, exchange, cause=handoff.cause, message=handoff.message)

    def _tell_failed(self, exchange: Exchange) -> None:
        """Say that it has failed and drains; again later, until it is drained or decode has to ask."""
        self._send_failed(exchange)
        if exchange.state is S.DRAINING:
            self._timers.set(("told", exchange), self._now + exchange.retry_s)
            exchange.retry_s = min(2 * exchange.retry_s, self.timing.retry_max_s)
