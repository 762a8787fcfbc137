"""Decode's check of what has landed: the last writer's `Done` waits until the pages' checksum is known.

Prefill samples. Where each writer of an attempt has told the sum of what it wrote, the sum of them all must be that of
the pages. The machine knows nothing of it: on a mismatch it gets an abort with its own cause first, then the `Done`.
In READ the thread that reads compares what it has read with the sum that was announced; here it is only counted.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pdpool_connector.layout.checksum import MASK, PageSums, sampled
from pdpool_connector.layout.memory import KVMemory
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.decode import Attempt
from pdpool_connector.protocol.events import AbortTransfer, Event, Read, Received
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus
from pdpool_connector.runtime.hashing import Hasher
from pdpool_connector.runtime.validation import unpacked

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Heard:
    """What the writers of one attempt have said of their sums."""

    sums: dict[str, int] = field(default_factory=dict)
    last: f.Done | None = None
    """The `Done` that waits for the check."""
    void: bool = False
    """The machine knows of it, and the pages may be another's by now: what they hold says nothing."""

    def give_up(self) -> f.Done | None:
        """The `Done` that waits, which is to be heard without the check then; None where none does."""
        if self.last is None or self.void:
            return None
        self.void = True
        return self.last


class ChecksumVerifier:
    """See the module's docstring. Owner thread.

    `drive` takes events to the machine; `post` has a call made on the owner thread. `rate`: the share of hand-offs that
    is to be checked, prefill's and ours alike.
    """

    def __init__(
        self,
        memory: KVMemory,
        drive: Callable[[Event], None],
        post: Callable[[Callable[[], None]], None],
        rate: float,
    ) -> None:
        self._rate = rate
        self._sums = PageSums(memory)
        self._drive, self._post = drive, post
        self._hasher = Hasher(post)
        self._heard: dict[AttemptId, Heard] = {}
        self._reads: dict[AttemptId, set[bool]] = {}
        """Whether reads of an attempt have checksums, once some have begun."""
        self.outcomes: Counter[str] = Counter({"matched": 0, "mismatched": 0, "skipped": 0})

    def done(self, frame: f.Done, attempt: Attempt | None) -> None:
        """A writer is done with its part of `attempt` (None: that has ended): go on, or check first."""
        heard = self._heard.get(frame.attempt)
        if heard is not None and heard.last is not None:
            return  # it is being checked; whoever repeats himself is answered afterwards
        if attempt is None or attempt.cause is not None:
            self._go_on(frame, skipped=heard is not None)
            return
        if frame.checksum is None:
            is_last = set(attempt.writers) <= attempt.done | {frame.sender}
            self._go_on(frame, skipped=heard is not None or (is_last and self._owed(frame.attempt)))
            return
        if heard is None:
            heard = self._heard[frame.attempt] = Heard()
        heard.sums[frame.sender] = frame.checksum
        writers = set(attempt.writers)
        if not writers <= attempt.done | {frame.sender}:
            self._drive(Received(frame))
        elif not writers <= heard.sums.keys() or self._hasher.busy:
            self._go_on(frame, skipped=True)
        else:
            pages = unpacked(attempt.params.pages)
            if self._hasher.submit(partial(self._sums.whole, pages), partial(self._checked, frame)):
                heard.last = frame
            else:
                self._go_on(frame, skipped=True)

    def reads(self, read: Read) -> None:
        """A read begins; its attempt is checked when all of its reads are."""
        if read.source:
            self._reads.setdefault(read.attempt, set()).add(read.checksum is not None)

    def ended(self, attempt: AttemptId, status: TransferStatus) -> None:
        """The attempt has ended; nothing of it is kept, unless its check still runs, which then means nothing."""
        heard = self._heard.get(attempt)
        if heard is not None and heard.last is None:
            del self._heard[attempt]
        elif heard is not None and (done := heard.give_up()) is not None:
            # That the writer is done is what an attempt that was given up waits for.
            self._post(partial(self._drive, Received(done)))
        reads = self._reads.pop(attempt, set())
        if status.phase is Phase.DONE and (True in reads or (reads and self._owed(attempt))):
            self.outcomes["skipped" if False in reads else "matched"] += 1
        elif reads and status.cause is Cause.CORRUPT:
            self.outcomes["mismatched"] += 1
            log.error("attempt=%s corrupt: %s", attempt, status.message)

    def lost(self, peer: str) -> None:
        """The peer is lost, which the machine is not told yet: what it had said before is heard first, unchecked."""
        for heard in list(self._heard.values()):
            if heard.last is not None and heard.last.sender == peer and (done := heard.give_up()) is not None:
                self._drive(Received(done))

    def close(self) -> None:
        """See `Hasher`."""
        self._hasher.close()

    def _owed(self, attempt: AttemptId) -> bool:
        """Whether it is among those to be checked, so that the lack of a sum is to be seen."""
        return sampled(attempt.number, self._rate)

    def _go_on(self, frame: f.Done, *, skipped: bool) -> None:
        self._heard.pop(frame.attempt, None)
        self.outcomes["skipped"] += skipped
        self._drive(Received(frame))

    def _checked(self, frame: f.Done, landed: int | None) -> None:
        heard = self._heard.pop(frame.attempt)
        if heard.void:
            self.outcomes["skipped"] += 1
            return
        told = sum(heard.sums.values()) & MASK
        if landed is None:
            self.outcomes["skipped"] += 1
        elif landed == told:
            self.outcomes["matched"] += 1
        else:
            self.outcomes["mismatched"] += 1
            what = f"the checksum of its pages is {landed:016x} here and {told:016x} at prefill"
            log.error("attempt=%s room=%d corrupt: %s", frame.attempt, frame.room, what)
            self._drive(AbortTransfer(frame.attempt.number, what, Cause.CORRUPT))
        self._drive(Received(frame))
