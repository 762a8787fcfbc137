"""Everything that a connector keeps in containers, with its data plane and our wrapper of it, by where it stands."""

import gc
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from pdpool_connector import DecodeConnector, PrefillConnector

OURS = ("pdpool_connector.", "tests.")
CONTAINERS = (dict, list, set, frozenset, tuple, deque)


def sizes(connector: PrefillConnector | DecodeConnector) -> dict[str, int]:
    """How many entries there are at each place, as `_machine._attempts` or `_decodes._peers[].worker._flights`.

    Places of a kind, as the jobs of all peers, count together. To be called while nothing changes.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    left: deque[tuple[str, Any]] = deque([("", connector)])
    while left:
        path, thing = left.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, CONTAINERS):
            if not isinstance(thing, tuple):
                found[path] += len(thing)
            inside = thing.values() if isinstance(thing, dict) else thing
            left.extend((f"{path}[]", one) for one in list(inside) if gc.is_tracked(one))
        elif type(thing).__module__.startswith(OURS):
            left.extend((f"{path}.{name}".lstrip("."), one) for name, one in _attributes(thing))
    return dict(found)


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from list(vars(thing).items()) if hasattr(thing, "__dict__") else ()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                yield name, getattr(thing, name)
