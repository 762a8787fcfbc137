"""Decode's side of a hand-off, without I/O: it opens attempts, offers memory, and ends both.

One or more prefill ranks ("writers") write to the memory of one attempt. The attempt is done when each of them has sent
a settled `Ended` without a cause. There are no tombstones here: attempt numbers come from our own counter, so an
attempt that is not in the table has ended.
"""

from types import MappingProxyType

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.attempt import DecodeAttempt
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Connect,
    Fenced,
    Linked,
    OfferPages,
    OpenAttempt,
    PeerLost,
    Report,
    Shutdown,
    Unlinked,
    Unreachable,
    Writer,
)
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.machine import Machine
from pdpool_connector.protocol.states import (
    DECODE_LIVE,
    DECODE_QUEUES,
    DECODE_TRANSITIONS,
    FAILURES,
    DecodeState,
    TransitionError,
    Trigger,
)
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus, cause_from_peer
from pdpool_connector.protocol.timeouts import Timeouts

S = DecodeState


class DecodeMachine(Machine[DecodeState]):
    """Hand-offs of one decode process; see `Machine` for how it is driven."""

    EVENTS = MappingProxyType(
        {
            **Machine.EVENTS,
            OpenAttempt: "_on_open_attempt",
            OfferPages: "_on_offer_pages",
            AbortTransfer: "_on_abort_transfer",
            Linked: "_on_linked",
            Unlinked: "_on_unlinked",
            Unreachable: "_on_unreachable",
            Shutdown: "_on_shutdown",
        }
    )
    FRAMES = MappingProxyType({f.Accepted: "_on_accepted", f.Ended: "_on_ended"})
    TIMERS = MappingProxyType({"life": "_on_life_over", "abort": "_on_abort_over", "nudge": "_nudge"})

    def __init__(self, incarnation: str, timeouts: Timeouts | None = None) -> None:
        super().__init__(incarnation, DECODE_QUEUES, timeouts or Timeouts())
        self._attempts: dict[AttemptId, DecodeAttempt] = {}
        self._of_peer: dict[str, dict[AttemptId, DecodeAttempt]] = {}
        self._links: dict[str, tuple[Writer, ...]] = {}
        """Writers of each linked prefill, by bootstrap address."""
        self._connecting: dict[str, dict[AttemptId, DecodeAttempt]] = {}
        """Attempts that wait for their prefill to be linked, by bootstrap address."""

    @property
    def rows(self) -> int:
        """Everything this machine keeps about hand-offs; 0 when nothing is left behind."""
        return len(self._attempts)

    @property
    def tombstones(self) -> int:
        """Decode remembers no ends."""
        return 0

    @property
    def unsettled(self) -> int:
        """How many failed hand-offs wait for writers to settle, or for prefill to answer."""
        return self.queues.count("aborting")

    def find(self, attempt: AttemptId) -> DecodeAttempt | None:
        """An attempt that has not ended, or whose pages stay back."""
        return self._attempts.get(attempt)

    def under_way(self, peer: str) -> list[DecodeAttempt]:
        """The attempts with a writer that have not ended, or whose pages stay back."""
        return list(self._of_peer.get(peer, {}).values())

    def waits_for(self, prefill: str) -> bool:
        """Whether attempts wait for the bootstrap address `prefill` to be linked."""
        return prefill in self._connecting

    def holds_for(self, prefill: str) -> bool:
        """Whether pages stay back that a process behind `prefill` could settle, were it connected."""
        return any(attempt.params.prefill == prefill for attempt in self.held())

    def held(self) -> list[DecodeAttempt]:
        """Attempts whose pages stay back until a proof."""
        if not self.queues.count("held"):
            return []
        return [attempt for attempt in self._attempts.values() if attempt.state is S.HELD]

    # --- Opening ---

    def _on_open_attempt(self, params: OpenAttempt) -> None:
        """An attempt that is refused has a row as well, until prefill has the refusal: its request waits there."""
        refusal = self._refusal()
        if refusal and len(self._attempts) >= 2 * self.timeouts.max_attempts:
            message = f"{refusal}; prefill is not informed, for decode has too many failed hand-offs under way"
            refused = TransferStatus(Phase.FAILED, cause=Cause.REFUSED, message=message, releasable=True)
            self._effects.append(Report(params.handle, refused))
            return
        number = AttemptId(self.incarnation, params.handle)
        attempt = self._attempts[number] = DecodeAttempt(number, params, self._now + params.deadline_s)
        self._timers.set(("life", attempt), attempt.deadline)
        self._move(attempt, Trigger.REQUESTED)
        if refusal:
            self._fail(attempt, Cause.REFUSED, refusal)
        else:
            self._report(attempt)
        if (writers := self._links.get(params.prefill)) is not None:
            self._introduce(attempt, writers)
        else:
            self._connecting.setdefault(params.prefill, {})[number] = attempt
            self._effects.append(Connect(params.prefill))

    def _refusal(self) -> str:
        """Why no attempt is taken; empty if it is."""
        if self.draining:
            return "decode is draining and takes no new requests"
        if len(self._attempts) >= self.timeouts.max_attempts:
            return f"decode has {self.timeouts.max_attempts} hand-offs under way, which is its limit"
        return ""

    def _introduce(self, attempt: DecodeAttempt, writers: tuple[Writer, ...]) -> None:
        """Send an attempt to its writers, or, when it has failed meanwhile, its failure."""
        attempt.writers = {writer.incarnation: writer for writer in writers}
        for writer in attempt.writers:
            self._of_peer.setdefault(writer, {})[attempt.attempt] = attempt
        if attempt.state is S.CONNECTING:
            self._move(attempt, Trigger.LINKED)
        self._send_news(attempt)

    def _on_offer_pages(self, event: OfferPages) -> None:
        """Of an attempt that has ended, or has memory already, nothing is taken: no peer gets to know these pages."""
        attempt = self._attempts.get(AttemptId(self.incarnation, event.handle))
        if attempt is None or attempt.state not in DECODE_LIVE or attempt.memory is not None:
            self._ignore("offer", f"memory was offered for attempt {event.handle}, which has ended or has memory")
            return
        attempt.memory = event
        if self._linked(attempt):
            self._note_offered(attempt)
            for writer in attempt.unsettled_peers:
                self._send_offer(writer, attempt)  # its Open is on the way already
            attempt.retry_s = self.timeouts.retry_first_s
            self._nudge_later(attempt)

    def _linked(self, attempt: DecodeAttempt) -> bool:
        """Whether the attempt was sent to its writers, and all of them are connected now."""
        linked = {writer.incarnation for writer in self._links.get(attempt.params.prefill, ())}
        return bool(attempt.writers) and linked.issuperset(attempt.writers)

    def _note_offered(self, attempt: DecodeAttempt) -> None:
        attempt.offered = True
        self._move(attempt, Trigger.OFFERED)
        self._report(attempt)

    def _send_news(self, attempt: DecodeAttempt) -> None:
        """Send all that new writers must know, or what a rebuilt connection may have lost; back-off begins again."""
        if attempt.state is S.OPENED and attempt.memory is not None and self._linked(attempt):
            self._note_offered(attempt)
        attempt.retry_s = self.timeouts.retry_first_s
        self._nudge(attempt)
        if attempt.cause is None and attempt.offered:
            for writer in attempt.unsettled_peers:
                if writer not in attempt.accepted:
                    self._send_offer(writer, attempt)

    # --- Links ---

    def _on_linked(self, event: Linked) -> None:
        if fenced := [writer for writer in event.writers if self.fenced(writer.incarnation)]:
            gone = f"process {fenced[0].incarnation[:8]} of prefill {event.prefill} was fenced, and is gone"
            self._on_unreachable(Unreachable(event.prefill, Cause.PEER_LOST, gone))
            return
        self._links[event.prefill] = event.writers
        known = {attempt: None for writer in event.writers for attempt in self.under_way(writer.incarnation)}
        for attempt in known:
            self._send_news(attempt)
        for attempt in self._connecting.pop(event.prefill, {}).values():
            self._introduce(attempt, event.writers)

    def _on_unlinked(self, event: Unlinked) -> None:
        self._links.pop(event.prefill, None)

    def _on_unreachable(self, event: Unreachable) -> None:
        for attempt in list(self._connecting.get(event.prefill, {}).values()):
            self._fail(attempt, event.cause, event.message, inform=False)
            self._end_uninformed(attempt)

    def _on_lost(self, event: PeerLost) -> None:
        super()._on_lost(event)
        self._unlink(event.peer)
        for attempt in self.under_way(event.peer):
            if event.peer in attempt.unsettled_peers:
                self._fail(attempt, Cause.PEER_LOST, event.message)
                self._stop_if_unreachable(attempt)

    def _on_fenced(self, event: Fenced) -> None:
        super()._on_fenced(event)
        self._unlink(event.peer)
        for attempt in self.under_way(event.peer):
            if event.peer in attempt.unsettled_peers:
                attempt.settled.add(event.peer)
                self._fail(attempt, Cause.PEER_LOST, f"prefill was fenced: {event.proof}")
                self._end_if_settled(attempt)

    def _unlink(self, peer: str) -> None:
        for prefill, writers in list(self._links.items()):
            if any(writer.incarnation == peer for writer in writers):
                del self._links[prefill]

    # --- Frames of writers ---

    def _find(self, frame: f.AttemptFrame) -> DecodeAttempt | None:
        """The attempt that a frame is about; None, and counted, where the frame does not fit."""
        attempt = self._attempts.get(frame.attempt)
        if attempt is None:
            self._ignore("stale", f"{type(frame).__name__} for attempt {frame.attempt}, which has ended")
        elif frame.sender not in attempt.writers:
            self._ignore("stranger", f"{type(frame).__name__} for attempt {frame.attempt} from {frame.sender[:8]}")
        elif frame.room != attempt.room:
            self._ignore("mismatch", f"attempt {frame.attempt} is for room {attempt.room}, not {frame.room}")
        else:
            return attempt
        return None

    def _on_accepted(self, frame: f.Accepted) -> None:
        attempt = self._find(frame)
        if frame.attempt.decode == self.incarnation and frame.attempt not in self._attempts:
            gone = {"cause": Cause.FORGOTTEN, "message": "decode has ended this attempt"}
            self._send(frame.sender, f.Abort, frame, request_id="", **gone)
        if attempt is None or attempt.state not in DECODE_LIVE:
            return
        waited = not attempt.answered
        attempt.accepted.add(frame.sender)
        if frame.offered:
            attempt.offer_accepted.add(frame.sender)
        elif attempt.offered:
            self._send_offer(frame.sender, attempt)
        if waited and attempt.answered:
            self._timers.set(("nudge", attempt), self._now + self.timeouts.query_s)

    def _on_ended(self, frame: f.Ended) -> None:
        attempt = self._find(frame)
        if frame.settled and frame.attempt.decode == self.incarnation:
            self._send(frame.sender, f.Ack, frame)
        if attempt is None or frame.sender not in attempt.unsettled_peers:
            return
        if frame.settled and not frame.cause and attempt.offered:
            attempt.done.add(frame.sender)
            attempt.bytes_moved += frame.bytes_moved
        else:
            if frame.settled:
                attempt.settled.add(frame.sender)
            cause = cause_from_peer(frame.cause, Cause.TRANSFER_FAILED)
            self._fail(attempt, cause, frame.message or "prefill ended the attempt and gave no reason")
        self._end_if_settled(attempt)

    def _end_if_settled(self, attempt: DecodeAttempt) -> None:
        """A writer has come to its end: that may end the attempt."""
        if attempt.state in DECODE_LIVE:
            if attempt.done.issuperset(attempt.writers):
                self._move(attempt, Trigger.COMPLETED)
                self._finalize(attempt)
        elif attempt.state in (S.ABORTING, S.HELD):
            if not attempt.unsettled_peers:
                self._move(attempt, Trigger.SETTLED)
                self._finalize(attempt)
            else:
                self._stop_if_unreachable(attempt)

    # --- Failing ---

    def _fail(self, attempt: DecodeAttempt, cause: Cause, message: str, *, inform: bool = True) -> None:
        """The only way into failure. The first cause stays.

        `inform`: prefill is sent the failure even if no writer knows the attempt, for prefill's request may wait.
        """
        if attempt.state not in DECODE_LIVE:
            return
        attempt.cause, attempt.message = cause, f.text(message)
        known = attempt.state is not S.CONNECTING
        if not attempt.unsettled_peers and (known or not inform):
            self._move(attempt, Trigger.ENDED)
            self._finalize(attempt)
            return
        self._move(attempt, Trigger.BROKEN)
        self._timers.cancel(("life", attempt))
        until = self._now + self.timeouts.quiesce_s
        # Prefill's request may wait for an attempt that prefill does not know yet, as long as the attempt would.
        self._timers.set(("abort", attempt), until if known else max(until, attempt.deadline))
        self._report(attempt)
        attempt.retry_s = self.timeouts.retry_first_s
        self._nudge(attempt)
        self._stop_if_unreachable(attempt)

    def _stop_if_unreachable(self, attempt: DecodeAttempt) -> None:
        """While no unsettled writer of a failed attempt is connected, no answer can come."""
        reachable = any(writer in self._versions for writer in attempt.unsettled_peers)
        if attempt.state is S.ABORTING and attempt.writers and not reachable:
            self._on_abort_over(attempt)

    def _on_abort_over(self, attempt: DecodeAttempt) -> None:
        """No answer to the Abort came in time, or none can come."""
        if attempt.state is S.ABORTING and attempt.offered:
            self._timers.cancel(("abort", attempt))
            self._move(attempt, Trigger.UNPROVEN)
        else:
            self._end_uninformed(attempt)

    def _end_uninformed(self, attempt: DecodeAttempt) -> None:
        """End a failed attempt whose memory no peer knows, although prefill has not answered the Abort.

        Should prefill still know the attempt when it is paired again, its `Accepted` is answered with an Abort.
        """
        if attempt.state is S.ABORTING and not attempt.offered:
            self._move(attempt, Trigger.SETTLED)
            self._finalize(attempt)

    def _finalize(self, attempt: DecodeAttempt) -> None:
        """Take an ended attempt out of every table and report it. Once for each attempt."""
        for timer in ("life", "abort", "nudge"):
            self._timers.cancel((timer, attempt))
        del self._attempts[attempt.attempt]
        _remove(self._connecting, attempt.params.prefill, attempt)
        for writer in attempt.writers:
            _remove(self._of_peer, writer, attempt)
        self._report(attempt)

    def _on_life_over(self, attempt: DecodeAttempt) -> None:
        waited = {
            S.CONNECTING: "prefill could not be connected",
            S.OPENED: "the engine of decode offered no memory",
            S.OFFERED: "prefill had not written all pages",
        }
        if attempt.state in waited:
            self._fail(attempt, Cause.TIMED_OUT, f"the deadline passed at decode: {waited[attempt.state]}")

    def _on_abort_transfer(self, event: AbortTransfer) -> None:
        attempt = self._attempts.get(AttemptId(self.incarnation, event.handle))
        if attempt is not None:
            self._fail(attempt, event.cause, event.message or "aborted by the engine of decode")

    def _on_shutdown(self, _: Shutdown) -> None:
        self.draining = True
        for attempt in list(self._attempts.values()):
            self._fail(attempt, Cause.SHUTDOWN, "decode is shutting down", inform=attempt.state is not S.CONNECTING)
            self._end_uninformed(attempt)

    # --- What writers are sent ---

    def _nudge(self, attempt: DecodeAttempt) -> None:
        """Send each unsettled writer what it has not answered; again later, with back-off."""
        for writer in attempt.unsettled_peers:
            self._send_unanswered(writer, attempt)
        self._nudge_later(attempt)

    def _nudge_later(self, attempt: DecodeAttempt) -> None:
        asking = attempt.cause is None and attempt.answered
        self._timers.set(("nudge", attempt), self._now + (self.timeouts.query_s if asking else attempt.retry_s))
        attempt.retry_s = min(2 * attempt.retry_s, self.timeouts.retry_max_s)

    def _send_unanswered(self, writer: str, attempt: DecodeAttempt) -> None:
        if attempt.cause is not None:
            reason = {"cause": attempt.cause, "message": attempt.message}
            self._send(writer, f.Abort, attempt, **_request(attempt, writer), **reason)
            return
        if writer not in attempt.accepted:
            left = min(max(attempt.deadline - self._now, 0.0), attempt.params.deadline_s)
            self._send(writer, f.Open, attempt, **_request(attempt, writer), deadline_s=left)
        elif attempt.offered and writer not in attempt.offer_accepted:
            self._send_offer(writer, attempt)
        else:
            self._send(writer, f.Query, attempt)

    def _send_offer(self, writer: str, attempt: DecodeAttempt) -> None:
        memory = attempt.memory
        assert memory is not None
        writes_aux = attempt.writers[writer].writes_aux and memory.aux_slot is not None
        self._send(
            writer,
            f.Offer,
            attempt,
            pages=memory.pages,
            prefix_pages=memory.prefix_pages,
            aux_slot=memory.aux_slot if writes_aux else f.NO_AUX,
            state=memory.state,
        )

    # --- States and reports ---

    def _move(self, attempt: DecodeAttempt, trigger: Trigger) -> None:
        before = attempt.state
        after = DECODE_TRANSITIONS.get((before, trigger))
        if after is None:
            raise TransitionError(f"decode has no transition for {trigger} in {before}")
        self.queues.move(attempt.params.handle, before, after, self._now, progress=trigger not in FAILURES)
        attempt.state = after

    def _report(self, attempt: DecodeAttempt) -> None:
        """Report the status of an attempt, if it has changed."""
        if (status := attempt.status()) != attempt.reported:
            attempt.reported = status
            self._effects.append(Report(attempt.params.handle, status, (attempt.attempt,)))


def _request(attempt: DecodeAttempt, writer: str) -> dict[str, object]:
    """Fields by which prefill finds the request that an attempt is for."""
    role = attempt.writers[writer]
    return {
        "request_id": attempt.params.request_id,
        "rank_index": role.rank_index,
        "rank_count": role.rank_count,
        "prompt": attempt.params.prompt,
    }


def _remove(index: dict[str, dict[AttemptId, DecodeAttempt]], key: str, attempt: DecodeAttempt) -> None:
    rows = index.get(key)
    if rows is not None:
        rows.pop(attempt.attempt, None)
        if not rows:
            del index[key]
