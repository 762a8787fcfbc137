"""The hand-off as the scheduler sees it: what prefill, decode and unified engines do differently."""

import logging

from pdpool_connector import Cause, Phase, TransferStatus, answer_for, client_answer

from pdpool_reference.handoff import DecodeHandoffs, Handoff, PrefillHandoff, PrefillHandoffs
from pdpool_reference.kv import PAGE_TOKENS, AuxRow, PagedKV
from pdpool_reference.request import Failure, GenerationRequest
from pdpool_reference.scheduler_core import Core
from pdpool_reference.scheduler_queues import Sequence, State

log = logging.getLogger(__name__)


def failure_of(status: TransferStatus) -> Failure:
    """What the client is told of a failed hand-off."""
    return Failure(*client_answer(status))


class UnifiedSide:
    """Prompt and answer in one engine."""

    admits_with_aux = False

    def __init__(self, core: Core) -> None:
        self._core = core

    def enter(self, seq: Sequence, now: float) -> None:
        """See Side."""
        self._core.queues.move(seq, State.WAITING, now)

    def advance(self, now: float) -> None:
        """See Side."""

    def chunk_computed(self, seq: Sequence) -> None:
        """See Side."""

    def prompt_computed(self, seq: Sequence, token: int, now: float) -> None:
        """See Side."""
        self._core.queues.move(seq, State.RUNNING, now)
        self._core.token(seq, token, now)

    def tokens_to_hold(self, request: GenerationRequest) -> int:
        """See Side. The last token of an answer never enters the cache."""
        return len(request.prompt) + request.sampling.max_new_tokens - 1

    def abandon(self, seq: Sequence, message: str) -> None:
        """See Side."""

    def beat(self, now: float) -> None:
        """See Side."""

    def drain(self) -> None:
        """See Side."""


class PrefillSide:
    """Computes prompts and sends their pages.

    A sequence waits in `prefill_bootstrap` until a decode engine has named the destination, computes in chunks that are
    sent as they are done, and stands in `prefill_inflight` until all has arrived. Its own answer is one token, as
    SGLang's is.

    Where `Limits.max_ahead` allows it, one that waits is computed meanwhile, and sent when decode has come. So late or
    missing decodes cost nothing but that: its pages go to the first that needs them.
    """

    admits_with_aux = True

    def __init__(self, core: Core, connector: PrefillHandoffs, kv: PagedKV) -> None:
        self._core = core
        self._connector = connector
        self._kv = kv
        self._first_token: dict[Sequence, int] = {}

    def enter(self, seq: Sequence, now: float) -> None:
        """See Side."""
        request, handoff = seq.request, seq.request.handoff
        assert handoff is not None, "the server refuses requests without a room"
        try:
            seq.transfer = self._connector.open(
                handoff.room,
                request.rid,
                sibling=handoff.sibling,
                prompt=handoff.prompt,
                deadline_s=remaining_s(request, now),
                traceparent=handoff.traceparent,
            )
        except ValueError as error:
            self._core.fail(seq, Failure(400, "invalid_handoff", str(error)), now)
            return
        self._core.queues.move(seq, State.BOOTSTRAP, now)

    def advance(self, now: float) -> None:
        """See Side."""
        queues = self._core.queues
        for state in (State.BOOTSTRAP, State.AHEAD, State.WAITING, State.COMPUTING, State.INFLIGHT):
            for seq in queues.of(state):
                status = _status(seq)
                if status.phase is Phase.FAILED:
                    fail_handoff(self._core, seq, status, now)
                elif state is State.BOOTSTRAP and status.phase is not Phase.WAITING:
                    queues.move(seq, State.WAITING, now)
                elif state is State.AHEAD and status.phase is not Phase.WAITING:
                    self._decode_has_come(seq, now)
                elif state is State.INFLIGHT and status.phase is Phase.DONE:
                    self._core.token(seq, self._first_token.pop(seq), now)

    def chunk_computed(self, seq: Sequence) -> None:
        """See Side."""
        if seq.state is State.AHEAD:
            return
        ready = seq.computed // PAGE_TOKENS
        self._transfer_of(seq).send(seq.pages[seq.sent : ready], start=seq.sent)
        seq.sent = ready

    def prompt_computed(self, seq: Sequence, token: int, now: float) -> None:
        """See Side."""
        assert seq.aux_slot is not None, "an aux row is taken together with the pages"
        self._kv.write_aux(seq.aux_slot, AuxRow(first_token=token, prompt_tokens=len(seq.request.prompt)))
        self._first_token[seq] = token
        if seq.state is not State.AHEAD:
            self._send_rest(seq, now)

    def tokens_to_hold(self, request: GenerationRequest) -> int:
        """See Side."""
        return len(request.prompt)

    def abandon(self, seq: Sequence, message: str) -> None:
        """See Side."""
        self._first_token.pop(seq, None)
        _abort(seq, message)

    def beat(self, now: float) -> None:
        """See Side."""
        del now
        self._connector.beat()

    def drain(self) -> None:
        """See Side. A sequence's hand-off is opened when it enters, so that all are open by now."""
        self._connector.drain()

    def _decode_has_come(self, seq: Sequence, now: float) -> None:
        """Send what was computed ahead."""
        if seq.computed == len(seq.request.prompt):
            self._send_rest(seq, now)
            return
        self._core.queues.move(seq, State.COMPUTING, now)
        if seq.computed:
            self.chunk_computed(seq)

    def _send_rest(self, seq: Sequence, now: float) -> None:
        self._transfer_of(seq).send(seq.pages[seq.sent :], start=seq.sent, last=True, aux_slot=seq.aux_slot)
        seq.sent = len(seq.pages)
        self._core.queues.move(seq, State.INFLIGHT, now)

    def _transfer_of(self, seq: Sequence) -> PrefillHandoff:
        assert isinstance(seq.transfer, PrefillHandoff), "opened when the sequence entered"
        return seq.transfer


class DecodeSide:
    """Receives caches and generates answers.

    A sequence waits in `decode_prealloc` for pages for prompt and answer, then in `decode_transfer` until the cache and
    the first token have landed, and runs from there.
    """

    admits_with_aux = True

    def __init__(self, core: Core, connector: DecodeHandoffs, kv: PagedKV) -> None:
        self._core = core
        self._connector = connector
        self._kv = kv
        self._reported: tuple[int, float | None, int] | None = None
        self._draining = False

    def enter(self, seq: Sequence, now: float) -> None:
        """See Side."""
        self._core.queues.move(seq, State.PREALLOC, now)

    def advance(self, now: float) -> None:
        """See Side."""
        for seq in self._core.queues.of(State.TRANSFER):
            status = _status(seq)
            if status.phase is Phase.FAILED:
                fail_handoff(self._core, seq, status, now)
            elif status.phase is Phase.DONE:
                self._landed(seq, now)
        for seq in self._core.queues.of(State.PREALLOC):
            if not self._open(seq, now):
                return
        if self._draining:
            self._draining = False
            self._connector.drain()

    def chunk_computed(self, seq: Sequence) -> None:
        """See Side."""
        del seq
        raise AssertionError("a decode engine computes no prompts")

    def prompt_computed(self, seq: Sequence, token: int, now: float) -> None:
        """See Side."""
        del seq, token, now
        raise AssertionError("a decode engine computes no prompts")

    def tokens_to_hold(self, request: GenerationRequest) -> int:
        """See Side."""
        return len(request.prompt) + request.sampling.max_new_tokens - 1

    def abandon(self, seq: Sequence, message: str) -> None:
        """See Side. Prefill is told, too, of a sequence that it will never hear of otherwise."""
        _abort(seq, message)
        request, handoff = seq.request, seq.request.handoff
        if seq.transfer is None and handoff is not None:
            where = (handoff.prefill, handoff.room, request.rid)
            try:
                self._connector.refuse(*where, message, sibling=handoff.sibling, prompt=handoff.prompt)
            except ValueError as error:
                log.warning("prefill cannot be told that request %s ended: %s", request.rid, error)

    def beat(self, now: float) -> None:
        """See Side."""
        queues = self._core.queues
        self._connector.beat()
        report = (
            queues.count(State.PREALLOC),
            queues.oldest_s(State.PREALLOC, now),
            queues.moved_total(State.PREALLOC),
        )
        if report != self._reported:
            self._reported = report
            self._connector.set_queue(State.PREALLOC.value, *report)

    def drain(self) -> None:
        """See Side. Sequences that still wait for pages open theirs before the connector takes no more."""
        self._draining = True

    def _open(self, seq: Sequence, now: float) -> bool:
        """Name the destination to prefill. False when pages are short."""
        running = self._core.queues.count(State.TRANSFER, State.RUNNING)
        if running >= self._core.limits.max_running or not self._core.take_pages(seq, with_aux=True):
            return False
        request, handoff = seq.request, seq.request.handoff
        assert handoff is not None, "the server refuses requests without a room"
        assert seq.aux_slot is not None, "taken together with the pages"
        self._kv.clear_aux(seq.aux_slot)
        try:
            seq.transfer = self._connector.open(
                handoff.prefill,
                handoff.room,
                request.rid,
                pages=seq.pages[: -(-len(request.prompt) // PAGE_TOKENS)],
                aux_slot=seq.aux_slot,
                sibling=handoff.sibling,
                prompt=handoff.prompt,
                deadline_s=remaining_s(request, now),
                traceparent=handoff.traceparent,
            )
        except ValueError as error:
            self._core.fail(seq, Failure(400, "invalid_handoff", str(error)), now)
            return True
        self._core.queues.move(seq, State.TRANSFER, now)
        return True

    def _landed(self, seq: Sequence, now: float) -> None:
        """The cache is here: check that it is the right one, then run."""
        assert seq.aux_slot is not None, "kept as long as the sequence"
        row = self._kv.read_aux(seq.aux_slot)
        expected = len(seq.request.prompt)
        if row is None or row.prompt_tokens != expected:
            got = "no row" if row is None else f"a prompt of {row.prompt_tokens} tokens"
            message = f"prefill handed over {got}, the request here has {expected} tokens"
            self._core.fail(seq, Failure(*answer_for(Cause.INVALID, message)), now)
            return
        seq.computed = expected
        self._core.queues.move(seq, State.RUNNING, now)
        self._core.token(seq, row.first_token, now)


def fail_handoff(core: Core, seq: Sequence, status: TransferStatus, now: float) -> None:
    """End a sequence whose hand-off failed, counted as SGLang does: before or after the two sides had met."""
    (core.counters.transfer_failed if seq.met else core.counters.bootstrap_failed).inc()
    core.fail(seq, failure_of(status), now)


def remaining_s(request: GenerationRequest, now: float) -> float:
    """Seconds until the request's deadline; the smallest that a connector takes when it has passed."""
    return max(0.001, request.deadline - now)


def _status(seq: Sequence) -> TransferStatus:
    status = _transfer(seq).status
    seq.met |= status.phase not in (Phase.WAITING, Phase.FAILED)
    return status


def _transfer(seq: Sequence) -> Handoff:
    assert seq.transfer is not None, "every sequence in these queues was opened"
    return seq.transfer


def _abort(seq: Sequence, message: str) -> None:
    if seq.transfer is not None and not seq.transfer.status.ended:
        seq.transfer.abort(message)
