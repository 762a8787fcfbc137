"""Run a record through a new machine, and compare its effects step by step. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from msgspec.structs import replace

from pdpool_connector.flight.record import Record, RecordError, Step
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.events import Effect, Event, Ignored, Received, Write, WriteEnded
from pdpool_connector.protocol.prefill import PrefillMachine

AnyMachine = PrefillMachine | DecodeMachine
Role = Literal["prefill", "decode"]
MACHINES: Mapping[Role, type[AnyMachine]] = MappingProxyType({"prefill": PrefillMachine, "decode": DecodeMachine})


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step at which machine and record differ. `step` counts from 1."""

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


def replay(record: Record, machines: Mapping[Role, type[AnyMachine]] = MACHINES) -> Replayed:
    """Feed the recorded events to a new machine.

    Numbers of writes come from a counter that all hand-offs of a process share, so they are matched in order of first
    appearance. Everything else must be equal, the order of effects included.

    Raises:
        RecordError: the beginning of the trace is missing.
    """
    header = record.header
    if header.missing:
        raise RecordError(f"the first {header.missing} steps fell out of the ring, so it cannot be replayed")
    machine = machines[header.role](header.incarnation, header.timeouts)
    writes: dict[int, int] = {}
    effects = 0
    for number, step in enumerate(record.steps, start=1):
        answer, fault = _handle(machine, step, writes)
        recorded, replayed = list(_compared(step, step.effects)), list(_compared(step, answer))
        if (step.fault, recorded) != (fault, _numbered(recorded, replayed, writes)):
            difference = Difference(number, step.event, _shown(recorded, step.fault), _shown(replayed, fault))
            return Replayed(number, effects, difference)
        effects += len(recorded)
    return Replayed(len(record.steps), effects, None)


def _handle(machine: AnyMachine, step: Step, writes: Mapping[int, int]) -> tuple[list[Effect], str]:
    event = step.event
    if isinstance(event, WriteEnded):
        event = replace(event, write=writes.get(event.write, event.write))
    try:
        return machine.handle(event, step.at), ""
    except Exception as error:  # noqa: BLE001 - a fault of the machine is part of the trace
        return [], type(error).__name__


def _compared(step: Step, effects: Iterable[Effect]) -> Iterable[Effect]:
    """What is compared. Of an event that changes all hand-offs a record has only the effects on its own."""
    own = isinstance(step.event, Received)
    return (effect for effect in effects if own or not isinstance(effect, Ignored))


def _numbered(recorded: list[Effect], replayed: list[Effect], writes: dict[int, int]) -> list[Effect]:
    """The replayed effects with the record's numbers of writes, new ones matched in order."""
    numbers = deque(effect.write for effect in recorded if isinstance(effect, Write))
    numbered: list[Effect] = []
    for effect in replayed:
        if isinstance(effect, Write) and numbers:
            writes[numbers[0]] = effect.write
            numbered.append(replace(effect, write=numbers.popleft()))
        else:
            numbered.append(effect)
    return numbered


def _shown(effects: list[Effect], fault: str) -> str:
    return f"raised {fault}" if fault else "; ".join(map(repr, effects)) or "nothing"
