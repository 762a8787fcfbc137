"""Aux rows as SGLang lays them out: one region for each of its ten buffers, with a row for each request."""

import numpy as np
import pytest

from tests.integration.connector_peer import AUX_ROWS
from tests.integration.handoffs import open_both

BUFFERS = {
    "output_ids": ("<i4", 16),  # the first token is the first of them
    "cached_tokens": ("<i4", 16),
    "output_token_logprobs_val": ("<f4", 16),
    "output_token_logprobs_idx": ("<i4", 16),
    "output_top_logprobs_val": ("<f4", 128),
    "output_top_logprobs_idx": ("<i4", 128),
    "output_topk_p": ("<f4", 16),
    "output_topk_index": ("<i8", 16),
    "output_hidden_states": ("<f4", 4096),
    "bootstrap_room": ("<u8", 8),
}
"""What SGLang hands over beside the cache: dtype and length of a row in each buffer."""
SLOTS = {0: 11, 7: 0, 3: 15}
"""Rows of prefill, and the rows of decode that they are for."""


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_each_request_fills_its_row_of_ten_regions(sides, backend: str) -> None:
    aux = [np.dtype(dtype).itemsize * length for dtype, length in BUFFERS.values()]
    prefill, decode = sides("prefill", backend, aux=aux), sides("decode", backend, aux=aux)
    random = np.random.default_rng(4)
    there, here = (
        {name: rows.view(BUFFERS[name][0]) for name, rows in zip(BUFFERS, side.aux_regions, strict=True)}
        for side in (prefill, decode)
    )
    for name, rows in there.items():
        rows[:] = random.integers(1, 1 << 20, rows.shape)
        here[name][:] = 0
    for room, (source, target) in enumerate(SLOTS.items(), start=1):
        there["bootstrap_room"][source] = room
        open_both(prefill, decode, room, name=f"{room}", pages=[room], aux_slot=target)
    for room, source in enumerate(SLOTS, start=1):
        prefill.send(f"{room}", [room], aux_slot=source)
    for room in range(1, len(SLOTS) + 1):
        decode.until(f"{room}", "done")
    for room, (source, target) in enumerate(SLOTS.items(), start=1):
        assert (here["bootstrap_room"][target] == room).all()
        for name, rows in there.items():
            assert np.array_equal(here[name][target], rows[source]), (name, room)
    others = np.setdiff1d(np.arange(AUX_ROWS), list(SLOTS.values()))
    assert not any(rows[others].any() for rows in here.values())
    del there, here, rows  # views of memory that the sides let go of
