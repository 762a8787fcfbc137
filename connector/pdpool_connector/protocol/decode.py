"""Decode's side in WRITE: others write into our pages.

The attempt is done when all writers are done, and its pages may be given back only when each has said done or drained,
or is fenced. There are no tombstones here: the writers say how an attempt ended, and whatever is not in the table has
ended and is acknowledged as such.
"""

from dataclasses import dataclass, field

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import Fenced, OpenAttempt, PeerLost
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.opening import LIVE, DecodeAttempt, OpeningMachine
from pdpool_connector.protocol.states import DECODE_TRANSITIONS, DecodeState, Trigger
from pdpool_connector.protocol.status import Cause, cause_from_peer
from pdpool_connector.protocol.timeouts import Timeouts

S = DecodeState


@dataclass(slots=True, eq=False)
class Attempt(DecodeAttempt):
    """One hand-off, and which of its writers have said done or drained."""

    done: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)

    @property
    def loud(self) -> tuple[str, ...]:
        """Writers that may still write, as far as is proved."""
        return tuple(writer for writer in self.writers if writer not in self.done and writer not in self.drained)


class DecodeMachine(OpeningMachine[Attempt]):
    """Hand-offs of one decode process whose memory prefill writes into; see `Machine` for how it is driven."""

    _transitions = DECODE_TRANSITIONS

    def __init__(self, incarnation: str, timing: Timeouts | None = None) -> None:
        super().__init__(incarnation, timing)
        self._on_frame |= {
            f.Sending: self._on_sending,
            f.Done: self._on_done,
            f.Failed: self._on_failed,
            f.Drained: self._on_drained,
        }

    def _make(self, params: OpenAttempt) -> Attempt:
        return Attempt(AttemptId(self.incarnation, params.handle), params, self._now + params.deadline_s)

    # --- What writers say ---

    def _on_sending(self, frame: f.Sending) -> None:
        attempt = self._find(frame)
        if attempt is not None and attempt.state in LIVE:
            attempt.accepted.add(frame.sender)
            self._begin(attempt)

    def _on_done(self, frame: f.Done) -> None:
        attempt = self._find(frame)
        self._acknowledge(frame)
        if attempt is not None and frame.sender in attempt.loud:
            attempt.done.add(frame.sender)
            attempt.accepted.add(frame.sender)
            attempt.bytes_moved += frame.bytes_moved
            self._judge(attempt)

    def _on_failed(self, frame: f.Failed) -> None:
        attempt = self._find(frame)
        if attempt is not None and frame.sender in attempt.loud:
            self._fail(attempt, cause_from_peer(frame.cause, Cause.TRANSFER_FAILED), frame.message)

    def _on_drained(self, frame: f.Drained) -> None:
        attempt = self._find(frame)
        self._acknowledge(frame)
        if attempt is not None and frame.sender in attempt.loud:
            attempt.drained.add(frame.sender)
            self._fail(attempt, cause_from_peer(frame.cause, Cause.TRANSFER_FAILED), frame.message)
            self._judge(attempt)

    def _judge(self, attempt: Attempt) -> None:
        """A writer has come to its end: see whether that ends the attempt."""
        if attempt.state in LIVE and attempt.done.issuperset(attempt.writers):
            self._move(attempt, Trigger.COMPLETED)
            self._finalize(attempt)
        elif attempt.state in (S.ABORTING, S.HELD) and not attempt.loud:
            self._move(attempt, Trigger.QUIET)
            self._finalize(attempt)

    # --- OutcomeLog ---

    def _fail(self, attempt: Attempt, cause: Cause, message: str, *, tell: bool = True) -> None:
        if attempt.state not in LIVE:
            return
        attempt.cause, attempt.message = cause, f.text(message)
        if not attempt.loud and (attempt.offered or not tell):
            self._move(attempt, Trigger.ENDED)
            self._finalize(attempt)
            return
        self._move(attempt, Trigger.BROKEN)
        self._bound_end(attempt)
        self._report(attempt)
        attempt.retry_s = self.timing.retry_first_s
        self._nudge(attempt)
        self._hold_if_unheard(attempt)

    def _hold_if_unheard(self, attempt: Attempt) -> None:
        """When no writer that may still write is connected, there is nothing to wait for within any deadline."""
        if attempt.state is not S.ABORTING or any(writer in self._versions for writer in attempt.loud):
            return
        if attempt.offered:
            self._move(attempt, Trigger.UNPROVEN)
            self._timers.cancel(("abort", attempt))
        elif attempt.writers:
            self._give_up_telling(attempt)

    # --- Peers ---

    def _lose(self, attempt: Attempt, event: PeerLost) -> None:
        if event.peer in attempt.loud:
            self._fail(attempt, Cause.PEER_LOST, event.message)
            self._hold_if_unheard(attempt)

    def _prove_quiet(self, attempt: Attempt, event: Fenced) -> None:
        if event.peer in attempt.loud:
            attempt.drained.add(event.peer)
            self._fail(attempt, Cause.PEER_LOST, f"prefill was fenced: {event.proof}")
            self._judge(attempt)

    # --- What writers are told ---

    def _nudge(self, attempt: Attempt) -> None:
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
            request_id=attempt.params.request_id,
            cause=attempt.cause,
            message=attempt.message,
            part=role.part,
            parts=role.parts,
            prompt=attempt.params.prompt,
        )
