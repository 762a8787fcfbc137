"""Run a record through the machine again, and compare what comes out step by step. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from msgspec.structs import replace

from pdpool_connector.flight.record import Record, RecordError, Step
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.decode_read import DecodeReadMachine
from pdpool_connector.protocol.events import Effect, Event, Ignored, Read, ReadEnded, Received, Write, WriteEnded
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.prefill_read import PrefillReadMachine

AnyMachine = PrefillMachine | DecodeMachine | PrefillReadMachine | DecodeReadMachine
Role = Literal["prefill", "decode"]
Direction = Literal["write", "read"]
MACHINES: Mapping[tuple[Role, Direction], type[AnyMachine]] = MappingProxyType(
    {
        ("prefill", "write"): PrefillMachine,
        ("decode", "write"): DecodeMachine,
        ("prefill", "read"): PrefillReadMachine,
        ("decode", "read"): DecodeReadMachine,
    }
)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step at which machine and record part. `step` counts from 1."""

    step: int
    event: Event
    recorded: str
    replayed: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """How far record and machine agreed."""

    events: int
    effects: int
    difference: Difference | None


def replay(record: Record, machines: Mapping[tuple[Role, Direction], type[AnyMachine]] = MACHINES) -> Replayed:
    """Feed the recorded events to a new machine. Raises RecordError when the story's beginning is missing.

    Numbers of writes and reads come from a counter that all hand-offs of a process share, so they are matched in order
    of first appearance. Everything else must be equal, the order of effects included.
    """
    if record.header.missing:
        raise RecordError(f"the first {record.header.missing} steps fell out of the ring, so it cannot be replayed")
    header = record.header
    machine = machines[header.role, header.direction](header.incarnation, header.timing)
    moves: dict[int, int] = {}
    effects = 0
    for number, step in enumerate(record.steps, start=1):
        answer, fault = _handle(machine, step, moves)
        recorded, replayed = list(_told(step, step.effects)), list(_told(step, answer))
        if (step.fault, recorded) != (fault, _numbered(recorded, replayed, moves)):
            difference = Difference(number, step.event, _shown(recorded, step.fault), _shown(replayed, fault))
            return Replayed(number, effects, difference)
        effects += len(recorded)
    return Replayed(len(record.steps), effects, None)


def _handle(machine: AnyMachine, step: Step, moves: Mapping[int, int]) -> tuple[list[Effect], str]:
    event = step.event
    if isinstance(event, WriteEnded):
        event = replace(event, write=moves.get(event.write, event.write))
    elif isinstance(event, ReadEnded):
        event = replace(event, read=moves.get(event.read, event.read))
    try:
        return machine.handle(event, step.at), ""
    except Exception as error:  # noqa: BLE001 - a fault of the machine is part of the story
        return [], type(error).__name__


def _told(step: Step, effects: Iterable[Effect]) -> Iterable[Effect]:
    """What is compared. Of an event that concerns many hand-offs a record has only what concerns its own."""
    own = isinstance(step.event, Received)
    return (effect for effect in effects if own or not isinstance(effect, Ignored))


def _numbered(recorded: list[Effect], replayed: list[Effect], moves: dict[int, int]) -> list[Effect]:
    """The replayed effects with the record's numbers of writes and reads, new ones matched in order."""
    ours = deque(number for effect in recorded if (number := _number(effect)) is not None)
    numbered: list[Effect] = []
    for effect in replayed:
        number = _number(effect)
        if number is not None and ours:
            moves[ours[0]] = number
            field = {"write" if isinstance(effect, Write) else "read": ours.popleft()}
            numbered.append(replace(effect, **field))
        else:
            numbered.append(effect)
    return numbered


def _number(effect: Effect) -> int | None:
    if isinstance(effect, Write):
        return effect.write
    return effect.read if isinstance(effect, Read) else None


def _shown(effects: list[Effect], fault: str) -> str:
    return f"raised {fault}" if fault else "; ".join(map(repr, effects)) or "nothing"
