"""The transition tables: complete, reachable, without dead ends, every row used, and documented as they are."""

import re
from pathlib import Path

import pytest
from pdpool_connector.protocol.states import (
    DECODE_PHASES,
    DECODE_READ_TRANSITIONS,
    DECODE_TRANSITIONS,
    PREFILL_PHASES,
    PREFILL_READ_TRANSITIONS,
    PREFILL_TRANSITIONS,
    DecodeState,
    PrefillState,
    TransitionError,
    Trigger,
)

from tests.simulation.kinds import MACHINES
from tests.simulation.player import Player
from tests.unit.protocol.sides import Decode, DecodeRead, Prefill, PrefillRead

DOC = Path(__file__).resolve().parents[3] / "docs" / "protocol.md"
TABLES = {
    "Prefill": PREFILL_TRANSITIONS,
    "Decode": DECODE_TRANSITIONS,
    "Prefill in READ": PREFILL_READ_TRANSITIONS,
    "Decode in READ": DECODE_READ_TRANSITIONS,
}
STATES = {
    "Prefill": PrefillState,
    "Decode": DecodeState,
    "Prefill in READ": PrefillState,
    "Decode in READ": DecodeState,
}


def section(name: str) -> str:
    return re.search(rf"^## {name}\n(.*?)(?=^## )", DOC.read_text(), re.MULTILINE | re.DOTALL)[1]


@pytest.mark.parametrize("side", TABLES)
def test_the_picture_in_the_documentation_is_the_table(side: str) -> None:
    drawn = set(re.findall(r"^    (\S+) --> (\S+): (\S+)$", section(side), re.MULTILINE))
    table = {(before or "[*]", str(after), str(cue)) for (before, cue), after in TABLES[side].items()}
    assert drawn == table


@pytest.mark.parametrize("side", TABLES)
def test_every_state_is_explained_in_the_documentation(side: str) -> None:
    rows = re.findall(r"^\| ([a-z, ]+) \|", section(side), re.MULTILINE)
    explained = {name for row in rows for name in row.split(", ")} - {"state"}
    assert explained == {state.value for state in STATES[side]}


def test_every_cue_is_explained_in_the_documentation() -> None:
    rows = re.findall(r"^\| ([a-z]+) \|", section("Cues"), re.MULTILINE)
    assert set(rows) - {"cue"} == {cue.value for cue in Trigger}


@pytest.mark.parametrize("side", TABLES)
def test_every_state_is_reached_and_only_ends_are_final(side: str) -> None:
    table = TABLES[side]
    assert set(table.values()) == set(STATES[side])
    assert {before for before, _ in table if before} == {s for s in STATES[side] if s.value not in ("done", "failed")}


@pytest.mark.parametrize("side", TABLES)
def test_failed_states_never_lead_back_to_life(side: str) -> None:
    dead = {"draining", "aborting", "held"}
    for (before, _), after in TABLES[side].items():
        if before is not None and before.value in dead:
            assert after.value in {"held", "failed"}


def test_every_state_has_a_phase_for_the_engine() -> None:
    assert set(PREFILL_PHASES) == set(PrefillState) - {PrefillState.PARKED}
    assert set(DECODE_PHASES) == set(DecodeState)


def test_every_row_of_the_tables_of_write_is_taken_in_simulation(monkeypatch) -> None:
    """Of READ in `test_read_chaos`: some of its rows are for worlds in which nothing but one step happens."""
    tables = (PREFILL_TRANSITIONS, DECODE_TRANSITIONS)
    taken: dict[type, set] = {cls: set() for cls in MACHINES["write"]}
    for cls, rows in taken.items():

        def move(self, item, cue, cls=cls, rows=rows, original=cls._move):
            rows.add((item.state, cue))
            original(self, item, cue)

        monkeypatch.setattr(cls, "_move", move)
    for seed in range(40):
        Player(seed, "write").run()
        if all(taken[cls] == set(table) for cls, table in zip(taken, tables, strict=True)):
            return
    missing = [set(table) - taken[cls] for cls, table in zip(taken, tables, strict=True)]
    pytest.fail(f"never taken: {missing}")


@pytest.mark.parametrize("make", [Prefill, PrefillRead, Decode, DecodeRead])
def test_a_transition_outside_the_table_is_an_error(make) -> None:
    side = make()
    side.request() if issubclass(make, Prefill) else side.open()
    machine = side.machine
    item = next(iter((machine._by_handle if issubclass(make, Prefill) else machine._attempts).values()))
    item = item.unclaimed if issubclass(make, Prefill) else item
    with pytest.raises(TransitionError):
        machine._move(item, Trigger.QUIET)
