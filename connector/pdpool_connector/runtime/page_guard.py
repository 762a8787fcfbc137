"""Which of decode's pages and state items are offered, so that none is offered in two hand-offs at a time."""

import threading

from pdpool_connector.protocol.events import OpenAttempt
from pdpool_connector.runtime.validation import unpacked

FIELDS = ("pages", "state")
"""Of aux rows there is no account: engines that send none name any."""


class PageGuard:
    """What may still be written, or read into. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[str, set[int]] = {field: set() for field in FIELDS}
        self._wishes: dict[int, OpenAttempt] = {}

    def take(self, params: OpenAttempt) -> None:
        """Note what a hand-off offers. Raises ValueError, and notes nothing, where another has some of it still."""
        with self._lock:
            offers = [(field, taken, _ids(params, field)) for field, taken in self._taken.items()]
            for field, taken, ids in offers:
                if not taken.isdisjoint(ids):
                    raise ValueError(self._whose(field, next(each for each in ids if each in taken)))
            for _, taken, ids in offers:
                taken.update(ids)
            self._wishes[params.handle] = params

    def give_back(self, params: OpenAttempt) -> None:
        """The hand-off is released. To be called before its engine can know, for that may offer the same at once."""
        with self._lock:
            if self._wishes.pop(params.handle, None) is not None:
                for field, taken in self._taken.items():
                    taken.difference_update(_ids(params, field))

    def _whose(self, field: str, number: int) -> str:
        params = next(params for params in self._wishes.values() if number in _ids(params, field))
        who = f"room {params.room}, request {params.request_id!r}"
        return f"{field} holds {number}, which is offered to {who}: wait until the status of that is releasable"


def _ids(params: OpenAttempt, field: str) -> list[int]:
    return unpacked(getattr(params, field))
