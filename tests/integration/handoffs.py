"""What the tests of hand-offs between two processes share."""

import re

import numpy as np

from tests.integration.connector_peer import PAGES, Side
from tests.integration.real_failures import REASONS

TIMING = {"drain_s": 1.0, "retry_first_s": 0.05, "retry_max_s": 0.5, "query_s": 0.5, "verdict_s": 10.0, "acked_s": 0.5}
SOON = {**TIMING, "acked_s": 0.1}
"""Ends that were acknowledged are soon forgotten."""

HALF_REGISTERED = {"half_registered": True}
"""The option of a decode to which `fail_a_write` can be done."""


def fill(prefill: Side, seed: int) -> None:
    random = np.random.default_rng(seed)
    prefill.pages[:] = random.integers(1, 256, prefill.pages.shape, dtype=np.uint8)
    prefill.aux[:] = random.integers(1, 256, prefill.aux.shape, dtype=np.uint8)


def meet(prefill: Side, decode: Side, room: int, *, name: str = "r", pages=(8, 3), aux_slot: int = 5, **more) -> None:
    prefill.open(name, room)
    decode.open(name, room, prefill=prefill.bootstrap, pages=list(pages), aux_slot=aux_slot, **more)


def end_data_connections(side: Side, *among: Side) -> int:
    """End those connections of a side that are the data plane's, where all that it talks to is `among`; how many."""
    known = (address for one in among for address in (one.control, one.bootstrap, one.admin) if address)
    ended: int = side.call("cut_data_plane", but=[int(address.rpartition(":")[2]) for address in known])["ended"]
    return ended


def fail_a_write(prefill: Side, *decode: Side, room: int, name: str = "r") -> str:
    """A hand-off to all ranks of a decode whose writes prefill's engine begins and which fail; what the engine said.

    Mooncake of half registered ranks refuses the pages; NIXL's connections to them end (see `real_failures`).
    """
    before = len(prefill.stats()["failed_writes"])
    prefill.call("hold_writes")
    prefill.open(name, room)
    for side in decode:
        side.open(name, room, prefill=prefill.bootstrap, pages=[PAGES - 8, PAGES - 3], aux_slot=5)
    prefill.until(name, "ready")
    prefill.send(name, [1, 2])
    prefill.settle(lambda stats: stats["held_writes"] >= len(decode))
    if prefill.backend == "nixl":
        for side in decode:
            assert end_data_connections(side, prefill, *decode)
    prefill.call("release_writes")
    said = prefill.settle(lambda stats: len(stats["failed_writes"]) > before)["failed_writes"][-1]
    assert re.search(REASONS[prefill.backend], said), said
    return said
