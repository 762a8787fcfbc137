"""A mapping that forgets."""

from collections import OrderedDict
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedMap(OrderedDict[Key, Value]):
    """Keeps at most `limit` entries. Those that were not set for longest are forgotten first."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._limit:
            self.popitem(last=False)
