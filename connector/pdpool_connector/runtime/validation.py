"""Checks what an engine gives to a connector, and packs it as frames carry it; errors name the field.

Integers may be of any type that stands for one, and ids of any array type: engines keep them in numpy arrays and
tensors.
"""

import re
from collections.abc import Mapping
from numbers import Real
from operator import index
from typing import Any, Final, Literal, NamedTuple, SupportsIndex, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdpool_connector.layout.memory import KVMemory
from pdpool_connector.layout.pool import named_twice
from pdpool_connector.protocol.fence import Proof
from pdpool_connector.protocol.frames import (
    INDICES,
    MAX_IDS,
    MAX_REQUEST_ID,
    MAX_SECONDS,
    PROMPT_BYTES,
    ROOMS,
    is_incarnation,
)
from pdpool_connector.protocol.status import Cause
from pdpool_connector.runtime.stats import QueueStats

Role = Literal["prefill", "decode"]
Ids = Any
"""A list, tuple, numpy array or tensor of ids: one dimension, any integer type."""
AbortCause = Literal[Cause.ABORTED, Cause.REFUSED, Cause.TOO_LONG, Cause.INVALID]
"""Causes with which an engine may end a hand-off."""
ABORT_CAUSES: Final[tuple[AbortCause, ...]] = get_args(AbortCause)
_COUNTS: Final = 1 << 63
"""The operator reads counts below it."""
FEW = 32
"""Lists up to this length are searched faster than arrays."""


class Request(NamedTuple):
    """The arguments of `open` on both sides, checked. `deadline_s`: life of the hand-off in seconds."""

    room: int
    request_id: str
    deadline_s: float
    prompt: bytes


def as_request(room: SupportsIndex, request_id: str, deadline_s: float, prompt: bytes) -> Request:
    """Check them. Raises ValueError or TypeError for what no frame can carry."""
    if len(as_text("request_id", request_id)) > MAX_REQUEST_ID:
        raise ValueError(f"request_id has {len(request_id)} characters: give at most {MAX_REQUEST_ID}")
    if not isinstance(deadline_s, Real):
        raise TypeError(f"deadline_s={deadline_s!r} is of type {type(deadline_s).__name__}: give seconds, a number")
    if not 0 < deadline_s <= MAX_SECONDS:
        raise ValueError(f"deadline_s={deadline_s} is out of range: give more than 0 and at most {MAX_SECONDS} seconds")
    if not isinstance(prompt, bytes):
        raise TypeError(f"prompt is of type {type(prompt).__name__}: give bytes, a digest of it")
    if len(prompt) > PROMPT_BYTES:
        raise ValueError(f"prompt has {len(prompt)} bytes: give a digest of it, at most {PROMPT_BYTES} bytes")
    return Request(as_whole("room", room, ROOMS), request_id, float(deadline_s), prompt)


def as_abort_cause(cause: AbortCause) -> AbortCause:
    """The cause, which may also be given as its plain word. Raises ValueError for any other."""
    for known in ABORT_CAUSES:
        if isinstance(cause, str) and cause == known:
            return known
    names = ", ".join(f"Cause.{known.name}" for known in ABORT_CAUSES)
    raise ValueError(f"cause={cause!r} is no cause to abort with: give one of {names}")


def as_timeout(timeout_s: float) -> float:
    """Raise ValueError or TypeError for what is no time to wait."""
    if not isinstance(timeout_s, Real):
        raise TypeError(f"timeout_s={timeout_s!r} is of type {type(timeout_s).__name__}: give seconds, a number")
    if not timeout_s >= 0:
        raise ValueError(f"timeout_s={timeout_s} is out of range: give 0 or more seconds")
    return float(timeout_s)


def as_incarnation(name: str) -> str:
    """Raise ValueError for what can name no process; the short form in logs cannot."""
    if not isinstance(name, str) or not is_incarnation(name):
        raise ValueError(
            f"incarnation={name!r} is no incarnation: give its 32 hex characters, as in stats().incarnation"
        )
    return name


def as_proof(proof: Proof) -> Proof:
    """Raise ValueError, naming the field, for what can be no observation."""
    try:
        msgspec.convert(msgspec.to_builtins(proof), Proof)
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(f"{proof!r} is no proof: {error}") from None
    return proof


def as_aux_row(slot: SupportsIndex | None, memory: KVMemory, role: Role, *, required: bool) -> int | None:
    """Number of an aux row, or None. Raises ValueError for one outside the memory, and for a missing required one."""
    has = f"{role}'s memory has " + (closed("aux rows", memory.aux_rows) if memory.aux_rows else "no aux rows")
    if slot is None:
        if required and memory.aux_rows:
            raise ValueError(f"aux_slot is missing: {has}")
        return None
    if not 0 <= (row := _integer("aux_slot", slot)) < memory.aux_rows:
        raise ValueError(f"aux_slot={row}, {has}")
    return row


def as_whole(field: str, value: SupportsIndex, limit: int = INDICES) -> int:
    """An integer from 0 to below `limit`."""
    number = _integer(field, value)
    if not 0 <= number < limit:
        raise ValueError(f"{field}={number} is out of range: give 0 to 2**{limit.bit_length() - 1} - 1")
    return number


def as_queue(name: str, reqs: SupportsIndex, oldest_s: float | None, moved_total: SupportsIndex) -> QueueStats:
    """Raise ValueError or TypeError, naming the field, for what a reader of the state would refuse."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", as_text("name", name)):
        raise ValueError(f"name={name!r} is no name of a queue: give 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'")
    if oldest_s is not None and not isinstance(oldest_s, Real):
        raise TypeError(f"oldest_s={oldest_s!r} is of type {type(oldest_s).__name__}: give seconds, a number, or None")
    if oldest_s is not None and not 0 <= oldest_s <= MAX_SECONDS:
        raise ValueError(f"oldest_s={oldest_s} is out of range: give 0 to {MAX_SECONDS} seconds, None when it is empty")
    age_s = None if oldest_s is None else float(oldest_s)
    return QueueStats(as_whole("reqs", reqs), age_s, as_whole("moved_total", moved_total, _COUNTS))


def pack_pages(pages: Ids, memory: KVMemory, role: Role, *, target: bool = False) -> bytes:
    """Pack page ids as frames carry them.

    Args:
        pages: One dimension of any integer type.
        memory: The memory that the ids belong to.
        role: Whose memory it is, for messages.
        target: The pages are written to: none may occur twice, and one frame must hold all.

    Raises:
        ValueError: An id lies outside the memory, occurs twice at a target, or there are too many.
        TypeError: The ids are of another type.
    """
    return _pack("pages", pages, "pages", memory.pages, role, target)


def pack_state(
    state: Mapping[str, Ids] | None, memory: KVMemory, role: Role, *, target: bool = False
) -> tuple[bytes, ...]:
    """Pack ids of state items: one list for each state pool, in the order of the memory's pools.

    Args:
        state: Ids by name of the state pool; a pool that is missing gets none. None: no ids at all.
        memory, role, target: As in `pack_pages`.

    Raises:
        ValueError: As `pack_pages`, and for a name of no state pool.
        TypeError: As `pack_pages`, and for what is no mapping.
    """
    if state is None:
        return tuple(b"" for _ in memory.state)
    if not isinstance(state, Mapping):
        raise TypeError(f"state is of type {type(state).__name__}: give a mapping from names of state pools to ids")
    names = [pool.name for pool in memory.state]
    for name in state:
        if name not in names:
            has = f"has the state pools {', '.join(names)}" if names else "has no state pools"
            raise ValueError(f"state[{name!r}]: {role}'s memory {has}")
    return tuple(
        _pack(f"state[{pool.name!r}]", state[pool.name], "items", pool.items, role, target)
        if pool.name in state
        else b""
        for pool in memory.state
    )


def unpacked(ids: bytes) -> list[int]:
    """Ids of pages or of state items as a list."""
    return np.frombuffer(ids, "<i4").tolist() if ids else []


def closed(unit: str, count: int) -> str:
    """The numbers of `count` things, both ends included."""
    return f"{unit} 0..{count - 1}" if count else f"no {unit}"


def _pack(field: str, ids: Ids, unit: str, limit: int, role: Role, target: bool) -> bytes:
    array = ids if type(ids) is np.ndarray and ids.dtype == np.int32 else _as_integers(field, ids)
    if array.ndim != 1:
        raise ValueError(f"{field} has {array.ndim} dimensions: give one")
    if target and array.size > MAX_IDS:
        raise ValueError(f"{field} has {array.size} ids: one hand-off offers at most {MAX_IDS}")
    if 0 < array.size <= FEW:
        known = array.tolist()
        lowest, highest = min(known), max(known)
    else:
        lowest, highest = (int(array.min()), int(array.max())) if array.size else (0, -1)
    if lowest < 0 or highest >= limit:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{field} holds {wrong}: {role}'s memory has {closed(unit, limit)}")
    if target and array.size > 1:
        twice = named_twice(array.astype(np.int32, copy=False))
        if len(twice):
            raise ValueError(f"{field} holds {twice[0]} twice: the second write would replace the first")
    return array.astype("<i4", copy=False).tobytes()


def _as_integers(field: str, ids: Ids) -> NDArray[np.integer[Any]]:
    """Ids of any array type as a numpy array of integers. Tensors are recognized by their methods."""
    if hasattr(ids, "cpu"):
        ids = ids.cpu()
    if not isinstance(ids, list | tuple) and not hasattr(ids, "__array__"):
        if not hasattr(ids, "tolist"):
            raise TypeError(f"{field} is of type {type(ids).__name__}: give a list, tuple, array or tensor of integers")
        ids = ids.tolist()
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{field} is no list of integers: {error}") from None
    if not array.size:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu" or (isinstance(ids, list | tuple) and any(isinstance(one, bool) for one in ids)):
        raise TypeError(f"{field} holds {array.dtype}: give integers")
    return array


def _integer(field: str, value: SupportsIndex) -> int:
    try:
        return int(index(value))
    except TypeError:
        raise TypeError(f"{field}={value!r} is of type {type(value).__name__}: give an integer") from None


def as_text(field: str, value: str) -> str:
    """Raise TypeError for what is no str, and ValueError for what cannot be encoded as UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{field}={value!r} is of type {type(value).__name__}: give a str")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{field}={value!r} cannot be carried as UTF-8: {error.reason}") from None
    return value
