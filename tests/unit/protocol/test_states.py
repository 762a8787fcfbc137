"""The transition tables: complete, reachable, without dead ends, each row taken, and documented."""

import re
from pathlib import Path

import pytest
from pdpool_connector.protocol.states import (
    DECODE_PHASES,
    DECODE_TRANSITIONS,
    PREFILL_PHASES,
    PREFILL_TRANSITIONS,
    DecodeState,
    PrefillState,
    TransitionError,
    Trigger,
)

from tests.unit.protocol.scenarios import DECODE_SCENARIOS, PREFILL_SCENARIOS, play
from tests.unit.protocol.sides import Decode, Prefill, Side

DOC = Path(__file__).resolve().parents[3] / "docs" / "protocol.md"
TABLES = {"Prefill": PREFILL_TRANSITIONS, "Decode": DECODE_TRANSITIONS}
STATES = {"Prefill": PrefillState, "Decode": DecodeState}
SCENARIOS = {"Prefill": PREFILL_SCENARIOS, "Decode": DECODE_SCENARIOS}
BOTH = pytest.mark.parametrize("side", TABLES)


def section(name: str) -> str:
    return re.search(rf"^## {name}\n(.*?)(?=^## )", DOC.read_text(), re.MULTILINE | re.DOTALL)[1]


class TestDocumentation:
    @BOTH
    def test_diagram_is_the_table(self, side: str) -> None:
        drawn = set(re.findall(r"^    (\S+) --> (\S+): (\S+)$", section(side), re.MULTILINE))
        table = {(before or "[*]", str(after), str(trigger)) for (before, trigger), after in TABLES[side].items()}
        assert drawn == table

    @BOTH
    def test_every_state_is_explained(self, side: str) -> None:
        rows = re.findall(r"^\| ([a-z, ]+) \|", section(side), re.MULTILINE)
        explained = {name for row in rows for name in row.split(", ")} - {"state"}
        assert explained == {state.value for state in STATES[side]}

    def test_every_trigger_is_explained(self) -> None:
        rows = re.findall(r"^\| ([a-z]+) \|", section("Triggers"), re.MULTILINE)
        assert set(rows) - {"trigger"} == {trigger.value for trigger in Trigger}


class TestTables:
    @BOTH
    def test_every_state_is_reached_and_only_ends_are_final(self, side: str) -> None:
        table = TABLES[side]
        assert set(table.values()) == set(STATES[side])
        ends = {"done", "failed"}
        assert {before for before, _ in table if before} == {s for s in STATES[side] if s.value not in ends}

    @BOTH
    def test_failed_states_lead_to_failed_only(self, side: str) -> None:
        for (before, _), after in TABLES[side].items():
            if before is not None and before.value in {"quiescing", "aborting", "held"}:
                assert after.value in {"held", "failed"}

    def test_every_state_has_a_phase(self) -> None:
        assert set(PREFILL_PHASES) == set(PrefillState) - {PrefillState.PARKED}
        assert set(DECODE_PHASES) == set(DecodeState)


class TestMachines:
    @BOTH
    def test_every_row_has_a_scenario(self, side: str) -> None:
        assert set(SCENARIOS[side]) == set(TABLES[side])

    @pytest.mark.parametrize(("side", "row"), [(side, row) for side in SCENARIOS for row in SCENARIOS[side]])
    def test_scenario_takes_its_row(self, side: str, row: tuple, monkeypatch) -> None:
        world: Side = Prefill() if side == "Prefill" else Decode(linked=False)
        machine, taken = type(world.machine), set()
        original = machine._move

        def move(self, item, trigger) -> None:
            taken.add((item.state, trigger))
            original(self, item, trigger)

        monkeypatch.setattr(machine, "_move", move)
        play(world, SCENARIOS[side][row])
        assert row in taken

    @pytest.mark.parametrize("make", [Prefill, Decode])
    def test_transition_outside_table_is_an_error(self, make) -> None:
        side = make()
        side.request() if make is Prefill else side.open()
        machine = side.machine
        item = machine._by_handle[1].unclaimed if make is Prefill else next(iter(machine._attempts.values()))
        with pytest.raises(TransitionError):
            machine._move(item, Trigger.SETTLED)
