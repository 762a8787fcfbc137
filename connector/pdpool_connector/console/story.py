"""A flight record as lines for people to read."""

from collections.abc import Iterator

from pdpool_connector.flight.record import Header, Record
from pdpool_connector.protocol.events import Effect, Event, Received, Report, Send, Write
from pdpool_connector.protocol.frames import PAGE_ID_BYTES, AttemptFrame, Frame, shown

_IDS = frozenset({"pages", "source", "target", "state"})


def story(record: Record) -> Iterator[str]:
    """The header, then each event and, under it, its effects; times in seconds since the first step."""
    yield from map(shown, _lines(record))


def _lines(record: Record) -> Iterator[str]:
    yield from _head(record.header)
    begun = record.steps[0].at if record.steps else 0.0
    for number, step in enumerate(record.steps, start=1):
        yield f"{number:5d} {step.at - begun:+10.4f}  {event_line(step.event)}"
        yield from (f"{'':18}-> {effect_line(effect)}" for effect in step.effects)
        if step.fault:
            yield f"{'':18}-> the machine raised {step.fault}"


def event_line(event: Event) -> str:
    """One event in a line."""
    return f"received {_frame(event.frame)}" if isinstance(event, Received) else _plain(event)


def effect_line(effect: Effect) -> str:
    """One effect in a line."""
    match effect:
        case Send(peer, frame):
            return f"send {_frame(frame)} to {peer[:8]}"
        case Write(attempt, write, peer, source, _, aux):
            row = f" and aux row {aux[0]} -> {aux[1]}" if aux is not None else ""
            return f"write {write} of attempt {attempt}: {_count(source)} pages{row} to {peer[:8]}"
        case Report(handle, status):
            cause = f" {status.cause}: {status.message}" if status.cause is not None else ""
            free = "releasable" if status.releasable else "not releasable"
            return f"report handle {handle} {status.phase}{cause} ({free})"
        case _:
            return _plain(effect)


def _head(header: Header) -> Iterator[str]:
    ended = f"failed, {header.cause}: {header.message}" if header.cause else "ended well"
    free = "pages released" if header.releasable else "pages not released yet"
    who = f"{header.role} rank {header.rank} ({header.incarnation[:8]})"
    yield f"{who}, room {header.room}, request {header.request_id!r}, handle {header.handle}"
    yield f"{ended}; {free}"
    if header.missing:
        yield f"the first {header.missing} steps are missing"


def _frame(frame: Frame) -> str:
    name = type(frame).__name__
    if not isinstance(frame, AttemptFrame):
        return name
    skipped = {"version", "sender", "attempt", "room"}
    rest = {field: getattr(frame, field) for field in frame.__struct_fields__ if field not in skipped}
    return f"{name} of attempt {frame.attempt} {_words(rest)}".rstrip()


def _plain(what: Event | Effect) -> str:
    return f"{type(what).__name__} {_words({name: getattr(what, name) for name in what.__struct_fields__})}".rstrip()


def _words(values: dict[str, object]) -> str:
    return " ".join(f"{name}={_value(name, value)}" for name, value in values.items())


def _value(name: str, value: object) -> str:
    if name in _IDS and isinstance(value, bytes):
        return str(_count(value))
    if name in _IDS and isinstance(value, tuple):
        return "/".join(str(_count(ids)) for ids in value) or "none"
    if isinstance(value, str) and name in ("peer", "incarnation"):
        return value[:8]
    return repr(value) if isinstance(value, str) and not value.isidentifier() else str(value)


def _count(pages: bytes) -> int:
    return len(pages) // PAGE_ID_BYTES
