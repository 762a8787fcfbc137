"""Decode's side of the hand-off, sans I/O, up to the point where pages move: opening attempts, and ending all of them.

Decode opens the attempt, and several ranks of prefill ("writers", though in READ they are read from) may serve it. An
attempt's number comes from our own counter, so whatever number is not in the table has ended.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.announcing import AnnouncingMachine
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Connect,
    Fenced,
    Linked,
    OpenAttempt,
    PeerLost,
    Report,
    Shutdown,
    Unlinked,
    Unreachable,
    Writer,
)
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.states import DECODE_PHASES, FAILURES, DecodeState, TransitionError, Trigger
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus
from pdpool_connector.protocol.timeouts import Timeouts

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

FULL = "decode remembers as many ended attempts as it can; try again in a few seconds"

LIVE = frozenset({S.CONNECTING, S.OPENING, S.ACCEPTED, S.RECEIVING})


@dataclass(slots=True, eq=False)
class DecodeAttempt:
    """One hand-off into our memory."""

    attempt: AttemptId
    params: OpenAttempt
    deadline: float
    state: DecodeState | None = None
    offered: bool = False
    """It has been opened at prefill's; in WRITE somebody may know our pages."""
    writers: dict[str, Writer] = field(default_factory=dict)
    """By incarnation."""
    accepted: set[str] = field(default_factory=set)
    bytes_moved: int = 0
    cause: Cause | None = None
    message: str = ""
    retry_s: float = 0.0

    @property
    def room(self) -> int:
        """The room in which it meets prefill's request."""
        return self.params.room

    @property
    def sibling(self) -> int:
        """Its index among the requests that share the room."""
        return self.params.sibling

    @property
    def prompt(self) -> bytes:
        """What both sides know it by; see `frames.Prompt`."""
        return self.params.prompt

    @property
    def pages(self) -> int:
        """How many pages it was given to be written to."""
        return len(self.params.pages) // f.PAGE_ID_BYTES

    @property
    def state_items(self) -> int:
        """The same of items of the state pool."""
        return len(self.params.state) // f.PAGE_ID_BYTES


AnyAttempt = TypeVar("AnyAttempt", bound=DecodeAttempt)


class OpeningMachine(AnnouncingMachine, ABC, Generic[AnyAttempt]):
    """What both directions share; `_transitions` is the table of the one that it is."""

    _transitions: Mapping[tuple[DecodeState | None, Trigger], DecodeState]

    def __init__(self, incarnation: str, timing: Timeouts | None = None) -> None:
        super().__init__(incarnation, DECODE_LABELS, timing or Timeouts())
        self._attempts: dict[AttemptId, AnyAttempt] = {}
        self._by_prefill: dict[str, dict[AttemptId, AnyAttempt]] = {}
        self._of_peer: dict[str, dict[AttemptId, AnyAttempt]] = {}
        self._on_event |= {
            OpenAttempt: self._on_open_attempt,
            AbortTransfer: self._on_abort_transfer,
            Unlinked: self._on_unlinked,
            Unreachable: self._on_unreachable,
        }
        self._on_frame |= {f.Accepted: self._on_accepted}
        self._on_timer |= {"life": self._on_life_over, "abort": self._on_abort_over, "nudge": self._nudge}

    @property
    def rows(self) -> int:
        """Everything this machine keeps about hand-offs; 0 when nothing is left behind."""
        return len(self._attempts) + len(self._expecting)

    @property
    def tombstones(self) -> int:
        """How many ended attempts are remembered."""
        return 0

    def find(self, attempt: AttemptId) -> AnyAttempt | None:
        """An attempt that has not ended, or whose pages are not proved quiet."""
        return self._attempts.get(attempt)

    def under_way(self, peer: str) -> list[AnyAttempt]:
        """What is under way with a peer, ends not yet proved quiet included."""
        return list(self._of_peer.get(peer, {}).values())

    def waits_for(self, prefill: str) -> bool:
        """True while attempts, or a word to it, wait for the bootstrap address `prefill` to be paired."""
        return prefill in self._by_prefill or prefill in self._expecting

    def holds_for(self, prefill: str) -> bool:
        """True while pages are held back that a process behind `prefill` could prove quiet, were it heard."""
        return any(attempt.params.prefill == prefill for attempt in self.held())

    @property
    def unsettled(self) -> int:
        """How many failed hand-offs still wait for what is in flight, or for prefill's word, to end."""
        return self.census.count("aborting")

    def held(self) -> list[AnyAttempt]:
        """Attempts whose pages stay back until a proof of quiet."""
        if not self.census.count("held"):
            return []
        return [attempt for attempt in self._attempts.values() if attempt.state is S.HELD]

    # --- What each direction does in its own way ---

    @abstractmethod
    def _make(self, params: OpenAttempt) -> AnyAttempt:
        """A new attempt, not in any table yet."""

    @abstractmethod
    def _fail(self, attempt: AnyAttempt, cause: Cause, message: str, *, tell: bool = True) -> None:
        """The one way into failure. The first cause stays; later ones find the attempt not live any more.

        Prefill is told even of an attempt that it has never seen, for its own half may be waiting; not so without
        `tell`.
        """

    @abstractmethod
    def _nudge(self, attempt: AnyAttempt) -> None:
        """Say to each writer whatever it has not answered yet; again later, with back-off."""

    @abstractmethod
    def _prove_quiet(self, attempt: AnyAttempt, event: Fenced) -> None:
        """One of the attempt's writers is fenced."""

    @abstractmethod
    def _lose(self, attempt: AnyAttempt, event: PeerLost) -> None:
        """One of the attempt's writers is lost."""

    # --- Opening ---

    def _on_open_attempt(self, params: OpenAttempt) -> None:
        """One that is refused has a row as well, until prefill is told: its half is not to wait for us."""
        self._expecting.drop(params)
        refusal = params.refused or self._refusal(params)
        if refusal and not self._may_tell(params):
            untold = f"{refusal}; prefill is not told, for {FULL}"
            refused = TransferStatus(phase=Phase.FAILED, cause=params.refused_as, message=untold, releasable=True)
            self._effects.append(Report(params.handle, refused))
            return
        attempt = self._make(params)
        self._attempts[attempt.attempt] = attempt
        self._timers.set(("life", attempt), attempt.deadline)
        self._move(attempt, Trigger.REQUESTED)
        if refusal:
            self._fail(attempt, params.refused_as, refusal)
        else:
            self._report(attempt)
        if (writers := self._links.get(params.prefill)) is not None:
            self._offer(attempt, writers)
        else:
            self._by_prefill.setdefault(params.prefill, {})[attempt.attempt] = attempt
            self._effects.append(Connect(params.prefill))

    def _refusal(self, params: OpenAttempt) -> str | None:
        """Why nothing new is taken; None when it is."""
        del params
        if self.draining:
            return "decode is draining and takes no new requests"
        if len(self._attempts) >= self.timing.max_attempts:
            return f"decode has {self.timing.max_attempts} hand-offs under way, which is its limit"
        return None

    def _may_tell(self, params: OpenAttempt) -> bool:
        """Whether there is room for a refusal until prefill has heard of it."""
        del params
        return len(self._attempts) < 2 * self.timing.max_attempts

    def _on_linked(self, event: Linked) -> None:
        if fenced := [writer for writer in event.writers if self.fenced(writer.incarnation)]:
            gone = f"process {fenced[0].incarnation[:8]} of prefill {event.prefill} was fenced, and is gone"
            self._on_unreachable(Unreachable(event.prefill, Cause.PEER_LOST, gone))
            return
        # A connection that was rebuilt may have swallowed frames: everything with these writers is asked after at once.
        known = {attempt: None for writer in event.writers for attempt in self.under_way(writer.incarnation)}
        for attempt in known:
            attempt.retry_s = self.timing.retry_first_s
            self._nudge(attempt)
        for attempt in self._by_prefill.pop(event.prefill, {}).values():
            self._offer(attempt, event.writers)
        super()._on_linked(event)

    def _offer(self, attempt: AnyAttempt, writers: tuple[Writer, ...]) -> None:
        """Tell the writers of an attempt: of it, or, when it has failed before they could be told, of that."""
        attempt.writers = {writer.incarnation: writer for writer in writers}
        attempt.retry_s = self.timing.retry_first_s
        for writer in attempt.writers:
            self._of_peer.setdefault(writer, {})[attempt.attempt] = attempt
        if attempt.state is S.CONNECTING:
            attempt.offered = True
            self._move(attempt, Trigger.LINKED)
        self._nudge(attempt)

    def _on_unlinked(self, event: Unlinked) -> None:
        self._links.pop(event.prefill, None)

    def _on_unreachable(self, event: Unreachable) -> None:
        for attempt in list(self._by_prefill.get(event.prefill, {}).values()):
            self._fail(attempt, event.cause, event.message, tell=False)
            self._give_up_telling(attempt)

    def _on_accepted(self, frame: f.Accepted) -> None:
        attempt = self._find(frame)
        if attempt is not None and attempt.state in LIVE:
            self._note_accepted(attempt, frame.sender)

    def _note_accepted(self, attempt: AnyAttempt, writer: str) -> None:
        attempt.accepted.add(writer)
        if attempt.state is S.OPENING and attempt.accepted.issuperset(attempt.writers):
            self._move(attempt, Trigger.ACCEPTED)
            self._timers.set(("nudge", attempt), self._now + self.timing.query_s)

    def _begin(self, attempt: AnyAttempt) -> None:
        """The first pages are on their way."""
        if attempt.state is not S.RECEIVING:
            self._move(attempt, Trigger.SUBMITTED)
            if attempt.accepted.issuperset(attempt.writers):
                self._timers.set(("nudge", attempt), self._now + self.timing.query_s)
            self._report(attempt)

    def _find(self, frame: f.AttemptFrame) -> AnyAttempt | None:
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

    # --- OutcomeLog ---

    def _bound_end(self, attempt: AnyAttempt) -> None:
        """Set how long a failed attempt waits: for quiet, or, where it holds nothing back, to be told to prefill."""
        self._timers.cancel(("life", attempt))
        until = self._now + self.timing.drain_s
        self._timers.set(("abort", attempt), until if attempt.offered else max(until, attempt.deadline))

    def _give_up_telling(self, attempt: AnyAttempt) -> None:
        """A failed attempt that was never offered holds nothing back; it stays only to be told."""
        if attempt.state is S.ABORTING and not attempt.offered:
            self._move(attempt, Trigger.QUIET)
            self._finalize(attempt)

    def _finalize(self, attempt: AnyAttempt) -> None:
        """Take an ended attempt out of every table and tell the engine. Once for each attempt."""
        for timer in ("life", "abort", "nudge"):
            self._timers.cancel((timer, attempt))
        del self._attempts[attempt.attempt]
        _remove(self._by_prefill, attempt.params.prefill, attempt)
        for writer in attempt.writers:
            _remove(self._of_peer, writer, attempt)
        self._report(attempt)

    def _on_life_over(self, attempt: AnyAttempt) -> None:
        self._fail(attempt, Cause.TIMED_OUT, f"deadline passed at decode while it was {attempt.state}")

    def _on_abort_over(self, attempt: AnyAttempt) -> None:
        if not attempt.offered:
            self._give_up_telling(attempt)
        elif attempt.state is S.ABORTING:
            self._move(attempt, Trigger.UNPROVEN)

    def _on_abort_transfer(self, event: AbortTransfer) -> None:
        attempt = self._attempts.get(AttemptId(self.incarnation, event.handle))
        if attempt is not None:
            self._fail(attempt, event.cause, event.message or "aborted by the engine of decode")

    def _on_shutdown(self, event: Shutdown) -> None:
        super()._on_shutdown(event)
        for attempt in list(self._attempts.values()):
            self._fail(attempt, Cause.SHUTDOWN, "decode is shutting down", tell=attempt.offered)
            self._give_up_telling(attempt)

    def _on_lost(self, event: PeerLost) -> None:
        super()._on_lost(event)
        self._unlink(event.peer)
        for attempt in self.under_way(event.peer):
            self._lose(attempt, event)

    def _on_fenced(self, event: Fenced) -> None:
        """Nothing can be offered to it from here on, so that no attempt is left for which the fence came too early."""
        super()._on_fenced(event)
        self._unlink(event.peer)
        for attempt in self.under_way(event.peer):
            self._prove_quiet(attempt, event)

    def _unlink(self, peer: str) -> None:
        for prefill in [name for name, writers in self._links.items() if _includes(writers, peer)]:
            del self._links[prefill]

    # --- What writers are told ---

    def _send_open(self, writer: str, attempt: AnyAttempt) -> None:
        params, role = attempt.params, attempt.writers[writer]
        self._send(
            writer,
            f.Open,
            attempt,
            request_id=params.request_id,
            pages=params.pages,
            prefix_pages=params.prefix_pages,
            aux_slot=params.aux_slot if role.writes_aux else f.NO_AUX,
            deadline_s=self._left(attempt.deadline, params.deadline_s),
            part=role.part,
            parts=role.parts,
            state=params.state,
            prompt=params.prompt,
        )

    # --- Small change ---

    def _move(self, attempt: AnyAttempt, cue: Trigger) -> None:
        before = attempt.state
        after = self._transitions.get((before, cue))
        if after is None:
            raise TransitionError(f"decode has no transition for {cue} in {before}")
        self.census.move(attempt.params.handle, before, after, self._now, progress=cue not in FAILURES)
        attempt.state = after

    def _report(self, attempt: AnyAttempt) -> None:
        assert attempt.state is not None
        status = TransferStatus(
            phase=DECODE_PHASES[attempt.state],
            cause=attempt.cause,
            message=attempt.message,
            prefix_pages=attempt.params.prefix_pages,
            bytes_moved=attempt.bytes_moved,
            releasable=attempt.state in (S.DONE, S.FAILED) or (attempt.state is S.ABORTING and not attempt.offered),
        )
        self._effects.append(Report(attempt.params.handle, status, (attempt.attempt,)))


def _includes(writers: tuple[Writer, ...], peer: str) -> bool:
    return any(writer.incarnation == peer for writer in writers)


def _remove(index: dict[str, dict[AttemptId, AnyAttempt]], key: str, attempt: AnyAttempt) -> None:
    rows = index.get(key)
    if rows is not None:
        rows.pop(attempt.attempt, None)
        if not rows:
            del index[key]
