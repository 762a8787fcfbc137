"""A record: the trace of one hand-off on one side, as a file of JSON lines.

The first line is the header. Each other line is one step: an event, its time, and its effects. A record holds page ids,
sizes, addresses, digests of prompts, and ids of requests and processes. It holds no text and nothing of the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from pdpool_connector.protocol.events import Effect, Event, Received, Send
from pdpool_connector.protocol.frames import AnyFrame
from pdpool_connector.protocol.timeouts import Timeouts

SUFFIX: Final = ".flight.jsonl"
MAX_RECORD_BYTES: Final = 64 << 20
"""Largest file that is read back."""

EVENTS: Final = {kind.__name__: kind for kind in get_args(Event)}
EFFECTS: Final = {kind.__name__: kind for kind in get_args(Effect)}


class RecordError(ValueError):
    """A file that is no record; the message names the line and the fault."""


class Step(NamedTuple):
    """One event, when it was handled (seconds on the monotonic clock of that process), and its effects in order.

    `fault`: type of the exception that the machine raised; empty when it raised none.
    """

    at: float
    event: Event
    effects: Sequence[Effect]
    fault: str = ""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Which hand-off it is, how it stood when it was written, and what a machine needs to replay it.

    `missing`: steps that fell out of a full ring. A trace without its beginning can be read but not replayed.
    `wall`, `at`: the same moment on the wall clock (seconds since 1970) and on the clock of the steps.
    """

    format: Literal["pdpool-flight"] = "pdpool-flight"
    version: Literal[1] = 1
    role: Literal["prefill", "decode"]
    rank: int
    incarnation: str
    room: int
    request_id: str
    handle: int
    cause: str
    message: str
    releasable: bool
    missing: int
    wall: float
    at: float
    timeouts: Timeouts


@dataclass(frozen=True, slots=True)
class Record:
    """A header and its steps."""

    header: Header
    steps: tuple[Step, ...]


class _Line(msgspec.Struct, frozen=True):
    at: float
    event: tuple[str, dict[str, Any]]
    effects: list[tuple[str, dict[str, Any]]]
    fault: str = ""


def encode_record(record: Record) -> bytes:
    """Return the record as a file's content."""
    lines = [msgspec.json.encode(record.header)]
    lines += [
        msgspec.json.encode(
            {
                "at": step.at,
                "event": (type(step.event).__name__, step.event),
                "effects": [(type(effect).__name__, effect) for effect in step.effects],
                "fault": step.fault,
            }
        )
        for step in record.steps
    ]
    return b"\n".join(lines) + b"\n"


def decode_record(data: bytes) -> Record:
    """Return the record that a file holds, every field checked. Raises RecordError."""
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"the record has {len(data)} bytes, at most {MAX_RECORD_BYTES} are read")
    first, *rest = data.splitlines() or [b""]
    try:
        header = msgspec.json.decode(first, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"line 1 is no header of a record: {error}") from None
    return Record(header, tuple(_step(number, line) for number, line in enumerate(rest, start=2)))


def _step(number: int, line: bytes) -> Step:
    try:
        parsed = msgspec.json.decode(line, type=_Line)
        effects = [_revive(EFFECTS, name, fields) for name, fields in parsed.effects]
        return Step(parsed.at, _revive(EVENTS, *parsed.event), effects, parsed.fault)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, RecordError) as error:
        raise RecordError(f"line {number} is no step of a record: {error}") from None


def _revive(kinds: dict[str, Any], name: str, fields: dict[str, Any]) -> Any:  # noqa: ANN401 - an Event or an Effect
    kind = kinds.get(name)
    if kind is None:
        raise RecordError(f"{name} is unknown to this version; known are {', '.join(sorted(kinds))}")
    if kind is Received:
        return Received(msgspec.convert(fields.get("frame"), AnyFrame))
    if kind is Send:
        return Send(msgspec.convert(fields.get("peer"), str), msgspec.convert(fields.get("frame"), AnyFrame))
    return msgspec.convert(fields, kind)
