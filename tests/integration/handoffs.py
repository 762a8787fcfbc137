"""What the tests of hand-offs between two processes share."""

import numpy as np

from tests.integration.connector_peer import Side

TIMING = {"drain_s": 1.0, "retry_first_s": 0.05, "retry_max_s": 0.5, "query_s": 0.5, "verdict_s": 10.0, "acked_s": 0.5}


def fill(prefill: Side, seed: int) -> None:
    random = np.random.default_rng(seed)
    prefill.pages[:] = random.integers(1, 256, prefill.pages.shape, dtype=np.uint8)
    prefill.aux[:] = random.integers(1, 256, prefill.aux.shape, dtype=np.uint8)


def meet(prefill: Side, decode: Side, room: int, *, name: str = "r", pages=(8, 3), aux_slot: int = 5, **more) -> None:
    prefill.open(name, room)
    decode.open(name, room, prefill=prefill.bootstrap, pages=list(pages), aux_slot=aux_slot, **more)
