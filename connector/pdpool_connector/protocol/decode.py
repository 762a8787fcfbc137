"""Decode's side of the hand-off, sans I/O.

Decode opens the attempt and owns the pages that others write into. Several writers (ranks of prefill) may serve one
attempt; it is done when all of them are done, and its pages may be given back only when each has said done or drained,
or is fenced. There are no tombstones here: an attempt's number comes from our own counter, so whatever is not in the
table has ended, and is acknowledged as such.
"""

from dataclasses import dataclass, field

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Connect,
    Fenced,
    Linked,
    OpenAttempt,
    PeerLost,
    Report,
    Shutdown,
    Unreachable,
    Writer,
)
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.machine import Machine
from pdpool_connector.protocol.outcome import Cause, Phase, TransferStatus, told_by_peer
from pdpool_connector.protocol.states import (
    DECODE_PHASES,
    DECODE_TRANSITIONS,
    FAILURES,
    Cue,
    DecodeState,
    TransitionError,
)
from pdpool_connector.protocol.timing import Timing

S = DecodeState
DECODE_LABELS = {
    S.CONNECTING: ("connecting", "decode_transfer"),
    S.OPENING: ("opening", "decode_transfer"),
    S.ACCEPTED: ("accepted", "decode_transfer"),
    S.RECEIVING: ("receiving", "decode_transfer"),
    S.ABORTING: ("aborting",),
    S.HELD: ("held",),
}
"""Which states the public queue spans."""

LIVE = frozenset({S.CONNECTING, S.OPENING, S.ACCEPTED, S.RECEIVING})


@dataclass(slots=True, eq=False)
class Attempt:
    """One hand-off into our memory, and what each of its writers has said."""

    attempt: AttemptId
    wish: OpenAttempt
    deadline: float
    state: DecodeState | None = None
    offered: bool = False
    """Somebody may know our pages."""
    writers: dict[str, Writer] = field(default_factory=dict)
    """By incarnation."""
    accepted: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)
    bytes_moved: int = 0
    cause: Cause | None = None
    message: str = ""
    retry_s: float = 0.0

    @property
    def room(self) -> int:
        """The room in which it meets prefill's request."""
        return self.wish.room

    @property
    def sibling(self) -> int:
        """Its index among the requests that share the room."""
        return self.wish.sibling

    @property
    def pages(self) -> int:
        """How many pages it was given to be written to."""
        return len(self.wish.pages) // f.PAGE_ID_BYTES

    @property
    def loud(self) -> tuple[str, ...]:
        """Writers that may still write, as far as is proved."""
        return tuple(writer for writer in self.writers if writer not in self.done and writer not in self.drained)


class DecodeMachine(Machine[DecodeState]):
    """Hand-offs of one decode process; see `Machine` for how it is driven."""

    def __init__(self, incarnation: str, timing: Timing | None = None) -> None:
        super().__init__(incarnation, DECODE_LABELS, timing or Timing())
        self._attempts: dict[AttemptId, Attempt] = {}
        self._by_prefill: dict[str, dict[AttemptId, Attempt]] = {}
        self._of_peer: dict[str, dict[AttemptId, Attempt]] = {}
        self._links: dict[str, tuple[Writer, ...]] = {}
        self._on_event |= {
            OpenAttempt: self._on_open_attempt,
            AbortTransfer: self._on_abort_transfer,
            Linked: self._on_linked,
            Unreachable: self._on_unreachable,
            Fenced: self._on_fenced,
            Shutdown: self._on_shutdown,
        }
        self._on_frame |= {
            f.Accepted: self._on_accepted,
            f.Sending: self._on_sending,
            f.Done: self._on_done,
            f.Failed: self._on_failed,
            f.Drained: self._on_drained,
        }
        self._on_timer |= {"life": self._on_life_over, "abort": self._on_abort_over, "nudge": self._nudge}

    @property
    def rows(self) -> int:
        """Everything this machine keeps about hand-offs; 0 when nothing is left behind."""
        return len(self._attempts)

    @property
    def tombstones(self) -> int:
        """None are needed here; see the module's docstring."""
        return 0

    def find(self, attempt: AttemptId) -> Attempt | None:
        """An attempt that has not ended, or whose pages are not proved quiet."""
        return self._attempts.get(attempt)

    def attempts_of(self, peer: str) -> list[Attempt]:
        """What is under way with a peer, ends not yet proved quiet included."""
        return list(self._of_peer.get(peer, {}).values())

    def waits_for(self, prefill: str) -> bool:
        """True while attempts wait for the bootstrap address `prefill` to be paired."""
        return prefill in self._by_prefill

    def holds_for(self, prefill: str) -> bool:
        """True while pages are held back that a process behind `prefill` could prove quiet, were it heard."""
        return any(attempt.wish.prefill == prefill for attempt in self.held())

    def held(self) -> list[Attempt]:
        """Attempts whose pages stay back until a proof of quiet."""
        if not self.census.count("held"):
            return []
        return [attempt for attempt in self._attempts.values() if attempt.state is S.HELD]

    # --- Opening ---

    def _on_open_attempt(self, wish: OpenAttempt) -> None:
        refusal = None
        if self.draining:
            refusal = "decode is draining and takes no new requests"
        elif len(self._attempts) >= self.timing.max_attempts:
            refusal = f"decode has {self.timing.max_attempts} hand-offs under way, which is its limit"
        if refusal is not None:
            refused = TransferStatus(phase=Phase.FAILED, cause=Cause.REFUSED, message=refusal, releasable=True)
            self._effects.append(Report(wish.handle, refused))
            return
        attempt = Attempt(AttemptId(self.incarnation, wish.handle), wish, self._now + wish.deadline_s)
        self._attempts[attempt.attempt] = attempt
        self._timers.set(("life", attempt), attempt.deadline)
        self._move(attempt, Cue.REQUESTED)
        self._report(attempt)
        if (writers := self._links.get(wish.prefill)) is not None:
            self._offer(attempt, writers)
        else:
            self._by_prefill.setdefault(wish.prefill, {})[attempt.attempt] = attempt
            self._effects.append(Connect(wish.prefill))

    def _on_linked(self, event: Linked) -> None:
        self._links[event.prefill] = event.writers
        # A connection that was rebuilt may have swallowed frames: everything with these writers is asked after at once.
        known = {attempt: None for writer in event.writers for attempt in self.attempts_of(writer.incarnation)}
        for attempt in known:
            attempt.retry_s = self.timing.retry_first_s
            self._nudge(attempt)
        for attempt in self._by_prefill.pop(event.prefill, {}).values():
            self._offer(attempt, event.writers)

    def _offer(self, attempt: Attempt, writers: tuple[Writer, ...]) -> None:
        """Tell the writers of an attempt: of its pages, or, when it has failed before they could be told, of that."""
        attempt.writers = {writer.incarnation: writer for writer in writers}
        attempt.retry_s = self.timing.retry_first_s
        for writer in attempt.writers:
            self._of_peer.setdefault(writer, {})[attempt.attempt] = attempt
        if attempt.state is S.CONNECTING:
            attempt.offered = True
            self._move(attempt, Cue.LINKED)
        self._nudge(attempt)

    def _on_unreachable(self, event: Unreachable) -> None:
        for attempt in list(self._by_prefill.get(event.prefill, {}).values()):
            self._fail(attempt, event.cause, event.message, tell=False)
            self._give_up_telling(attempt)

    # --- What writers say ---

    def _on_accepted(self, frame: f.Accepted) -> None:
        attempt = self._find(frame)
        if attempt is None or attempt.state not in LIVE:
            return
        attempt.accepted.add(frame.sender)
        if attempt.state is S.OPENING and attempt.accepted.issuperset(attempt.writers):
            self._move(attempt, Cue.ACCEPTED)
            self._timers.set(("nudge", attempt), self._now + self.timing.query_s)

    def _on_sending(self, frame: f.Sending) -> None:
        attempt = self._find(frame)
        if attempt is None or attempt.state not in LIVE:
            return
        attempt.accepted.add(frame.sender)
        if attempt.state is not S.RECEIVING:
            self._move(attempt, Cue.SUBMITTED)
            self._timers.set(("nudge", attempt), self._now + self.timing.query_s)
            self._report(attempt)

    def _on_done(self, frame: f.Done) -> None:
        attempt = self._find(frame)
        if attempt is None:
            self._acknowledge(frame)
            return
        self._acknowledge(frame)
        if frame.sender not in attempt.done | attempt.drained:
            attempt.done.add(frame.sender)
            attempt.accepted.add(frame.sender)
            attempt.bytes_moved += frame.bytes_moved
            self._judge(attempt)

    def _on_failed(self, frame: f.Failed) -> None:
        attempt = self._find(frame)
        if attempt is not None and frame.sender in attempt.loud:
            self._fail(attempt, told_by_peer(frame.cause, Cause.TRANSFER_FAILED), frame.message)

    def _on_drained(self, frame: f.Drained) -> None:
        attempt = self._find(frame)
        self._acknowledge(frame)
        if attempt is not None and frame.sender not in attempt.done | attempt.drained:
            attempt.drained.add(frame.sender)
            self._fail(attempt, told_by_peer(frame.cause, Cause.TRANSFER_FAILED), frame.message)
            self._judge(attempt)

    def _judge(self, attempt: Attempt) -> None:
        """A writer has come to its end: see whether that ends the attempt."""
        if attempt.state in LIVE and attempt.done.issuperset(attempt.writers):
            self._move(attempt, Cue.COMPLETED)
            self._finalize(attempt)
        elif attempt.state in (S.ABORTING, S.HELD) and not attempt.loud:
            self._move(attempt, Cue.QUIET)
            self._finalize(attempt)

    def _find(self, frame: f.AttemptFrame) -> Attempt | None:
        """The attempt that a frame is about; None, and counted, when it is not for it to speak of."""
        attempt = self._attempts.get(frame.attempt)
        if attempt is None:
            self._ignore("stale", f"{type(frame).__name__} for attempt {frame.attempt}, which has ended")
        elif frame.sender not in attempt.writers:
            self._ignore("stranger", f"{type(frame).__name__} for attempt {frame.attempt} from {frame.sender[:8]}")
        elif (frame.room, frame.sibling) != (attempt.room, attempt.sibling):
            self._ignore("mismatch", f"attempt {frame.attempt} is for room {attempt.room}, not {frame.room}")
        else:
            return attempt
        return None

    def _acknowledge(self, frame: f.AttemptFrame) -> None:
        """Stop the repetition of an end. What we did not open ourselves is none of our business."""
        if frame.attempt.decode == self.incarnation:
            self._send(frame.sender, f.Ack, frame)

    # --- Ends ---

    def _fail(self, attempt: Attempt, cause: Cause, message: str, *, tell: bool = True) -> None:
        """The one way into failure. The first cause stays; later ones find the attempt not live any more.

        Prefill is told even of an attempt that it has never seen, for its own half may be waiting.
        """
        if attempt.state not in LIVE:
            return
        attempt.cause, attempt.message = cause, message[: f.MAX_TEXT]
        if not attempt.loud and (attempt.offered or not tell):
            self._move(attempt, Cue.ENDED)
            self._finalize(attempt)
            return
        self._move(attempt, Cue.BROKEN)
        self._timers.cancel(("life", attempt))
        self._timers.set(("abort", attempt), self._now + self.timing.drain_s)
        self._report(attempt)
        attempt.retry_s = self.timing.retry_first_s
        self._nudge(attempt)
        self._hold_if_unheard(attempt)

    def _hold_if_unheard(self, attempt: Attempt) -> None:
        """When no writer that may still write is connected, there is nothing to wait for within any deadline."""
        if attempt.state is not S.ABORTING or any(writer in self._versions for writer in attempt.loud):
            return
        if attempt.offered:
            self._move(attempt, Cue.UNPROVEN)
            self._timers.cancel(("abort", attempt))
        elif attempt.writers:
            self._give_up_telling(attempt)

    def _give_up_telling(self, attempt: Attempt) -> None:
        """A failed attempt that was never offered holds nothing back; it stays only to be told."""
        if attempt.state is S.ABORTING and not attempt.offered:
            self._move(attempt, Cue.QUIET)
            self._finalize(attempt)

    def _finalize(self, attempt: Attempt) -> None:
        """Take an ended attempt out of every table and tell the engine. Once for each attempt."""
        for timer in ("life", "abort", "nudge"):
            self._timers.cancel((timer, attempt))
        del self._attempts[attempt.attempt]
        _remove(self._by_prefill, attempt.wish.prefill, attempt)
        for writer in attempt.writers:
            _remove(self._of_peer, writer, attempt)
        self._report(attempt)

    def _on_life_over(self, attempt: Attempt) -> None:
        self._fail(attempt, Cause.TIMED_OUT, f"deadline passed at decode while it was {attempt.state}")

    def _on_abort_over(self, attempt: Attempt) -> None:
        if attempt.offered:
            self._move(attempt, Cue.UNPROVEN)
        else:
            self._give_up_telling(attempt)

    def _on_abort_transfer(self, event: AbortTransfer) -> None:
        attempt = self._attempts.get(AttemptId(self.incarnation, event.handle))
        if attempt is not None:
            self._fail(attempt, event.cause, event.message or "aborted by the engine of decode")

    def _on_shutdown(self, _: Shutdown) -> None:
        self.draining = True
        for attempt in list(self._attempts.values()):
            self._fail(attempt, Cause.SHUTDOWN, "decode is shutting down", tell=attempt.offered)
            self._give_up_telling(attempt)

    # --- Peers ---

    def _on_lost(self, event: PeerLost) -> None:
        super()._on_lost(event)
        for prefill in [name for name, writers in self._links.items() if _includes(writers, event.peer)]:
            del self._links[prefill]
        for attempt in self.attempts_of(event.peer):
            if event.peer in attempt.loud:
                self._fail(attempt, Cause.PEER_LOST, event.message)
                self._hold_if_unheard(attempt)

    def _on_fenced(self, event: Fenced) -> None:
        for attempt in self.attempts_of(event.peer):
            if event.peer in attempt.loud:
                attempt.drained.add(event.peer)
                self._fail(attempt, Cause.PEER_LOST, f"prefill was fenced: {event.proof}")
                self._judge(attempt)

    # --- What writers are told ---

    def _nudge(self, attempt: Attempt) -> None:
        """Say to each writer whatever it has not answered yet; again later, with back-off."""
        for writer in attempt.loud:
            if attempt.cause is not None:
                self._send_abort(writer, attempt)
            elif writer in attempt.accepted:
                self._send(writer, f.Query, attempt)
            else:
                self._send_open(writer, attempt)
        asking = attempt.cause is None and attempt.accepted.issuperset(attempt.writers)
        self._timers.set(("nudge", attempt), self._now + (self.timing.query_s if asking else attempt.retry_s))
        attempt.retry_s = min(2 * attempt.retry_s, self.timing.retry_max_s)

    def _send_abort(self, writer: str, attempt: Attempt) -> None:
        role = attempt.writers[writer]
        self._send(
            writer,
            f.Abort,
            attempt,
            request_id=attempt.wish.request_id,
            cause=attempt.cause,
            message=attempt.message,
            part=role.part,
            parts=role.parts,
        )

    def _send_open(self, writer: str, attempt: Attempt) -> None:
        wish, role = attempt.wish, attempt.writers[writer]
        self._send(
            writer,
            f.Open,
            attempt,
            request_id=wish.request_id,
            pages=wish.pages,
            prefix_pages=wish.prefix_pages,
            aux_slot=wish.aux_slot if role.writes_aux else f.NO_AUX,
            deadline_s=max(attempt.deadline - self._now, 0.0),
            part=role.part,
            parts=role.parts,
            state=wish.state,
        )

    # --- Small change ---

    def _move(self, attempt: Attempt, cue: Cue) -> None:
        before = attempt.state
        after = DECODE_TRANSITIONS.get((before, cue))
        if after is None:
            raise TransitionError(f"decode has no transition for {cue} in {before}")
        self.census.move(attempt.wish.handle, before, after, self._now, progress=cue not in FAILURES)
        attempt.state = after

    def _report(self, attempt: Attempt) -> None:
        assert attempt.state is not None
        status = TransferStatus(
            phase=DECODE_PHASES[attempt.state],
            cause=attempt.cause,
            message=attempt.message,
            prefix_pages=attempt.wish.prefix_pages,
            bytes_moved=attempt.bytes_moved,
            releasable=attempt.state in (S.DONE, S.FAILED) or (attempt.state is S.ABORTING and not attempt.offered),
        )
        self._effects.append(Report(attempt.wish.handle, status, (attempt.attempt,)))


def _includes(writers: tuple[Writer, ...], peer: str) -> bool:
    return any(writer.incarnation == peer for writer in writers)


def _remove(index: dict[str, dict[AttemptId, Attempt]], key: str, attempt: Attempt) -> None:
    rows = index.get(key)
    if rows is not None:
        rows.pop(attempt.attempt, None)
        if not rows:
            del index[key]
