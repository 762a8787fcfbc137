"""The tables of a prefill machine, and how hand-offs leave them.

A hand-off is found by handle, its exchanges by attempt, and all of it by room. Each exchange leaves its tables in
`_finalize`, once; a tombstone remains, which answers late frames. A failure of one exchange fails the whole hand-off.
"""

from collections import Counter
from itertools import count
from types import MappingProxyType

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Drain,
    Fenced,
    PeerLost,
    PeerReady,
    Report,
    Shutdown,
    StopWriting,
)
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.handoff import HandOff, RankExchange
from pdpool_connector.protocol.machine import Machine
from pdpool_connector.protocol.release import prefill_may_release
from pdpool_connector.protocol.rooms import ENDED_HALF, Rooms
from pdpool_connector.protocol.states import (
    FAILURES,
    PREFILL_ENDED,
    PREFILL_LIVE,
    PREFILL_QUEUES,
    PREFILL_TRANSITIONS,
    PrefillState,
    TransitionError,
    Trigger,
)
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.tombstones import EXPIRY, REPEAT, Tombstone, TombstoneTable

S = PrefillState
DRAINING = "prefill is draining and takes no new requests"


class PrefillMachineBase(Machine[PrefillState]):
    """Tables, ends and peers of prefill; matching and writing are in `prefill.py`."""

    EVENTS = MappingProxyType(
        {
            **Machine.EVENTS,
            AbortTransfer: "_on_abort_transfer",
            Shutdown: "_on_shutdown",
        }
    )
    TIMERS = MappingProxyType(
        {
            "life": "_on_life_over",
            "quiesce": "_on_quiesce_over",
            "unsettled": "_repeat_unsettled",
            "peer": "_on_peer_long_gone",
            REPEAT: "_repeat_result",
            EXPIRY: "_on_tombstone_expired",
            ENDED_HALF: "_on_half_expired",
        }
    )

    def __init__(self, incarnation: str, timeouts: Timeouts | None = None) -> None:
        super().__init__(incarnation, PREFILL_QUEUES, timeouts or Timeouts())
        self._serials = count()
        self._by_handle: dict[int, HandOff] = {}
        self._by_attempt: dict[AttemptId, RankExchange] = {}
        self._of_peer: dict[str, dict[AttemptId, RankExchange]] = {}
        self._offered_bytes: Counter[str] = Counter()
        """Bytes of ids in the offers of live attempts, by decode."""
        self._tombstones = TombstoneTable(self.timeouts, self._timers)
        self._rooms = Rooms(self.timeouts.max_attempts, self.timeouts.result_s, self._timers)

    @property
    def rows(self) -> int:
        """Everything this machine keeps about hand-offs, remembered ends included; 0 when nothing is left behind."""
        handoffs = [*self._by_handle.values(), *self._rooms.live()]
        handoffs += [exchange.handoff for exchange in self._by_attempt.values()]
        return len({handoff.serial for handoff in handoffs}) + len(self._tombstones) + self._rooms.ended

    @property
    def tombstones(self) -> int:
        """How many ended attempts are remembered."""
        return len(self._tombstones)

    @property
    def unsettled(self) -> int:
        """How many hand-offs wait for writes to end, or for paired decodes to acknowledge their end."""
        return self.queues.count("quiescing") + self._tombstones.unacknowledged(self._versions)

    def find(self, attempt: AttemptId) -> RankExchange | None:
        """The exchange of an attempt that is not settled yet."""
        return self._by_attempt.get(attempt)

    def under_way(self, peer: str) -> list[RankExchange]:
        """The exchanges with a peer that are not settled yet."""
        return list(self._of_peer.get(peer, {}).values())

    def held(self) -> list[RankExchange]:
        """Exchanges whose source pages stay back until a proof."""
        if not self.queues.count("held"):
            return []
        return [exchange for exchange in self._by_attempt.values() if exchange.state is S.HELD]

    # --- Failing ---

    def _fail(self, handoff: HandOff, cause: Cause, message: str) -> None:
        """The only way into failure. The first cause stays."""
        if handoff.cause is not None or handoff.state not in PREFILL_LIVE:
            return
        handoff.cause, handoff.message = cause, f.text(message)
        self._timers.cancel(("life", handoff))
        decode = next((exchange.attempt.decode for exchange in handoff.exchanges.values()), "")
        self._rooms.end(handoff, decode, self._now)
        for exchange in handoff.all:
            if exchange.state in PREFILL_ENDED:
                continue
            if exchange.settled:
                self._move(exchange, Trigger.ENDED)
                self._finalize(exchange)
            else:
                self._quiesce(exchange)
        self._report(handoff)

    def _quiesce(self, exchange: RankExchange) -> None:
        """It failed while writes read our pages: stop them, and keep decode informed until they have ended."""
        self._move(exchange, Trigger.BROKEN)
        self._timers.set(("quiesce", exchange), self._now + self.timeouts.quiesce_s)
        self._effects.append(StopWriting(exchange.attempt, exchange.attempt.decode))
        exchange.retry_s = self.timeouts.retry_first_s
        self._repeat_unsettled(exchange)
        self._settle(exchange)

    def _settle(self, exchange: RankExchange) -> None:
        """End a failed exchange if it is settled. One that can only be settled by a fence is held at once."""
        if prefill_may_release(exchange):
            self._move(exchange, Trigger.SETTLED)
            self._finalize(exchange)
        elif exchange.state is S.QUIESCING and not exchange.in_flight:
            self._move(exchange, Trigger.UNPROVEN)

    def _on_quiesce_over(self, exchange: RankExchange) -> None:
        if exchange.state is S.QUIESCING:
            self._move(exchange, Trigger.UNPROVEN)

    def _finalize(self, exchange: RankExchange) -> None:
        """Take an exchange out of every table, and its hand-off too if it was the last. Once for each exchange."""
        handoff, opened = exchange.handoff, exchange.opened
        if opened is not None:
            self._timers.cancel(("quiesce", exchange))
            self._timers.cancel(("unsettled", exchange))
            self._forget_attempt(exchange)
            cause = handoff.cause if exchange.state is S.FAILED else None
            sums = (exchange.bytes_moved, exchange.checksum)
            self._end_attempt(Tombstone(opened.attempt, handoff.room, cause, handoff.message, *sums))
        if handoff.state not in PREFILL_ENDED:
            return
        if handoff.state is S.DONE:
            self._timers.cancel(("life", handoff))
            self._rooms.leave(handoff)
        if handoff.request is not None:
            self._by_handle.pop(handoff.request.handle, None)
        self._report(handoff)
        handoff.clear()

    def _forget_attempt(self, exchange: RankExchange) -> None:
        attempt, decode = exchange.attempt, exchange.attempt.decode
        del self._by_attempt[attempt]
        peers = self._of_peer[decode]
        del peers[attempt]
        if exchange.offer is not None:
            self._offered_bytes[decode] -= exchange.offer.id_bytes
        if not peers:
            del self._of_peer[decode]
            self._offered_bytes.pop(decode, None)

    def _on_life_over(self, handoff: HandOff) -> None:
        if handoff.request is None:
            waited = "the engine of prefill never sent the request"
        elif not handoff.ranks:
            waited = "no decode opened an attempt for the request"
        elif handoff.lacks_ranks:
            waited = f"only {len(handoff.ranks)} of {handoff.rank_count} decode ranks opened an attempt for the request"
        else:
            waited = f"the deadline passed while it was {handoff.state}"
        self._fail(handoff, Cause.TIMED_OUT, f"timed out at prefill: {waited}")

    def _on_abort_transfer(self, event: AbortTransfer) -> None:
        handoff = self._by_handle.get(event.handle)
        if handoff is not None:
            self._fail(handoff, event.cause, event.message or "aborted by the engine of prefill")

    def _on_drain(self, event: Drain) -> None:
        """Attempts without a request end at once: no new request will be taken for them."""
        super()._on_drain(event)
        for handoff in self._rooms.live():
            if handoff.request is None:
                self._fail(handoff, Cause.REFUSED, DRAINING)

    def _on_shutdown(self, _: Shutdown) -> None:
        self.draining = True
        for handoff in [*self._by_handle.values(), *self._rooms.live()]:
            self._fail(handoff, Cause.SHUTDOWN, "prefill is shutting down")

    def _on_half_expired(self, handoff: HandOff) -> None:
        self._rooms.forget(handoff)

    # --- Peers ---

    def _on_peer_ready(self, event: PeerReady) -> None:
        super()._on_peer_ready(event)
        if self.fenced(event.peer):
            return
        self._timers.cancel(("peer", event.peer))
        # A rebuilt connection may have lost frames, and decode may have ended attempts meanwhile.
        for exchange in self.under_way(event.peer):
            self._answer(exchange)

    def _on_lost(self, event: PeerLost) -> None:
        super()._on_lost(event)
        self._forget_peer_later(event.peer)
        for exchange in self.under_way(event.peer):
            self._fail(exchange.handoff, Cause.PEER_LOST, event.message)

    def _on_fenced(self, event: Fenced) -> None:
        super()._on_fenced(event)
        self._forget_peer_later(event.peer)
        for exchange in self.under_way(event.peer):
            self._fail(exchange.handoff, Cause.PEER_LOST, f"decode was fenced: {event.proof}")
            if exchange.state in (S.QUIESCING, S.HELD):
                exchange.in_flight.clear()
                exchange.unproven = False
                self._settle(exchange)

    def _forget_peer_later(self, peer: str) -> None:
        """A lost decode may come back: what only its return would need is kept for a while."""
        self._timers.set(("peer", peer), self._now + self.timeouts.result_s)

    def _on_peer_long_gone(self, peer: str) -> None:
        if peer in self._of_peer or not self._tombstones.forget_peer(peer):
            self._forget_peer_later(peer)

    # --- Results ---

    def _answer(self, exchange: RankExchange) -> None:
        """Send decode how a known attempt stands."""
        if exchange.state in PREFILL_LIVE:
            self._send(exchange.attempt.decode, f.Accepted, exchange, offered=exchange.offer is not None)
        else:
            self._send_unsettled(exchange)

    def _repeat_unsettled(self, exchange: RankExchange) -> None:
        """Send that it failed and is not settled; again later, until it is settled or decode has to ask."""
        self._send_unsettled(exchange)
        if exchange.state is S.QUIESCING:
            self._timers.set(("unsettled", exchange), self._now + exchange.retry_s)
            exchange.retry_s = min(2 * exchange.retry_s, self.timeouts.retry_max_s)

    def _send_unsettled(self, exchange: RankExchange) -> None:
        handoff = exchange.handoff
        result = {"cause": handoff.cause, "settled": False, "message": handoff.message}
        self._send(exchange.attempt.decode, f.Ended, exchange, **result, bytes_moved=exchange.bytes_moved)

    def _end_attempt(self, tombstone: Tombstone) -> None:
        """Remember the end of an attempt and send it. Room is kept for the ends of all attempts under way."""
        live, of_peer = len(self._by_attempt), len(self._of_peer.get(tombstone.attempt.decode, ()))
        self._tombstones.add(tombstone, self._now, reserved=live, reserved_of_peer=of_peer)
        self._send_result(tombstone)

    def _send_result(self, tombstone: Tombstone) -> None:
        self._send(tombstone.attempt.decode, f.Ended, tombstone, **tombstone.result())

    def _repeat_result(self, attempt: AttemptId) -> None:
        tombstone = self._tombstones.get(attempt)
        if tombstone is not None:
            self._send_result(tombstone)
            self._tombstones.repeat_later(tombstone, self._now)

    def _on_tombstone_expired(self, attempt: AttemptId) -> None:
        self._tombstones.expire(attempt)

    # --- States and reports ---

    def _move(self, exchange: RankExchange, trigger: Trigger) -> None:
        before = exchange.state
        after = PREFILL_TRANSITIONS.get((before, trigger))
        if after is None:
            raise TransitionError(f"prefill has no transition for {trigger} in {before}")
        exchange.state = after
        handoff = exchange.handoff
        was, handoff.state = handoff.state, handoff.joint_state
        if handoff.state is not was:
            progress = trigger not in FAILURES
            self.queues.move(handoff.serial, was, handoff.state, self._now, progress=progress)

    def _report(self, handoff: HandOff) -> None:
        """Report the status of the whole, if it has changed."""
        if handoff.request is None or handoff.reported.releasable:
            return
        if (status := handoff.status()) != handoff.reported:
            handoff.reported = status
            attempts = tuple([exchange.attempt for exchange in handoff.exchanges.values()])
            self._effects.append(Report(handoff.request.handle, status, attempts))
