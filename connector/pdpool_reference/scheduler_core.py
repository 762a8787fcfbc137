"""The state of one engine: which sequences it holds, what each owns, and the one way in and out.

No thread, clock or socket. `scheduler_batch` computes, `disaggregation` holds what prefill and decode do differently.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdpool_reference.handoff import Handoff
from pdpool_reference.kv import PAGE_TOKENS, PageAllocator
from pdpool_reference.metrics import Counters
from pdpool_reference.request import Failure, Finish, GenerationRequest, Tokens
from pdpool_reference.scheduler_queues import NO_PAGES, Queues, Sequence, State
from pdpool_reference.scheduler_text import Detokenizer, TextStream


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of an engine. `chunk_tokens` is a multiple of the page: chunks of one prompt begin at page boundaries.

    `max_ahead`: prompts that prefill computes before decode has come for them, while it has nothing else to do.
    """

    max_queued: int = 256
    max_running: int = 64
    chunk_tokens: int = 256
    max_ahead: int = 0


class Side(Protocol):
    """What prefill, decode and unified engines do differently."""

    admits_with_aux: bool
    """Whether a sequence takes an aux row together with its pages."""

    def enter(self, seq: Sequence, now: float) -> None:
        """Put a new sequence into its first queue."""
        ...

    def advance(self, now: float) -> None:
        """Move sequences on as far as the hand-offs have come."""
        ...

    def chunk_computed(self, seq: Sequence) -> None:
        """A chunk of the prompt, not the last, is in the cache."""
        ...

    def prompt_computed(self, seq: Sequence, token: int, now: float) -> None:
        """The whole prompt is in the cache; `token` is the first of the answer."""
        ...

    def tokens_to_hold(self, request: GenerationRequest) -> int:
        """How many tokens of cache this engine sets aside for a request."""
        ...

    def abandon(self, seq: Sequence, message: str) -> None:
        """The sequence ends; so does its hand-off, if it is not over."""
        ...

    def beat(self, now: float) -> None:
        """Tell the connector that the scheduler lives."""
        ...

    def drain(self) -> None:
        """Open no hand-offs but those of sequences that are here already."""
        ...


@dataclass(slots=True)
class _Held:
    """Pages of a sequence that is gone, kept because the connector has not yet said that nobody touches them."""

    transfer: Handoff | None
    pages: NDArray[np.int32]
    aux_slot: int | None


class Core:
    """The state of one engine. All methods are called on the scheduler's thread.

    Args:
        pages: allocator of the cache's pages.
        aux: allocator of the aux rows, for engines that hand off.
        detokenizer: makes a fresh detokenizer for a sequence.
        eos_ids: tokens that end an answer.
        limits: bounds.
        counters: what is counted for Prometheus.
        on_end: called once for each sequence that leaves, when it stands in no queue any more and before its last
            output goes out.
        side: makes the part that depends on the engine's mode.
    """

    def __init__(
        self,
        *,
        pages: PageAllocator,
        aux: PageAllocator,
        detokenizer: Callable[[], Detokenizer],
        eos_ids: frozenset[int],
        limits: Limits,
        counters: Counters,
        on_end: Callable[[GenerationRequest], None],
        side: "Callable[[Core], Side]",
    ) -> None:
        self.queues = Queues()
        self.held: list[_Held] = []
        self.leak_next = False
        self._leaked: list[Sequence] = []
        self.limits = limits
        self.counters = counters
        self.side: Side = side(self)
        self._pages = pages
        self._aux = aux
        self._detokenizer = detokenizer
        self.eos_ids = eos_ids
        self._on_end = on_end
        self._by_request: dict[GenerationRequest, Sequence] = {}

    def submit(self, request: GenerationRequest, now: float) -> None:
        """Take a new sequence."""
        seq = Sequence(request, TextStream(self._detokenizer(), request.sampling.stop), arrived=now)
        self._by_request[request] = seq
        self.counters.requests.inc()
        self.side.enter(seq, now)

    def abort(self, request: GenerationRequest, now: float) -> None:
        """End a sequence whose client left; nothing happens when it has ended already."""
        if seq := self._by_request.get(request):
            self.finish(seq, Finish("abort"), now)

    def abort_rid(self, rid: str | None, now: float) -> int:
        """End the sequences of a request id, all of them for None. Returns how many there were."""
        found = [seq for request, seq in self._by_request.items() if rid is None or request.rid == rid]
        for seq in found:
            self.finish(seq, Finish("abort"), now)
        return len(found)

    def advance(self, now: float) -> None:
        """Move on what waits for others: give back pages, follow the hand-offs, fail what is past its deadline."""
        self._return_held()
        self.side.advance(now)
        for seq in self.queues.all():
            if not seq.output and now >= seq.request.deadline:
                self.fail(seq, Failure(504, "timed_out", f"no token within the deadline: still {seq.state}"), now)

    def token(self, seq: Sequence, token: int, now: float) -> None:
        """Hand the next token of the answer to the client, and end the sequence when it is the last."""
        if not seq.output:
            self.counters.ttft.observe(now - seq.arrived)
        seq.output.append(token)
        self.counters.generated.inc()
        sampling = seq.request.sampling
        if token in sampling.stop_token_ids or (token in self.eos_ids and not sampling.ignore_eos):
            self._last(seq, token, "", Finish("stop", token), now)
            return
        text, stop = seq.text.add(token)
        if stop is not None:
            self._last(seq, token, text, Finish("stop", stop), now)
        elif len(seq.output) >= sampling.max_new_tokens:
            self._last(seq, token, text + seq.text.flush(), Finish("length"), now)
        else:
            seq.request.sink(Tokens((token,), text))

    # ------------------------------------------------------------------ ends

    def finish(self, seq: Sequence, finish: Finish, now: float) -> None:
        """End a sequence with what it has produced so far."""
        if finish.reason == "abort":
            self.counters.aborted.inc()
        self._leave(seq, f"the request ended: {finish.reason}", now)
        seq.request.sink(Tokens((), seq.text.flush(), finish))

    def _last(self, seq: Sequence, token: int, text: str, finish: Finish, now: float) -> None:
        held_back = seq.text.flush() if isinstance(finish.matched, int) else ""
        self._leave(seq, f"the request ended: {finish.reason}", now)
        seq.request.sink(Tokens((token,), text + held_back, finish))

    def fail(self, seq: Sequence, failure: Failure, now: float) -> None:
        """End a sequence without a result."""
        self._leave(seq, failure.message, now)
        seq.request.sink(failure)

    def _leave(self, seq: Sequence, why: str, now: float) -> None:
        """The one way out for a sequence, whatever ends it."""
        del self._by_request[seq.request]
        self.counters.e2e.observe(now - seq.arrived)
        if self.leak_next:
            self.leak_next = False
            seq.leaked = True
            self._leaked.append(seq)
        else:
            self.queues.move(seq, None, now)
            self.side.abandon(seq, why)
            self._give_back(seq)
        self._on_end(seq.request)

    def purge_leaked(self, now: float) -> None:
        """Let go of the sequences that the leak fault kept."""
        leaked, self._leaked = self._leaked, []
        for seq in leaked:
            self.queues.move(seq, None, now)
            self.side.abandon(seq, "purged")
            self._give_back(seq)

    # ------------------------------------------------------------------ pages

    def take_pages(self, seq: Sequence, *, with_aux: bool) -> bool:
        """Set aside pages, and an aux row if asked for. False, and nothing is taken, when there are too few."""
        slot = self._aux.alloc(1) if with_aux else None
        if with_aux and slot is None:
            return False
        pages = self._pages.alloc(self._pages_for(seq))
        if pages is None:
            if slot is not None:
                self._aux.free(slot)
            return False
        seq.pages = pages
        seq.aux_slot = None if slot is None else int(slot[0])
        return True

    def start_over(self, seq: Sequence, now: float) -> None:
        """Take from a sequence what it holds to be computed ahead; it waits for decode again as if it had just come."""
        assert seq.sent == 0, "a peer may read what was sent"
        self._free(seq.pages, seq.aux_slot)
        seq.pages, seq.aux_slot, seq.computed = NO_PAGES, None, 0
        self.counters.retries.inc()
        self.queues.move(seq, State.BOOTSTRAP, now)

    def would_do(self, seq: Sequence, others: list[Sequence]) -> bool:
        """Whether a sequence would find pages and an aux row if these gave theirs back."""
        pages = self._pages.available + sum(other.pages.size for other in others)
        return bool(others or self._aux.available) and pages >= self._pages_for(seq)

    def used_pages(self) -> int:
        """Pages that are not free, held ones among them."""
        return self._pages.total - self._pages.available

    def _give_back(self, seq: Sequence) -> None:
        self.held.append(_Held(seq.transfer, seq.pages, seq.aux_slot))
        seq.pages, seq.aux_slot = NO_PAGES, None
        self._return_held()

    def _return_held(self) -> None:
        kept = []
        for held in self.held:
            if held.transfer is not None and not held.transfer.status.releasable:
                kept.append(held)
                continue
            self._free(held.pages, held.aux_slot)
        self.held = kept

    def _pages_for(self, seq: Sequence) -> int:
        return -(-self.side.tokens_to_hold(seq.request) // PAGE_TOKENS)

    def _free(self, pages: NDArray[np.int32], aux_slot: int | None) -> None:
        if pages.size:
            self._pages.free(pages)
        if aux_slot is not None:
            self._aux.free(np.array([aux_slot], np.int32))
