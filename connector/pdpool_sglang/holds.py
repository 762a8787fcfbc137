"""Prefill's pages and aux rows of requests that failed: kept until no transfer reads them.

SGLang gives both back at once. Here they wait, and the client does not: its answer goes out as SGLang sends it. All
ranks release in the same turn, because their schedulers must see the same free memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Agree = Callable[[list[int]], Sequence[int]]
"""The smallest value of each place over all ranks of the instance."""


class Reader(Protocol):
    """What may still read the memory."""

    @property
    def releasable(self) -> bool:
        """Whether it reads nothing any more."""


@dataclass(frozen=True)
class Hold:
    """Memory of one request that is kept.

    Args:
        reader: what it is kept for.
        release: gives it back.
        request: stands for the request where SGLang counts owners of pages; None for an aux row.
    """

    reader: Reader
    release: Callable[[], None]
    request: Any = None


class Holds:
    """What prefill's scheduler keeps back, in order. Only the scheduler's thread calls this."""

    def __init__(self) -> None:
        self._kept: list[Hold] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, hold: Hold) -> None:
        """Keep memory back. Every rank must add the same in the same order."""
        self._kept.append(hold)

    @property
    def requests(self) -> list[Any]:
        """The requests whose pages are kept."""
        return [hold.request for hold in self._kept if hold.request is not None]

    def release(self, agree: Agree) -> None:
        """Give back what no rank's transfer reads any more."""
        if not self._kept:
            return
        ready = agree([int(hold.reader.releasable) for hold in self._kept])
        kept, self._kept = self._kept, []
        for hold, is_ready in zip(kept, ready, strict=True):
            if is_ready:
                hold.release()
            else:
                self._kept.append(hold)
