"""The hand-off as the scheduler sees it: what prefill, decode and unified engines do differently.

The HTTP side has opened the hand-off of a sequence before the scheduler gets it (`request_handoffs`).
"""

from collections.abc import Iterable

from pdpool_connector import Cause, Phase, TransferStatus, answer_for, client_answer

from pdpool_reference.handoff import DecodeOffers, Monitor, PrefillSends, Transfer
from pdpool_reference.kv import PAGE_TOKENS, AuxRow, PagedKV
from pdpool_reference.request import Failure, GenerationRequest
from pdpool_reference.scheduler_core import Core
from pdpool_reference.scheduler_queues import Queues, Sequence, State


def failure_of(status: TransferStatus) -> Failure:
    """Return the client's answer for a failed hand-off."""
    return Failure(*client_answer(status))


class ShownQueues:
    """Shows the engine's hand-off queues through its connector, when they have changed."""

    def __init__(self, queues: Queues, connector: Monitor, states: Iterable[State]) -> None:
        self._queues, self._connector = queues, connector
        self._shown: dict[State, tuple[int, float | None, int] | None] = dict.fromkeys(states)

    def show(self, now: float) -> None:
        """Show those that have changed since the last call."""
        for state, before in self._shown.items():
            since = self._queues.oldest_since(state)
            report = (self._queues.count(state), since, self._queues.moved_total(state))
            if report != before:
                self._shown[state] = report
                oldest_s = None if since is None else max(0.0, now - since)
                self._connector.set_queue(state.value, report[0], oldest_s, report[2])


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


class PrefillSide:
    """Computes prompts and sends their pages.

    A sequence waits in `prefill_bootstrap` until a decode engine has offered memory. It computes in chunks, and each
    chunk is sent when it is done. It stands in `prefill_inflight` until all has landed. Its own answer is one token, as
    SGLang's is.
    """

    admits_with_aux = True

    def __init__(self, core: Core, connector: Monitor, kv: PagedKV) -> None:
        self._core = core
        self._connector = connector
        self._kv = kv
        self._first_token: dict[Sequence, int] = {}
        self._shown = ShownQueues(core.queues, connector, (State.BOOTSTRAP, State.INFLIGHT))

    def enter(self, seq: Sequence, now: float) -> None:
        """See Side."""
        self._core.queues.move(seq, State.BOOTSTRAP, now)

    def advance(self, now: float) -> None:
        """See Side."""
        queues = self._core.queues
        for state in (State.BOOTSTRAP, State.WAITING, State.COMPUTING, State.INFLIGHT):
            for seq in queues.of(state):
                status = _status(seq)
                if status.phase is Phase.FAILED:
                    fail_handoff(self._core, seq, status, now)
                elif state is State.BOOTSTRAP and status.phase is not Phase.WAITING:
                    queues.move(seq, State.WAITING, now)
                elif state is State.INFLIGHT and status.phase is Phase.DONE:
                    self._core.token(seq, self._first_token.pop(seq), now)

    def chunk_computed(self, seq: Sequence) -> None:
        """See Side."""
        ready = seq.computed // PAGE_TOKENS
        self._transfer_of(seq).send(seq.pages[seq.sent : ready], start=seq.sent, last=False)
        seq.sent = ready

    def prompt_computed(self, seq: Sequence, token: int, now: float) -> None:
        """See Side."""
        assert seq.aux_slot is not None, "an aux row is taken together with the pages"
        self._kv.write_aux(seq.aux_slot, AuxRow(first_token=token, prompt_tokens=len(seq.request.prompt)))
        self._first_token[seq] = token
        self._transfer_of(seq).send(seq.pages[seq.sent :], start=seq.sent, last=True, aux_slot=seq.aux_slot)
        seq.sent = len(seq.pages)
        self._core.queues.move(seq, State.INFLIGHT, now)

    def tokens_to_hold(self, request: GenerationRequest) -> int:
        """See Side."""
        return len(request.prompt)

    def abandon(self, seq: Sequence, message: str) -> None:
        """See Side."""
        self._first_token.pop(seq, None)
        _abort(seq, message)

    def beat(self, now: float) -> None:
        """See Side."""
        self._connector.beat()
        self._shown.show(now)

    def _transfer_of(self, seq: Sequence) -> PrefillSends:
        transfer = _transfer(seq)
        assert isinstance(transfer, PrefillSends), "a prefill connector opened it"
        return transfer


class DecodeSide:
    """Receives caches and generates answers.

    A sequence waits in `decode_prealloc` for pages for prompt and answer. It then waits in `decode_transfer` until the
    cache and the first token have landed, and runs from there.
    """

    admits_with_aux = True

    def __init__(self, core: Core, connector: Monitor, kv: PagedKV) -> None:
        self._core = core
        self._connector = connector
        self._kv = kv
        self._shown = ShownQueues(core.queues, connector, (State.PREALLOC, State.TRANSFER))

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
        short = False
        for seq in self._core.queues.of(State.PREALLOC):
            status = _status(seq)
            if status.phase is Phase.FAILED:
                fail_handoff(self._core, seq, status, now)
            elif not short:
                short = not self._offer(seq, now)

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
        """See Side."""
        _abort(seq, message)

    def beat(self, now: float) -> None:
        """See Side."""
        self._connector.beat()
        self._shown.show(now)

    def _offer(self, seq: Sequence, now: float) -> bool:
        """Offer memory for a sequence. Returns False when pages are short."""
        running = self._core.queues.count(State.TRANSFER, State.RUNNING)
        if running >= self._core.limits.max_running or not self._core.take_pages(seq, with_aux=True):
            return False
        assert seq.aux_slot is not None, "taken together with the pages"
        self._kv.clear_aux(seq.aux_slot)
        transfer = _transfer(seq)
        assert isinstance(transfer, DecodeOffers), "a decode connector opened it"
        transfer.offer(seq.pages[: -(-len(seq.request.prompt) // PAGE_TOKENS)], aux_slot=seq.aux_slot)
        self._core.queues.move(seq, State.TRANSFER, now)
        return True

    def _landed(self, seq: Sequence, now: float) -> None:
        """Run a sequence whose cache has landed, if it is the cache of its prompt."""
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


def _status(seq: Sequence) -> TransferStatus:
    status = _transfer(seq).status
    seq.met |= status.phase not in (Phase.WAITING, Phase.FAILED)
    return status


def _transfer(seq: Sequence) -> Transfer:
    assert seq.request.transfer is not None, "the HTTP side opens a hand-off for every sequence"
    return seq.request.transfer


def _abort(seq: Sequence, message: str) -> None:
    transfer = _transfer(seq)
    if not transfer.status.ended:
        transfer.abort(message)
