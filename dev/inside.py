"""Reads inside a running connector for soak and tests, in a turn of the owning thread, because its tables change."""

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from pdpool_connector import DecodeConnector, PrefillConnector

ANSWER_S = 30.0
OURS = ("pdpool_connector.", "tests.")
CONTAINERS = (dict, list, set, frozenset, tuple, deque)

Connector = PrefillConnector | DecodeConnector
Answer = TypeVar("Answer")


def rows(connector: Connector) -> int:
    """How many hand-offs the machine keeps, remembered ends included. Raises TimeoutError when no turn comes."""
    return _asked(connector, lambda: connector._machine.rows)


def kept(connector: Connector) -> int:
    """How many transfers the connector still has."""
    return sum(1 for _ in connector._transfers)


def free_slots(connector: Connector) -> int:
    """How many slots of staging memory are free; 0 where there is none."""
    return len(connector._staging._free) if connector._staging is not None else 0


def tables(connector: Connector) -> dict[str, int]:
    """How many entries each container has that can be reached from the connector, by place.

    A place reads `_machine._attempts` or `_decodes._peers[].worker._flights`. Places of a kind, as the jobs of all
    peers, count together. The transfer backend counts too, and so does a test's wrapper of it. Raises TimeoutError when
    no turn comes.
    """
    gc.collect()  # garbage is no leak
    return _asked(connector, lambda: _sizes(connector))


def _asked(connector: Connector, question: Callable[[], Answer]) -> Answer:
    """The answer, in a turn of the owner thread while it runs."""
    if not connector._reactor._thread.is_alive():
        return question()
    answer: Future[Answer] = Future()
    connector._reactor.post(lambda: answer.set_result(question()))
    return answer.result(ANSWER_S)


def _sizes(connector: Connector) -> dict[str, int]:
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


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - any object of ours
    yield from list(vars(thing).items()) if hasattr(thing, "__dict__") else ()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                yield name, getattr(thing, name)
