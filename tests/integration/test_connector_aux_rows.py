"""Aux rows as engines lay them out: all that a request hands over beside its pages, one behind the other."""

from itertools import accumulate

import numpy as np
import pytest

from tests.integration.connector_peer import AUX_ROWS
from tests.integration.handoffs import meet

ROW = np.dtype(
    [
        ("output_ids", "<i4", 16),  # the first token is the first of them
        ("cached_tokens", "<i4", 3),
        ("logprob", "<f4"),
        ("logprob_id", "<i4"),
        ("top_logprobs", "<f4", 20),
        ("top_logprob_ids", "<i4", 20),
        ("hidden_state", "<f4", 4096),
        ("room", "<i8"),
    ]
)
SLOTS = {0: 11, 7: 0, 3: 15}
"""Rows of prefill, and those of decode that they are for."""


def row(random: np.random.Generator, room: int) -> np.ndarray:
    made = np.zeros((), ROW)
    for name in ("output_ids", "cached_tokens", "logprob_id", "top_logprob_ids"):
        made[name] = random.integers(1, 1 << 31, made[name].shape)
    made["logprob"] = -random.random()
    made["top_logprobs"] = np.sort(-random.random(20))[::-1]
    made["top_logprobs"][-1] = -np.inf
    made["hidden_state"] = random.standard_normal(4096)
    made["room"] = room
    return made


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
@pytest.mark.parametrize("direction", ["write", "read"])
def test_first_token_logprobs_and_hidden_state_of_each_request_arrive_in_its_row(
    sides, backend: str, direction: str
) -> None:
    assert ROW["hidden_state"].itemsize >= 16 << 10
    lengths = [ROW[name].itemsize for name in ROW.names]
    offsets = [ROW.fields[name][1] for name in ROW.names]
    assert offsets == list(accumulate(lengths, initial=0))[:-1], "a row is its items, with nothing between them"
    options = {"aux_bytes": ROW.itemsize, "direction": direction}
    prefill, decode = sides("prefill", backend, **options), sides("decode", backend, **options)
    there, here = (side.aux.view(ROW)[:, 0] for side in (prefill, decode))
    random = np.random.default_rng(4)
    decode.aux[:] = 0
    for room, (source, target) in enumerate(SLOTS.items(), start=1):
        there[source] = row(random, room)
        meet(prefill, decode, room, name=f"{room}", pages=[room], aux_slot=target)
    for room, source in enumerate(SLOTS, start=1):
        prefill.send(f"{room}", [room], aux_slot=source)
    for room in range(1, len(SLOTS) + 1):
        decode.until(f"{room}", "done")
    for room, (source, target) in enumerate(SLOTS.items(), start=1):
        assert here[target]["room"] == room
        for name in ROW.names:
            assert np.array_equal(here[target][name], there[source][name]), (name, room)
    assert not here[np.setdiff1d(np.arange(AUX_ROWS), list(SLOTS.values()))].view(np.uint8).any()
    del there, here  # views of memory that the sides let go of
