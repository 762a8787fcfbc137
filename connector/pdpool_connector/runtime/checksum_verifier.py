"""Checks at decode what has landed: the last writer's result waits until the checksum of the pages is known.

Prefill chooses which attempts are sampled. Where each writer of an attempt has sent the sum of what it wrote, their
total must be that of the pages. The state machine knows nothing of it: on a mismatch it first gets an abort with
`Cause.CORRUPT`, then the result.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from pdpool_connector.layout.checksum import MASK, sampled
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import AbortTransfer, Event, Received
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.status import Cause
from pdpool_connector.runtime.hashing import Hasher
from pdpool_connector.runtime.validation import unpacked

log = logging.getLogger(__name__)


class Written(NamedTuple):
    """An attempt whose writers write, or have written. `unsettled`: those without a result. `pages`: ids, packed."""

    writers: Collection[str]
    unsettled: Collection[str]
    pages: bytes


@dataclass(slots=True)
class _Check:
    """The sums that the writers of one attempt have sent."""

    sums: dict[str, int] = field(default_factory=dict)
    last: f.Ended | None = None
    """The result that waits for the check."""
    void: bool = False
    """The machine has the result, and the pages may belong to another request by now: their content says nothing."""

    def give_up(self) -> f.Ended | None:
        """The result that waits, to be passed on without the check; None where none waits."""
        if self.last is None or self.void:
            return None
        self.void = True
        return self.last


class ChecksumVerifier:
    """See the module's docstring. Owner thread.

    Args:
        page_sum: Takes the sum over pages of decode's memory, by their ids. None: no sum can be taken.
        drive: Passes an event to the state machine.
        post: Has a call made on the owner thread.
        rate: Share of the hand-offs that is checked, the same at prefill and here.
    """

    def __init__(
        self,
        page_sum: Callable[[list[int]], int] | None,
        drive: Callable[[Event], None],
        post: Callable[[Callable[[], None]], None],
        rate: float,
    ) -> None:
        self._rate = rate
        self._page_sum = page_sum
        self._drive, self._post = drive, post
        self._hasher = Hasher(post)
        self._checks: dict[AttemptId, _Check] = {}
        self.outcomes: Counter[str] = Counter({"matched": 0, "mismatched": 0, "skipped": 0})

    def done(self, frame: f.Ended, attempt: Written | None) -> None:
        """A writer has written its share of `attempt` (None: that is not being written any more): go on, or check."""
        check = self._checks.get(frame.attempt)
        if check is not None and check.last is not None:
            return  # it is being checked; a repeated result is answered afterwards
        if attempt is None:
            self._go_on(frame, skipped=check is not None)
            return
        is_last = set(attempt.unsettled) <= {frame.sender}
        if frame.checksum is None:
            self._go_on(frame, skipped=check is not None or (is_last and self._is_sampled(frame.attempt)))
            return
        if check is None:
            check = self._checks[frame.attempt] = _Check()
        check.sums[frame.sender] = frame.checksum
        if not is_last:
            self._drive(Received(frame))
        elif self._page_sum is None or self._hasher.busy or not set(attempt.writers) <= check.sums.keys():
            self._go_on(frame, skipped=True)
        elif self._hasher.submit(partial(self._page_sum, unpacked(attempt.pages)), partial(self._on_summed, frame)):
            check.last = frame
        else:
            self._go_on(frame, skipped=True)

    def ended(self, attempt: AttemptId) -> None:
        """The attempt has ended; nothing of it is kept, unless its check still runs, which then means nothing."""
        check = self._checks.get(attempt)
        if check is not None and check.last is None:
            del self._checks[attempt]
        elif check is not None and (result := check.give_up()) is not None:
            # An attempt that was given up waits for this result of its writer.
            self._post(partial(self._drive, Received(result)))

    def lost(self, peer: str) -> None:
        """The peer is lost, which the machine does not know yet: pass on its earlier results first, unchecked."""
        for check in list(self._checks.values()):
            if check.last is not None and check.last.sender == peer and (result := check.give_up()) is not None:
                self._drive(Received(result))

    def close(self) -> None:
        """See `Hasher`."""
        self._hasher.close()

    def _is_sampled(self, attempt: AttemptId) -> bool:
        """Whether it is among those to be checked, so that the lack of a sum is counted."""
        return sampled(attempt.number, self._rate)

    def _go_on(self, frame: f.Ended, *, skipped: bool) -> None:
        self._checks.pop(frame.attempt, None)
        self.outcomes["skipped"] += skipped
        self._drive(Received(frame))

    def _on_summed(self, frame: f.Ended, landed: int | None) -> None:
        check = self._checks.pop(frame.attempt)
        if check.void:
            self.outcomes["skipped"] += 1
            return
        sent = sum(check.sums.values()) & MASK
        if landed is None:
            self.outcomes["skipped"] += 1
        elif landed == sent:
            self.outcomes["matched"] += 1
        else:
            self.outcomes["mismatched"] += 1
            what = f"the checksum of its pages is {landed:016x} here and {sent:016x} at prefill"
            log.error("attempt=%s room=%d corrupt: %s", frame.attempt, frame.room, what)
            self._drive(AbortTransfer(frame.attempt.number, what, Cause.CORRUPT))
        self._drive(Received(frame))
