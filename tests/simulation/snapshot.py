"""Copies a machine, and describes its state in one hashable value.

Two machines with equal forms behave alike from then on. Times count from the machine's own clock. Objects are numbered
in the order in which they are found. Attributes that only count are left out.
"""

from collections import deque
from collections.abc import Hashable
from copy import copy
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import count
from types import MappingProxyType
from typing import Any

import msgspec
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.timers import Timers

TIMES = frozenset({"deadline", "expires", "_expiry"})
"""Attributes that hold readings of the machine's clock, alone or first in a pair."""
UNSEEN = frozenset({"queues", "fired", "_effects", "_now", "timeouts", "incarnation", "_serials", "serial"})


def copied(machine: Any) -> Any:
    """A machine in the same state that shares nothing with the first that can change. Faster than `deepcopy`."""
    return _copied(machine, {})


def _copied(value: Any, done: dict[int, Any]) -> Any:
    kind: Any = type(value)
    if _is_plain(kind):
        return value
    if id(value) in done:
        return done[id(value)]
    new: Any
    if issubclass(kind, tuple):
        return tuple.__new__(kind, [_copied(item, done) for item in value])
    if kind is count:
        new = done[id(value)] = copy(value)
    elif issubclass(kind, dict):
        new = done[id(value)] = kind()
        for key, item in value.items():
            new[_copied(key, done)] = _copied(item, done)
    elif issubclass(kind, set | list | deque):
        new = done[id(value)] = kind()
        (new.update if kind is set else new.extend)([_copied(item, done) for item in value])
    else:
        new = done[id(value)] = copy(value) if isinstance(value, msgspec.Struct) else object.__new__(kind)
        for name, item in _attributes(value):
            setattr(new, name, _copied(item, done))
    return new


def form(machine: Any) -> Hashable:
    """Equal for machines that behave alike from now on."""
    return _form(machine, machine._now, {})


def _form(value: Any, now: float, seen: dict[int, int]) -> Hashable:
    kind: Any = type(value)
    if _is_plain(kind):
        return value  # type: ignore[no-any-return]
    if issubclass(kind, dict):
        return tuple((_form(key, now, seen), _form(item, now, seen)) for key, item in value.items())
    if kind is set:
        return tuple(sorted(value))
    if kind is list or kind is deque or issubclass(kind, tuple):
        return tuple(_form(item, now, seen) for item in value)
    if kind is count:
        return repr(value)
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if kind.__name__ == Timers.__name__:  # a mutant has a copy of the class
        due = sorted((when, serial, key) for key, (when, serial) in value._entries.items())
        return tuple((round(when - now, 6), _form(key, now, seen)) for when, _, key in due)
    return tuple(
        _since(item, now, seen) if name in TIMES else _form(item, now, seen)
        for name, item in _attributes(value)
        if name not in UNSEEN
    )


def _since(value: Any, now: float, seen: dict[int, int]) -> Hashable:
    """Seconds left; what is over is over, however long ago."""
    if value is None:
        return None
    if isinstance(value, float | int):
        return max(round(value - now, 6), 0.0)
    return tuple((max(round(when - now, 6), 0.0), _form(key, now, seen)) for when, key in value)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    kind: Any = type(value)
    slots = value.__struct_fields__ if isinstance(value, msgspec.Struct) else _slots(kind)
    return [(name, getattr(value, name)) for name in slots] if slots else list(vars(value).items())


@cache
def _is_plain(kind: Hashable) -> bool:
    """True for types whose values never change."""
    assert isinstance(kind, type)
    if kind in (int, str, float, bool, bytes, type(None), AttemptId, MappingProxyType) or issubclass(kind, Enum | type):
        return True
    if issubclass(kind, msgspec.Struct):
        frozen, names = kind.__struct_config__.frozen, set(kind.__struct_fields__)
    elif is_dataclass(kind):
        frozen, names = kind.__dataclass_params__.frozen, {each.name for each in fields(kind)}  # type: ignore[attr-defined]
    else:
        return False
    assert not (frozen and names & TIMES), f"{kind.__name__} would be compared by its age"
    return bool(frozen)


@cache
def _slots(kind: Hashable) -> tuple[str, ...]:
    assert isinstance(kind, type)
    return tuple(name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))


def containers(machine: Any) -> list[tuple[str, Any]]:
    """Every table that the machine or a part of it holds, by its attribute's name."""
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()

    def look(value: Any) -> None:
        kind: Any = type(value)
        if id(value) in seen or _is_plain(kind):
            return
        seen.add(id(value))
        for name, item in _attributes(value) if hasattr(value, "__dict__") or _slots(kind) else ():
            if name in UNSEEN or isinstance(item, Timers):
                continue
            if isinstance(item, dict | set | list | deque):
                found.append((name, item))
            else:
                look(item)

    look(machine)
    return found
