"""What an engine gives to a connector, made into what frames can carry, or refused by name.

An integer may be of any type that stands for one: engines keep slots and page numbers in numpy arrays.
"""

import re
from numbers import Real
from operator import index
from typing import Final, Literal, NamedTuple, SupportsIndex, get_args

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

RefusalCause = Literal[Cause.REFUSED, Cause.TOO_LONG]
"""What an engine may say of a request that it does not take."""
REFUSAL_CAUSES: Final[tuple[RefusalCause, ...]] = get_args(RefusalCause)
_COUNTS: Final = 1 << 63
"""What the operator takes for a count is below it."""
FEW = 32
"""Up to so many numbers a list is searched faster than an array."""


class Request(NamedTuple):
    """By what both sides know a request, and how long its hand-off may take, in seconds."""

    room: int
    sibling: int
    request_id: str
    deadline_s: float
    prompt: bytes


def as_request(
    room: SupportsIndex, request_id: str, sibling: SupportsIndex, deadline_s: float, prompt: bytes
) -> Request:
    """Raise ValueError or TypeError, naming the field, for what no frame can carry."""
    if len(_text("request_id", request_id)) > MAX_REQUEST_ID:
        raise ValueError(f"request_id has {len(request_id)} characters, at most {MAX_REQUEST_ID} are carried")
    if not isinstance(deadline_s, Real):
        raise TypeError(f"deadline_s={deadline_s!r} is of type {type(deadline_s).__name__}: give seconds, a number")
    if not 0 < deadline_s <= MAX_SECONDS:
        raise ValueError(f"deadline_s={deadline_s} is out of range: give more than 0 and at most {MAX_SECONDS} seconds")
    if not isinstance(prompt, bytes):
        raise TypeError(f"prompt is of type {type(prompt).__name__}: give bytes, a digest of it")
    if len(prompt) > PROMPT_BYTES:
        raise ValueError(f"prompt has {len(prompt)} bytes, at most {PROMPT_BYTES} are carried: give a digest of it")
    return Request(
        as_whole("room", room, ROOMS), as_whole("sibling", sibling, INDICES), request_id, float(deadline_s), prompt
    )


def as_reason(message: str) -> str:
    """Why a request is refused. Raises ValueError for a refusal that gives no reason."""
    if not _text("message", message):
        raise ValueError("message is empty: say why the request is refused")
    return message


def as_refusal_cause(cause: RefusalCause) -> RefusalCause:
    """The cause, which may be given as the plain word that it is, too. Raises ValueError for any other."""
    for known in REFUSAL_CAUSES:
        if isinstance(cause, str) and cause == known:
            return known
    names = " or ".join(f"Cause.{known.name}" for known in REFUSAL_CAUSES)
    raise ValueError(f"cause={cause!r} is no cause to refuse a request: give {names}")


def as_incarnation(name: str) -> str:
    """Raise ValueError for what can name no process, the short form in logs among it."""
    if not isinstance(name, str) or not is_incarnation(name):
        raise ValueError(
            f"incarnation={name!r} is no incarnation: give its 32 hex characters, as in stats().incarnation"
        )
    return name


def as_proof(proof: Proof) -> Proof:
    """Raise ValueError, naming the field, for what no observation can be."""
    try:
        msgspec.convert(msgspec.to_builtins(proof), Proof)
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(f"{proof!r} is no proof: {error}") from None
    return proof


def as_aux_row(slot: SupportsIndex, memory: KVMemory) -> int:
    """Index of an aux row. Raises ValueError for one outside the memory."""
    if not 0 <= (row := _integer("aux_slot", slot)) < memory.aux_rows:
        raise ValueError(f"aux_slot={row}, the memory has aux rows 0..{memory.aux_rows - 1}")
    return row


def as_whole(field: str, value: SupportsIndex, limit: int = INDICES) -> int:
    """An integer from 0 to below `limit`."""
    number = _integer(field, value)
    if not 0 <= number < limit:
        raise ValueError(f"{field}={number} is out of range: give 0 to 2**{limit.bit_length() - 1} - 1")
    return number


def as_queue(name: str, reqs: SupportsIndex, oldest_s: float | None, moved_total: SupportsIndex) -> QueueStats:
    """Raise ValueError or TypeError, naming the field, for what whoever reads the state would not believe."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", _text("name", name)):
        raise ValueError(f"name={name!r} is no name of a queue: give 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'")
    if oldest_s is not None and not isinstance(oldest_s, Real):
        raise TypeError(f"oldest_s={oldest_s!r} is of type {type(oldest_s).__name__}: give seconds, a number, or None")
    if oldest_s is not None and not 0 <= oldest_s <= MAX_SECONDS:
        raise ValueError(f"oldest_s={oldest_s} is out of range: give 0 to {MAX_SECONDS} seconds, None when it is empty")
    age_s = None if oldest_s is None else float(oldest_s)
    return QueueStats(as_whole("reqs", reqs), age_s, as_whole("moved_total", moved_total, _COUNTS))


def pack_pages(pages: NDArray[np.int32], memory: KVMemory, *, target: bool = False) -> bytes:
    """Page ids as the protocol carries them.

    Raises ValueError for what is no list of int32 ids within the memory, for a target that is named twice, and for more
    targets than a frame carries.
    """
    return _pack("pages", pages, "pages", memory.pages, target)


def unpacked(ids: bytes) -> list[int]:
    """Ids of pages or of state items as the protocol carries them."""
    return np.frombuffer(ids, "<i4").tolist() if ids else []


def pack_state(state: NDArray[np.int32] | None, memory: KVMemory, *, target: bool = False) -> bytes:
    """As `pack_pages`, for ids of state items; None is as good as an empty list."""
    return b"" if state is None else _pack("state", state, "state items", memory.state_items, target)


def _pack(field: str, ids: NDArray[np.int32], unit: str, limit: int, target: bool) -> bytes:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.dtype != np.int32 and array.size):
        raise ValueError(f"{field} is a {array.ndim}-dimensional array of {array.dtype}: give one dimension of int32")
    if target and array.size > MAX_IDS:
        raise ValueError(f"{field} has {array.size} ids, one hand-off offers at most {MAX_IDS}")
    if 0 < array.size <= FEW:
        known = array.tolist()
        lowest, highest = min(known), max(known)
    else:
        lowest, highest = (int(array.min()), int(array.max())) if array.size else (0, -1)
    if lowest < 0 or highest >= limit:
        has = f"{unit} 0..{limit - 1}" if limit else f"no {unit}"
        raise ValueError(f"{field} holds {lowest if lowest < 0 else highest}, the memory has {has}")
    if target and array.size > 1:
        twice = named_twice(array)
        if len(twice):
            raise ValueError(f"{field} holds {twice[0]} twice: what lands there first would be lost")
    return array.astype("<i4", copy=False).tobytes()


def _integer(field: str, value: SupportsIndex) -> int:
    try:
        return int(index(value))
    except TypeError:
        raise TypeError(f"{field}={value!r} is of type {type(value).__name__}: give an integer") from None


def _text(field: str, value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field}={value!r} is of type {type(value).__name__}: give a str")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{field}={value!r} cannot be carried as UTF-8: {error.reason}") from None
    return value
