"""The state of one engine: which sequences it holds, what each owns, and the one way in and out.

It has no thread, clock or socket. `scheduler_batch` computes. `disaggregation` holds what prefill and decode do
differently.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdpool_reference.handoff import Transfer
from pdpool_reference.kv import PAGE_TOKENS, PageAllocator
from pdpool_reference.metrics import Counters
from pdpool_reference.request import Failure, Finish, GenerationRequest, Tokens
from pdpool_reference.scheduler_queues import NO_PAGES, Queues, Sequence, State
from pdpool_reference.scheduler_text import Detokenizer, TextStream


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of an engine. `chunk_tokens` is a multiple of the page: chunks of one prompt begin at page boundaries."""

    max_queued: int = 256
    max_running: int = 64
    chunk_tokens: int = 256


class Side(Protocol):
    """What prefill, decode and unified engines do differently."""

    admits_with_aux: bool
    """Whether a sequence takes an aux row together with its pages."""

    def enter(self, seq: Sequence, now: float) -> None:
        """Put a new sequence into its first queue."""
        ...

    def advance(self, now: float) -> None:
        """Move sequences on as far as their hand-offs allow."""
        ...

    def chunk_computed(self, seq: Sequence) -> None:
        """A chunk of the prompt, not the last, is in the cache."""
        ...

    def prompt_computed(self, seq: Sequence, token: int, now: float) -> None:
        """The whole prompt is in the cache; `token` is the first of the answer."""
        ...

    def tokens_to_hold(self, request: GenerationRequest) -> int:
        """Return for how many tokens this engine allocates cache."""
        ...

    def abandon(self, seq: Sequence, message: str) -> None:
        """The sequence ends: end its hand-off, if that has not ended."""
        ...

    def beat(self, now: float) -> None:
        """Report to the connector that the scheduler lives."""
        ...


@dataclass(slots=True)
class _Held:
    """Pages of a sequence that has ended, held until its hand-off is releasable."""

    transfer: Transfer | None
    pages: NDArray[np.int32]
    aux_slot: int | None


class Core:
    """The state of one engine. All methods are called on the scheduler's thread.

    Args:
        pages: Allocator of the cache's pages.
        aux: Allocator of the aux rows, for engines that hand off.
        detokenizer: Makes a fresh detokenizer for a sequence.
        eos_ids: Tokens that end an answer.
        limits: Bounds.
        counters: What is counted for Prometheus.
        on_end: Called once for each sequence that ends, after it left its queue and before its last output.
        side: Makes the part that depends on the engine's mode.
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
        """End the sequences of a request id, all sequences for None. Returns how many there were."""
        found = [seq for request, seq in self._by_request.items() if rid is None or request.rid == rid]
        for seq in found:
            self.finish(seq, Finish("abort"), now)
        return len(found)

    def advance(self, now: float) -> None:
        """Free pages, follow the hand-offs, and fail what is past its deadline."""
        self._return_held()
        self.side.advance(now)
        for seq in self.queues.all():
            if not seq.output and now >= seq.request.deadline:
                self.fail(seq, Failure(504, "timed_out", f"no token within the deadline: still {seq.state}"), now)

    def token(self, seq: Sequence, token: int, now: float) -> None:
        """Pass the next token of the answer to the client, and end the sequence after the last one."""
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
        """End a sequence. Every end passes here."""
        del self._by_request[seq.request]
        self.counters.e2e.observe(now - seq.arrived)
        if self.leak_next:
            self.leak_next = False
            seq.leaked = True
            self._leaked.append(seq)
            if seq.state is State.RUNNING and seq.request.transfer is not None:
                self.queues.move(seq, State.TRANSFER, now)  # where engines leak; a running one would cost time
        else:
            self.queues.move(seq, None, now)
            self.side.abandon(seq, why)
            self._give_back(seq)
        self._on_end(seq.request)

    def purge_leaked(self, now: float) -> None:
        """Free the sequences that the leak fault kept."""
        leaked, self._leaked = self._leaked, []
        for seq in leaked:
            self.queues.move(seq, None, now)
            self.side.abandon(seq, "purged")
            self._give_back(seq)

    # ------------------------------------------------------------------ pages

    def take_pages(self, seq: Sequence, *, with_aux: bool) -> bool:
        """Allocate pages, and an aux row if asked for. Returns False, and takes nothing, when there are too few."""
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

    def used_pages(self) -> int:
        """Return how many pages are not free; held pages count."""
        return self._pages.total - self._pages.available

    def _give_back(self, seq: Sequence) -> None:
        if seq.pages.size:
            self.held.append(_Held(seq.request.transfer, seq.pages, seq.aux_slot))
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
