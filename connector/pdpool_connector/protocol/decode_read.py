"""Decode's side in READ: we read what prefill's ranks have computed, and say how the attempt ended.

Our pages are touched by our own reads only, and prefill's pages by nobody else: a rank that an attempt reads from
("source") is told `Done` or `Drained` when none of our reads from it is under way, and not before. All sources of an
attempt hear the same end. They are told until they acknowledge it, by tombstones as prefill keeps them in WRITE.
"""

from dataclasses import dataclass, field
from itertools import count

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    Fenced,
    Linked,
    OpenAttempt,
    PeerLost,
    Read,
    ReadEnded,
    StopReading,
    Writer,
    WriteResult,
)
from pdpool_connector.protocol.frames import PAGE_ID_BYTES, AttemptId
from pdpool_connector.protocol.opening import FULL, LIVE, DecodeAttempt, OpeningMachine
from pdpool_connector.protocol.states import DECODE_READ_TRANSITIONS, DecodeState, Trigger
from pdpool_connector.protocol.status import Cause, cause_from_peer
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.tombstones import Key, ResultNotifier, Tombstone, forgotten

S = DecodeState
_READ_CAUSES = {WriteResult.INVALID: Cause.INVALID, WriteResult.CORRUPT: Cause.CORRUPT}


@dataclass(slots=True, eq=False)
class Source:
    """A rank that an attempt reads from: how much it has announced, and what we have under way there.

    `taken`: frames `Computed` that were noted. `page`: the logical page at which the next one has to start. `closed`:
    the last one is noted. `told`: it has heard from us, or from itself, how the attempt ended.
    """

    page: int
    taken: int = 0
    closed: bool = False
    in_flight: set[int] = field(default_factory=set)
    unsettled: bool = False
    bytes_moved: int = 0
    told: bool = False

    @property
    def quiet(self) -> bool:
        """True when no read of ours can be under way there."""
        return not self.in_flight and not self.unsettled

    @property
    def complete(self) -> bool:
        """True when everything has been read."""
        return self.closed and self.quiet


@dataclass(slots=True, eq=False)
class ReadAttempt(DecodeAttempt):
    """One hand-off, and how far it has come with each source."""

    sources: dict[str, Source] = field(default_factory=dict)
    """By incarnation, from the first `Computed` on."""

    def source(self, peer: str) -> Source:
        """The source `peer`, which must be one of the attempt's writers."""
        return self.sources.setdefault(peer, Source(self.params.prefix_pages))

    @property
    def quiet(self) -> bool:
        """True when no read of ours can be under way, and so nothing touches our pages."""
        return not self.loud

    @property
    def loud(self) -> tuple[str, ...]:
        """Sources from which reads of ours may still land, as far as is proved."""
        return tuple(peer for peer, source in self.sources.items() if not source.quiet)


class DecodeReadMachine(OpeningMachine[ReadAttempt]):
    """Hand-offs of one decode process that reads from prefill; see `Machine` for how it is driven."""

    _transitions = DECODE_READ_TRANSITIONS

    def __init__(self, incarnation: str, timing: Timeouts | None = None) -> None:
        super().__init__(incarnation, timing)
        self._reads = count()
        self._verdicts = ResultNotifier(self.timing, self._timers, self._send)
        self._graves = self._verdicts.graves
        self._behind: dict[str, str] = {}
        self._on_event |= {ReadEnded: self._on_read_ended}
        self._on_frame |= {
            f.Computed: self._on_computed,
            f.Abort: self._on_abort,
            f.Drained: self._on_drained,
            f.Query: self._on_query,
            f.Ack: self._on_ack,
        }
        self._on_timer |= {
            "verdict": lambda key: self._verdicts.tell(key, self._now),
            "grave": self._forget,
        }

    @property
    def rows(self) -> int:
        """Everything this machine keeps about hand-offs, remembered ends included; 0 when nothing is left behind."""
        return super().rows + len(self._graves)

    @property
    def tombstones(self) -> int:
        """How many ended attempts are remembered, once for each source that is told."""
        return len(self._graves)

    @property
    def unsettled(self) -> int:
        """How many hand-offs still wait for their reads, or for the word of a prefill that is paired, to end."""
        return super().unsettled + self._verdicts.unheard(self._versions)

    def holds_for(self, prefill: str) -> bool:
        """True while a process behind `prefill` may hold pages back until it hears from us how attempts ended."""
        return any(self._graves.of(peer) for peer, address in self._behind.items() if address == prefill)

    def _make(self, params: OpenAttempt) -> ReadAttempt:
        return ReadAttempt(AttemptId(self.incarnation, params.handle), params, self._now + params.deadline_s)

    def _refusal(self, params: OpenAttempt) -> str | None:
        if not self._may_tell(params):
            return FULL
        return super()._refusal(params)

    def _may_tell(self, params: OpenAttempt) -> bool:
        """Each attempt will need a tombstone for each of its sources."""
        told = self._links.get(params.prefill, (Writer(""),))
        reserved = sum(len(rows) for rows in (*self._of_peer.values(), *self._by_prefill.values())) + len(told) - 1
        for peer in (writer.incarnation for writer in told):
            if self._graves.full(peer, reserved=reserved, reserved_of_peer=len(self._of_peer.get(peer, ()))):
                return False
        return super()._may_tell(params)

    # --- Reading ---

    def _on_computed(self, frame: f.Computed) -> None:
        attempt = self._find_or_answer(frame)
        if attempt is None:
            return
        self._note_accepted(attempt, frame.sender)
        source = attempt.source(frame.sender)
        if frame.sequence < source.taken:
            self._send(frame.sender, f.Fetching, attempt, taken=source.taken)
        elif frame.sequence > source.taken:
            self._ignore("gap", f"Computed {frame.sequence} for attempt {frame.attempt}, {source.taken} is next")
        elif (misfit := _misfit(frame, source, attempt)) is not None:
            self._fail(attempt, Cause.INVALID, misfit)
        else:
            self._take(attempt, source, frame)

    def _take(self, attempt: ReadAttempt, source: Source, frame: f.Computed) -> None:
        params = attempt.params
        at = (frame.start - params.prefix_pages) * PAGE_ID_BYTES
        source.taken += 1
        source.page += len(frame.pages) // PAGE_ID_BYTES
        source.closed = frame.last
        aux = (frame.aux_slot, params.aux_slot) if frame.aux_slot != f.NO_AUX else None
        state = (frame.state, params.state) if frame.last else (b"", b"")
        if frame.pages or aux is not None or state[0]:
            self._begin(attempt)
            read = next(self._reads)
            source.in_flight.add(read)
            target = params.pages[at : at + len(frame.pages)]
            self._effects.append(
                Read(attempt.attempt, read, frame.sender, frame.pages, target, aux, state, frame.checksum)
            )
        self._complete_if_read(attempt)

    def _on_read_ended(self, event: ReadEnded) -> None:
        attempt = self._attempts.get(event.attempt)
        sources = attempt.sources.items() if attempt is not None else ()
        peer, source = next(((peer, one) for peer, one in sources if event.read in one.in_flight), ("", None))
        if attempt is None or source is None:
            return
        source.in_flight.remove(event.read)
        source.bytes_moved += event.bytes_moved
        attempt.bytes_moved += event.bytes_moved
        if event.result is WriteResult.UNSETTLED and not self.fenced(peer):
            source.unsettled = True
        if attempt.state in LIVE and event.result is not WriteResult.LANDED:
            cause = _READ_CAUSES.get(event.result, Cause.TRANSFER_FAILED)
            self._fail(attempt, cause, event.message or f"a read was {event.result}")
        elif attempt.state in LIVE:
            self._complete_if_read(attempt)
        else:
            self._settle(attempt)

    def _complete_if_read(self, attempt: ReadAttempt) -> None:
        done = [peer for peer, source in attempt.sources.items() if source.complete]
        if attempt.state in LIVE and len(done) == len(attempt.writers):
            for peer in done:
                self._tell_end(attempt, peer)
            self._move(attempt, Trigger.COMPLETED)
            self._finalize(attempt)

    # --- OutcomeLog ---

    def _fail(self, attempt: ReadAttempt, cause: Cause, message: str, *, tell: bool = True) -> None:
        if attempt.state not in LIVE:
            return
        attempt.cause, attempt.message = cause, f.text(message)
        if attempt.quiet and (attempt.offered or not tell):
            self._tell_quiet(attempt)
            self._move(attempt, Trigger.ENDED)
            self._finalize(attempt)
            return
        self._move(attempt, Trigger.BROKEN)
        self._bound_end(attempt)
        self._report(attempt)
        for peer, source in attempt.sources.items():
            if not source.quiet:
                self._effects.append(StopReading(attempt.attempt, peer))
        attempt.retry_s = self.timing.retry_first_s
        self._nudge(attempt)
        if attempt.offered:
            self._settle(attempt)

    def _settle(self, attempt: ReadAttempt) -> None:
        """A failed attempt: each source hears the end as soon as nothing is read from it; the last one ends it.

        What can never be proved here becomes a hold at once.
        """
        self._tell_quiet(attempt)
        if attempt.quiet:
            self._move(attempt, Trigger.QUIET)
            self._finalize(attempt)
        elif attempt.state is S.ABORTING and not any(source.in_flight for source in attempt.sources.values()):
            self._move(attempt, Trigger.UNPROVEN)

    def _tell_quiet(self, attempt: ReadAttempt) -> None:
        for peer in attempt.writers:
            if attempt.source(peer).quiet:
                self._tell_end(attempt, peer)

    def _tell_end(self, attempt: ReadAttempt, peer: str) -> None:
        """Say how it ended, until it is acknowledged; once for each source."""
        source, role = attempt.source(peer), attempt.writers[peer]
        if source.told:
            return
        source.told = True
        tombstone = Tombstone(
            attempt.attempt,
            attempt.room,
            attempt.sibling,
            attempt.cause,
            attempt.message,
            bytes_moved=source.bytes_moved,
            to=peer,
            request_id=attempt.params.request_id,
            part=role.part,
            parts=role.parts,
            prompt=attempt.params.prompt,
        )
        self._verdicts.reach(tombstone, self._now)

    def _forget(self, key: Key) -> None:
        self._verdicts.forget(key)
        self._forget_address(key[0])

    def _forget_address(self, peer: str) -> None:
        if peer not in self._versions and peer not in self._of_peer and not self._graves.of(peer):
            self._behind.pop(peer, None)

    def _finalize(self, attempt: ReadAttempt) -> None:
        super()._finalize(attempt)
        for peer in attempt.writers:
            self._forget_address(peer)

    # --- Peers ---

    def _on_linked(self, event: Linked) -> None:
        self._behind |= {one.incarnation: event.prefill for one in event.writers if not self.fenced(one.incarnation)}
        super()._on_linked(event)

    def _on_lost(self, event: PeerLost) -> None:
        super()._on_lost(event)
        self._forget_address(event.peer)

    def _lose(self, attempt: ReadAttempt, event: PeerLost) -> None:
        """Our pages do not depend on a source that is lost: our own reads end by themselves."""
        if not attempt.source(event.peer).complete:
            self._fail(attempt, Cause.PEER_LOST, event.message)

    def _on_fenced(self, event: Fenced) -> None:
        super()._on_fenced(event)
        self._forget_address(event.peer)

    def _prove_quiet(self, attempt: ReadAttempt, event: Fenced) -> None:
        """Nothing comes from it any more; a read that our own engine has under way still ends by itself."""
        source = attempt.source(event.peer)
        if not source.complete:
            self._fail(attempt, Cause.PEER_LOST, f"prefill was fenced: {event.proof}")
        if attempt.state in (S.ABORTING, S.HELD):
            source.unsettled = False
            self._settle(attempt)

    # --- What sources say and are told ---

    def _on_abort(self, frame: f.Abort) -> None:
        attempt = self._find_or_answer(frame)
        if attempt is not None:
            self._fail(attempt, cause_from_peer(frame.cause, Cause.PEER_ABORTED), frame.message)

    def _on_drained(self, frame: f.Drained) -> None:
        """Prefill has ended it before it told us of any page, or is fenced from us: it need not be told."""
        attempt = self._find(frame)
        self._acknowledge(frame)
        if attempt is not None and attempt.state in LIVE:
            attempt.source(frame.sender).told = True
            self._fail(attempt, cause_from_peer(frame.cause, Cause.TRANSFER_FAILED), frame.message)
        else:
            self._verdicts.acknowledge(frame, self._now)

    def _on_query(self, frame: f.Query) -> None:
        attempt = self._find_or_answer(frame)
        if attempt is not None:
            self._send(frame.sender, f.Fetching, attempt, taken=attempt.source(frame.sender).taken)

    def _on_ack(self, frame: f.Ack) -> None:
        if not self._verdicts.acknowledge(frame, self._now):
            self._ignore("stale", f"Ack for attempt {frame.attempt}, which has not ended here")

    def _find_or_answer(self, frame: f.AttemptFrame) -> ReadAttempt | None:
        """The live attempt that a frame is about; for one that has failed or ended, the sender is told so."""
        attempt = self._find(frame)
        if attempt is not None and attempt.state in LIVE:
            return attempt
        mine = frame.attempt.decode == self.incarnation
        if attempt is not None and not attempt.source(frame.sender).quiet:
            self._send_failed(attempt, frame.sender)
        elif frame.attempt not in self._attempts and mine and not self._verdicts.answer(frame, self._now):
            self._verdicts.say(forgotten(frame, "decode"))
        elif attempt is not None:
            self._verdicts.answer(frame, self._now)
        return None

    def _nudge(self, attempt: ReadAttempt) -> None:
        if attempt.cause is not None:
            self._nudge_failed(attempt)
            return
        for writer in attempt.writers:
            if writer not in attempt.accepted:
                self._send_open(writer, attempt)
            elif not attempt.source(writer).closed:
                self._send(writer, f.Query, attempt)
        asking = attempt.accepted.issuperset(attempt.writers)
        self._timers.set(("nudge", attempt), self._now + (self.timing.query_s if asking else attempt.retry_s))
        attempt.retry_s = min(2 * attempt.retry_s, self.timing.retry_max_s)

    def _nudge_failed(self, attempt: ReadAttempt) -> None:
        """Say that it has failed and drains; again later, until it is drained or prefill has to ask."""
        if not attempt.offered:
            if attempt.writers:  # linked at last: tombstones tell them from here on
                self._tell_quiet(attempt)
                self._give_up_telling(attempt)
            return
        for peer, source in attempt.sources.items():
            if not source.quiet:
                self._send_failed(attempt, peer)
        if attempt.state is S.ABORTING:
            self._timers.set(("nudge", attempt), self._now + attempt.retry_s)
            attempt.retry_s = min(2 * attempt.retry_s, self.timing.retry_max_s)

    def _send_failed(self, attempt: ReadAttempt, peer: str) -> None:
        self._send(peer, f.Failed, attempt, cause=attempt.cause, message=attempt.message)


def _misfit(frame: f.Computed, source: Source, attempt: ReadAttempt) -> str | None:
    """Why pages that a source announces are not those that we expect next."""
    params = attempt.params
    end = params.prefix_pages + attempt.pages
    stop = frame.start + len(frame.pages) // PAGE_ID_BYTES
    if source.closed:
        return "prefill announced pages after the last"
    if frame.start != source.page:
        return f"prefill announced pages from {frame.start}, the next is {source.page}"
    if stop > end or (frame.last and stop != end):
        what = f"up to {stop}{', the last' if frame.last else ''}"
        return f"prefill announced pages {what}; decode wants {params.prefix_pages}..{end}"
    if frame.aux_slot != f.NO_AUX and not (frame.last and attempt.writers[frame.sender].writes_aux):
        return f"prefill announced aux row {frame.aux_slot}, which is not its to give with these pages"
    if frame.last and len(frame.state) != len(params.state):
        items, wanted = len(frame.state) // PAGE_ID_BYTES, len(params.state) // PAGE_ID_BYTES
        return f"prefill announced {items} state items; decode wants {wanted}"
    if frame.state and not frame.last:
        return "prefill announced state items before the last pages"
    return None
