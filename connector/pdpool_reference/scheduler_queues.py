"""The sequences that an engine holds, and the one queue in which each of them is."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from pdpool_reference.request import GenerationRequest
from pdpool_reference.scheduler_text import TextStream


class State(StrEnum):
    """The queue that a sequence is in."""

    BOOTSTRAP = "prefill_bootstrap"
    """Prefill: no decode engine has offered memory yet."""
    WAITING = "waiting"
    """Needs pages before its prompt can be computed."""
    COMPUTING = "computing"
    """The prompt is computed in chunks."""
    INFLIGHT = "prefill_inflight"
    """Prefill: computed; the last pages are on their way."""
    PREALLOC = "decode_prealloc"
    """Decode: needs pages for the cache to land in."""
    TRANSFER = "decode_transfer"
    """Decode: the cache is on its way."""
    RUNNING = "running"
    """One token each step."""


NO_PAGES: NDArray[np.int32] = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence and everything that it owns in this engine.

    `pages` are cache pages in logical order. `computed` counts the prompt's tokens in the cache, `sent` the logical
    pages given to the transfer. `met` says that the other side has come. A `leaked` sequence only counts: a test has
    injected that fault.
    """

    request: GenerationRequest
    text: TextStream
    arrived: float
    state: State | None = None
    since: float = 0.0
    pages: NDArray[np.int32] = field(default_factory=lambda: NO_PAGES)
    aux_slot: int | None = None
    computed: int = 0
    sent: int = 0
    output: list[int] = field(default_factory=list)
    met: bool = False
    leaked: bool = False


class Queues:
    """The queues, each in order of arrival. A sequence is in one queue or in none."""

    def __init__(self) -> None:
        self._of: dict[State, dict[Sequence, None]] = {state: {} for state in State}
        self._moved = dict.fromkeys(State, 0)

    def move(self, seq: Sequence, to: State | None, now: float) -> None:
        """Put a sequence at the end of another queue, or take it out."""
        if seq.state is not None:
            del self._of[seq.state][seq]
            self._moved[seq.state] += to is not None
        seq.state, seq.since = to, now
        if to is not None:
            self._of[to][seq] = None

    def of(self, state: State) -> list[Sequence]:
        """Return the sequences of one queue, the first arrival first; a copy, so that a loop may move them."""
        return [seq for seq in self._of[state] if not seq.leaked]

    def all(self) -> list[Sequence]:
        """Return all sequences; a copy."""
        return [seq for queue in self._of.values() for seq in queue if not seq.leaked]

    def count(self, *states: State) -> int:
        """Return how many sequences are in these queues."""
        return sum(len(self._of[state]) for state in states)

    def oldest_since(self, state: State) -> float | None:
        """Return when the first of a queue entered it, in seconds of the monotonic clock; None for an empty queue."""
        return next((seq.since for seq in self._of[state]), None)

    def moved_total(self, state: State) -> int:
        """Return how many sequences this queue passed to another one. Those that ended in it do not count."""
        return self._moved[state]
