"""Keeps the account of decode's offered pages, state items and aux rows: none is offered in two hand-offs at a time."""

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pdpool_connector.protocol.events import OfferPages
from pdpool_connector.runtime.validation import unpacked


class _Owner(NamedTuple):
    offer: OfferPages
    room: int
    request_id: str


class PageGuard:
    """What peers may still write to. For any thread. `pools`: names of the memory's state pools, in order."""

    def __init__(self, pools: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._fields = ("pages", *(f"state[{name!r}]" for name in pools), "aux_slot")
        self._taken: dict[str, set[int]] = {field: set() for field in self._fields}
        self._owners: dict[int, _Owner] = {}

    def take(self, offer: OfferPages, room: int, request_id: str) -> None:
        """Note what a hand-off offers. Raises ValueError, and notes nothing, where another hand-off has some of it."""
        with self._lock:
            ids = list(self._ids(offer))
            for field, numbers in ids:
                if not self._taken[field].isdisjoint(numbers):
                    raise ValueError(self._refusal(field, next(one for one in numbers if one in self._taken[field])))
            for field, numbers in ids:
                self._taken[field].update(numbers)
            self._owners[offer.handle] = _Owner(offer, room, request_id)

    def give_back(self, handle: int) -> None:
        """The hand-off is releasable. Called before its engine can see that, for it may offer the same at once."""
        with self._lock:
            if (owner := self._owners.pop(handle, None)) is not None:
                for field, numbers in self._ids(owner.offer):
                    self._taken[field].difference_update(numbers)

    def _ids(self, offer: OfferPages) -> Iterator[tuple[str, list[int]]]:
        aux = [] if offer.aux_slot is None else [offer.aux_slot]
        lists = (unpacked(offer.pages), *map(unpacked, offer.state), aux)
        return zip(self._fields, lists, strict=True)

    def _refusal(self, field: str, number: int) -> str:
        owner = next(owner for owner in self._owners.values() if number in dict(self._ids(owner.offer))[field])
        who = f"room {owner.room}, request {owner.request_id!r}"
        return f"{field} holds {number}, which {who} was offered: wait until the status of that is releasable"
