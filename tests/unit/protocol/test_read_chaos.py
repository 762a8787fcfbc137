"""READ holds its promises whatever the network does, and takes every row of its tables."""

import pytest
from pdpool_connector.protocol.decode_read import DecodeReadMachine
from pdpool_connector.protocol.prefill_read import PrefillReadMachine
from pdpool_connector.protocol.states import DECODE_READ_TRANSITIONS, PREFILL_READ_TRANSITIONS

from tests.unit.protocol import test_read, test_read_ends
from tests.unit.protocol.chaos import Chaos
from tests.unit.protocol.test_ranks import SHAPES

SEEDS = 12


@pytest.mark.parametrize("shape", SHAPES)
def test_no_seed_breaks_a_promise(shape: str) -> None:
    done = [Chaos(seed, *SHAPES[shape]).run() for seed in range(SEEDS)]
    assert 0 < sum(done) < SEEDS, "faults everywhere or nowhere prove little"


def test_the_rows_of_both_tables_are_taken(monkeypatch) -> None:
    tables = {PrefillReadMachine: PREFILL_READ_TRANSITIONS, DecodeReadMachine: DECODE_READ_TRANSITIONS}
    taken: dict[type, set] = {cls: set() for cls in tables}
    for cls, rows in taken.items():

        def move(self, item, cue, rows=rows, original=cls._move):
            rows.add((item.state, cue))
            original(self, item, cue)

        monkeypatch.setattr(cls, "_move", move)
    test_read.test_with_nothing_to_read_decode_is_done_at_once()
    test_read_ends.test_an_unreachable_prefill_fails_what_waits_for_it()
    for seed in range(200):
        Chaos(seed, *SHAPES["2x2" if seed % 2 else "1x1"]).run()
        if all(taken[cls] == set(table) for cls, table in tables.items()):
            return
    pytest.fail(f"never taken: {[set(table) - taken[cls] for cls, table in tables.items()]}")
