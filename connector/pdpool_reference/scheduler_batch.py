"""Continuous batching: each turn computes one token of every running sequence and one chunk of prompts."""

from collections.abc import Sequence as Steps
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdpool_reference.kv import PAGE_TOKENS
from pdpool_reference.model import Step
from pdpool_reference.sampling import sample
from pdpool_reference.scheduler_core import Core
from pdpool_reference.scheduler_queues import Sequence, State


class Computes(Protocol):
    """A model, on one rank or on many."""

    def forward(self, steps: Steps[Step]) -> NDArray[np.float32]:
        """See `Model`."""


def admit(core: Core, now: float) -> None:
    """Start the prompts for which there are pages, in order. A prompt that must wait blocks those behind it."""
    with_aux = core.side.admits_with_aux
    for seq in core.queues.of(State.WAITING):
        if core.queues.count(State.COMPUTING, State.RUNNING) >= core.limits.max_running:
            return
        if not core.take_pages(seq, with_aux=with_aux):
            return
        core.queues.move(seq, State.COMPUTING, now)


def compute(core: Core, model: Computes, now: float) -> bool:
    """Run one batch and pass its tokens on. Returns False when there was nothing to run."""
    running = core.queues.of(State.RUNNING)
    chunks = _chunks(core.queues.of(State.COMPUTING), core.limits.chunk_tokens)
    if not running and not chunks:
        return False
    steps = [_next_token(seq) for seq in running] + [_chunk(seq, tokens) for seq, tokens in chunks]
    logits = model.forward(steps)
    for seq, row in zip(running, logits, strict=False):
        core.token(seq, choose(seq, row), now)
    for (seq, tokens), row in zip(chunks, logits[len(running) :], strict=True):
        _chunk_done(core, seq, tokens, row, now)
    return True


def choose(seq: Sequence, logits: NDArray[np.float32]) -> int:
    """Return the next token of a sequence, from the float32 logits (vocab,) of its last one."""
    sampling = seq.request.sampling
    return sample(
        logits,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        position=len(seq.output),
    )


def _chunks(computing: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Return the tokens of each prompt that this turn computes. A chunk ends at a page's end or the prompt's."""
    chunks = []
    for seq in computing:
        tokens = len(seq.request.prompt) - seq.computed
        if tokens > budget:
            tokens = budget - budget % PAGE_TOKENS
        if tokens == 0:
            break
        chunks.append((seq, tokens))
        budget -= tokens
    return chunks


def _next_token(seq: Sequence) -> Step:
    start = len(seq.request.prompt) + len(seq.output) - 1
    return Step(tokens=np.array(seq.output[-1:], np.int32), start=start, pages=seq.pages)


def _chunk(seq: Sequence, tokens: int) -> Step:
    part = seq.request.prompt[seq.computed : seq.computed + tokens]
    return Step(tokens=np.array(part, np.int32), start=seq.computed, pages=seq.pages)


def _chunk_done(core: Core, seq: Sequence, tokens: int, logits: NDArray[np.float32], now: float) -> None:
    seq.computed += tokens
    core.counters.prompt_tokens.inc(tokens)
    if seq.computed < len(seq.request.prompt):
        core.side.chunk_computed(seq)
    else:
        core.side.prompt_computed(seq, choose(seq, logits), now)
