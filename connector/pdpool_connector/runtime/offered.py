"""Which of decode's pages and state items are offered, so that none is offered in two hand-offs at a time."""

import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pdpool_connector.layout.memory import KVMemory
from pdpool_connector.protocol.events import OpenAttempt

_WIRE = np.dtype("<i4")
Flags = NDArray[np.bool_]


class Offered:
    """What may still be written, or read into. For any thread.

    Of aux rows there is no account: engines that use none name any.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._lock = threading.Lock()
        self._pages: Flags = np.zeros(memory.pages, np.bool_)
        self._state: Flags = np.zeros(memory.state_items, np.bool_)
        self._wishes: dict[int, OpenAttempt] = {}

    def take(self, wish: OpenAttempt) -> None:
        """Note what a hand-off offers. Raises ValueError, and notes nothing, where another has some of it still."""
        with self._lock:
            for field, flags, ids in self._of(wish):
                if flags[ids].any():
                    raise ValueError(self._whose(field, int(ids[flags[ids]][0])))
            for _, flags, ids in self._of(wish):
                flags[ids] = True
            self._wishes[wish.handle] = wish

    def give_back(self, wish: OpenAttempt) -> None:
        """The hand-off is released. To be called before its engine can know, for that may offer the same at once."""
        with self._lock:
            if self._wishes.pop(wish.handle, None) is not None:
                for _, flags, ids in self._of(wish):
                    flags[ids] = False

    def _of(self, wish: OpenAttempt) -> Iterator[tuple[str, Flags, NDArray[np.int32]]]:
        yield "pages", self._pages, np.frombuffer(wish.pages, _WIRE)
        if wish.state:
            yield "state", self._state, np.frombuffer(wish.state, _WIRE)

    def _whose(self, field: str, number: int) -> str:
        holds = (wish for wish in self._wishes.values() if number in np.frombuffer(getattr(wish, field), _WIRE))
        wish = next(holds)
        who = f"room {wish.room}, request {wish.request_id!r}"
        return f"{field} holds {number}, which is offered to {who}: wait until the status of that is releasable"
