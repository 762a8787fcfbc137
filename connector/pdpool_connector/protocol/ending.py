"""How hand-offs end at prefill: the tables they are in, and the one way out of them.

A `HandOff` is found by handle, its exchanges by attempt, and, while something may still come, by room, sibling and
prompt. Each exchange leaves all tables in `_finalize`, which every end passes through once; what remains is a tombstone
that answers late frames. What fails in one exchange fails the others of its hand-off.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Drain,
    Fenced,
    PeerLost,
    PeerReady,
    Report,
    Shutdown,
)
from pdpool_connector.protocol.exchange import ENDED, Exchange, HandOff
from pdpool_connector.protocol.expecting import Expected, Parted
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.machine import Machine
from pdpool_connector.protocol.missed import Missed, MissedHalves
from pdpool_connector.protocol.rooms import Rooms
from pdpool_connector.protocol.states import FAILURES, PrefillState, TransitionError, Trigger
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.tombstones import ResultNotifier, Tombstone

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


class EndingMachine(Machine[PrefillState], ABC):
    """What both directions share of their ends; `_transitions` is the table of the one that it is."""

    _transitions: Mapping[tuple[PrefillState | None, Trigger], PrefillState]

    def __init__(self, incarnation: str, timing: Timeouts | None = None) -> None:
        super().__init__(incarnation, PREFILL_LABELS, timing or Timeouts())
        self._by_handle: dict[int, HandOff] = {}
        self._rooms = Rooms()
        self._by_attempt: dict[AttemptId, Exchange] = {}
        self._of_peer: dict[str, dict[AttemptId, Exchange]] = {}
        self._offered: Counter[str] = Counter()
        """Bytes of ids in the offers of live attempts, by decode."""
        self._verdicts = ResultNotifier(self.timing, self._timers, self._send)
        self._graves = self._verdicts.graves
        self._missed = MissedHalves(self.timing.max_attempts, self.timing.verdict_s, self._timers)
        self._expected = Expected(self.timing.max_attempts, self._timers)
        self._parted = Parted(self.timing.max_attempts, self.timing.verdict_s, self._timers)
        self._on_event |= {
            AbortTransfer: self._on_abort_transfer,
            Shutdown: self._on_shutdown,
        }
        self._on_frame |= {f.Ack: self._on_ack}
        self._on_timer |= {
            "life": self._on_life_over,
            "drain": self._on_drain_over,
            "verdict": lambda key: self._verdicts.tell(key, self._now),
            "grave": self._verdicts.forget,
            "missed": lambda table: table.expire(self._now),
            "expected": self._expected.forget,
            "parted": lambda table: table.expire(self._now),
            "peer": self._on_peer_long_gone,
        }

    @property
    def rows(self) -> int:
        """Everything this machine keeps about hand-offs, remembered ends included; 0 when nothing is left behind."""
        handoffs = [*self._by_handle.values(), *self._rooms]
        handoffs += [exchange.handoff for exchange in self._by_attempt.values()]
        remembered = len(self._graves) + len(self._missed) + len(self._expected) + len(self._parted)
        return len({handoff.serial for handoff in handoffs}) + remembered

    @property
    def expected(self) -> int:
        """How many requests decodes have announced and not opened."""
        return len(self._expected)

    @property
    def tombstones(self) -> int:
        """How many ended attempts are remembered."""
        return len(self._graves)

    def find(self, attempt: AttemptId) -> Exchange | None:
        """The exchange of an attempt that has not ended, or whose end is not proved quiet."""
        return self._by_attempt.get(attempt)

    def under_way(self, peer: str) -> list[Exchange]:
        """What is under way with a peer, ends not yet proved quiet included."""
        return list(self._of_peer.get(peer, {}).values())

    @property
    def unsettled(self) -> int:
        """How many hand-offs still wait for what is in flight, or for decode's word, of decodes that are paired."""
        return self.census.count("draining") + self._verdicts.unheard(self._versions)

    def held(self) -> list[Exchange]:
        """Exchanges whose source pages stay back until a proof of quiet."""
        if not self.census.count("held"):
            return []
        return [exchange for exchange in self._by_attempt.values() if exchange.state is S.HELD]

    # --- What each direction does in its own way ---

    @abstractmethod
    def _begin_drain(self, exchange: Exchange) -> None:
        """It has failed while pages are touched: stop what can be stopped, and tell decode until it is quiet."""

    @abstractmethod
    def _prove_quiet(self, exchange: Exchange) -> None:
        """There is proof that nothing of it is under way any more."""

    # --- OutcomeLog ---

    def _fail(self, handoff: HandOff, cause: Cause, message: str) -> None:
        """The one way into failure. The first cause stays; later ones find the hand-off not live any more."""
        if handoff.cause is not None or handoff.state not in LIVE:
            return
        handoff.cause, handoff.message = cause, f.text(message)
        self._leave_room(handoff)
        self._remember_missed(handoff)
        for exchange in handoff.all:
            if exchange.state in ENDED:
                continue
            if exchange.quiet:
                self._move(exchange, Trigger.ENDED)
                self._finalize(exchange)
            else:
                self._move(exchange, Trigger.BROKEN)
                self._timers.set(("drain", exchange), self._now + self.timing.drain_s)
                exchange.retry_s = self.timing.retry_first_s
                self._begin_drain(exchange)
        self._report(handoff)

    def _settle(self, exchange: Exchange) -> None:
        """A failed exchange ends once it is quiet."""
        if exchange.quiet:
            self._move(exchange, Trigger.QUIET)
            self._finalize(exchange)
            self._report(exchange.handoff)

    def _finalize(self, exchange: Exchange) -> None:
        """Take an ended exchange out of every table and leave a tombstone. Once for each exchange."""
        for timer in ("drain", "told", "announce"):
            self._timers.cancel((timer, exchange))
        handoff, offer = exchange.handoff, exchange.offer
        if offer is not None:
            attempt, decode = offer.attempt, offer.attempt.decode
            del self._by_attempt[attempt]
            peers = self._of_peer[decode]
            del peers[attempt]
            self._offered[decode] -= offer.id_bytes
            if not peers:
                del self._of_peer[decode], self._offered[decode]
            cause = handoff.cause if exchange.state is S.FAILED else None
            sums = (exchange.bytes_moved, exchange.checksum)
            self._bury(offer, cause, handoff.message, *sums, heard=exchange.heard)
        if handoff.state in ENDED:
            self._leave_room(handoff)
            if handoff.request is not None:
                self._by_handle.pop(handoff.request.handle, None)
            self._report(handoff)
            handoff.let_go()

    def _leave_room(self, handoff: HandOff) -> None:
        self._timers.cancel(("life", handoff))
        self._timers.cancel(("unexpected", handoff))
        self._rooms.leave(handoff)

    def _remember_missed(self, handoff: HandOff) -> None:
        """What has yet to come of a failed hand-off is told so when it comes. A superseded one has a successor."""
        request, cause = handoff.request, handoff.cause
        request_id = handoff.offered_as or (request.request_id if request is not None else "")
        assert cause is not None
        awaited = request is None and cause is not Cause.SUPERSEDED
        decode = next((exchange.attempt.decode for exchange in handoff.exchanges.values()), "")
        parts = (handoff.parts, set(handoff.came))
        missed = Missed(request_id, cause, handoff.message, awaited, handoff.prompt, *parts)
        self._missed.remember(handoff.key, missed, decode, self._now)

    def _on_life_over(self, handoff: HandOff) -> None:
        waited = "the request never came" if handoff.request is None else f"it was {handoff.state}"
        if handoff.request is not None and handoff.parts > len(handoff.came):
            waited += f", {len(handoff.came)} of {handoff.parts} decode ranks having come"
        self._fail(handoff, Cause.TIMED_OUT, f"deadline passed at prefill while {waited}")

    def _on_drain_over(self, exchange: Exchange) -> None:
        if exchange.state is S.DRAINING:
            self._move(exchange, Trigger.UNPROVEN)

    def _on_abort_transfer(self, event: AbortTransfer) -> None:
        handoff = self._by_handle.get(event.handle)
        if handoff is not None:
            self._fail(handoff, event.cause, event.message or "aborted by the engine of prefill")

    def _on_drain(self, event: Drain) -> None:
        """What waits for its request waits in vain from now on: decode is told now, not at its deadline."""
        super()._on_drain(event)
        for handoff in list(self._rooms):
            if handoff.request is None:
                self._fail(handoff, Cause.REFUSED, "prefill is draining and takes no new requests")

    def _on_shutdown(self, _: Shutdown) -> None:
        self.draining = True
        for handoff in [*self._by_handle.values(), *self._rooms]:
            self._fail(handoff, Cause.SHUTDOWN, "prefill is shutting down")

    # --- Peers ---

    def _on_peer_ready(self, event: PeerReady) -> None:
        super()._on_peer_ready(event)
        if not self.fenced(event.peer):
            self._timers.cancel(("peer", event.peer))

    def _on_lost(self, event: PeerLost) -> None:
        super()._on_lost(event)
        self._part_with(event.peer)
        for exchange in self.under_way(event.peer):
            self._fail(exchange.handoff, Cause.PEER_LOST, event.message)

    def _part_with(self, peer: str) -> None:
        """What only its return would need is kept for a while."""
        self._timers.set(("peer", peer), self._now + self.timing.verdict_s)

    def _on_peer_long_gone(self, peer: str) -> None:
        if peer in self._of_peer or not self._graves.forget_peer(peer):
            self._part_with(peer)

    def _on_fenced(self, event: Fenced) -> None:
        super()._on_fenced(event)
        self._part_with(event.peer)
        for exchange in self.under_way(event.peer):
            self._fail(exchange.handoff, Cause.PEER_LOST, f"decode was fenced: {event.proof}")
            if exchange.state in (S.DRAINING, S.HELD):
                self._prove_quiet(exchange)
                self._settle(exchange)

    # --- What decode is told ---

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
        self._remember(Tombstone(*header, cause, message, bytes_moved, checksum, heard=heard))

    def _remember(self, tombstone: Tombstone) -> None:
        """Room is kept for the ends of what is under way: what is refused meanwhile must not take it."""
        live, of_peer = len(self._by_attempt), len(self._of_peer.get(tombstone.to, ()))
        self._verdicts.reach(tombstone, self._now, reserved=live, reserved_of_peer=of_peer)

    # --- Small change ---

    def _move(self, exchange: Exchange, cue: Trigger) -> None:
        before = exchange.state
        after = self._transitions.get((before, cue))
        if after is None:
            raise TransitionError(f"prefill has no transition for {cue} in {before}")
        exchange.state = after
        handoff = exchange.handoff
        was, handoff.state = handoff.state, handoff.aggregate()
        if handoff.state is not was:
            self.census.move(handoff.serial, was, handoff.state, self._now, progress=cue not in FAILURES)

    def _report(self, handoff: HandOff) -> None:
        """Tell the engine how the whole stands, if that is news."""
        if handoff.request is None or (handoff.reported is not None and handoff.reported.releasable):
            return
        if (status := handoff.status()) != handoff.reported:
            handoff.reported = status
            attempts = tuple([exchange.attempt for exchange in handoff.exchanges.values()])
            self._effects.append(Report(handoff.request.handle, status, attempts))
