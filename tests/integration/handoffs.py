"""What the tests of hand-offs between two processes share."""

import re

import numpy as np

from tests.integration.connector_peer import PAGES, Side, first_row
from tests.integration.real_failures import REASONS

TIMEOUTS = {
    "quiesce_s": 1.0,
    "retry_first_s": 0.05,
    "retry_max_s": 0.5,
    "query_s": 0.5,
    "result_s": 10.0,
    "acked_s": 0.5,
}

HALF_REGISTERED = {"half_registered": True}
"""The option of a decode to which `fail_a_write` can be done."""


def fill(prefill: Side, seed: int) -> None:
    random = np.random.default_rng(seed)
    prefill.pages[:] = random.integers(1, 256, prefill.pages.shape, dtype=np.uint8)
    for rows in prefill.aux:
        rows[:] = random.integers(1, 256, rows.shape, dtype=np.uint8)


def offer(decode: Side, prefill: Side | str, room: int, *, name: str = "r", pages=(8, 3), **more) -> None:
    """Open decode's half and offer its memory at once. `prefill`: the process, or the address of its registry."""
    where = prefill if isinstance(prefill, str) else prefill.bootstrap
    pages = list(pages)
    decode.open(name, room, prefill=where, pages=pages, **{"aux_slot": first_row(pages), **more})


def open_both(prefill: Side, decode: Side, room: int, *, name: str = "r", prompt: str = "", **more) -> None:
    """Open both halves of one hand-off; `more` is what decode offers."""
    prefill.open(name, room, prompt=prompt)
    offer(decode, prefill, room, name=name, prompt=prompt, **more)


def settle_empty(*sides: Side) -> None:
    """Wait until nothing is left of any hand-off; the connectors have had no fault."""
    for side in sides:
        stats = side.settle(lambda stats: stats["rows"] == stats["kept"] == stats["holds"] == 0)
        assert stats["faults"] == 0


def end_data_connections(side: Side, *among: Side) -> int:
    """End the data connections of a side that is connected to `among` only; how many there were."""
    known = (address for one in among for address in (one.control, one.bootstrap, one.admin) if address)
    ended: int = side.call("cut_data_plane", but=[int(address.rpartition(":")[2]) for address in known])["ended"]
    return ended


def hold_a_write(prefill: Side, decode: Side, room: int = 7, name: str = "r", **more) -> None:
    """A hand-off whose only write prefill has submitted; it begins when prefill gets `release_writes`."""
    prefill.call("hold_writes")
    open_both(prefill, decode, room, name=name, **more)
    prefill.send(name, [1, 2])
    prefill.settle(lambda stats: stats["held_writes"] == 1)


def fail_a_write(prefill: Side, *decode: Side, room: int, name: str = "r") -> str:
    """A hand-off to all ranks of a decode whose writes begin and fail; what the transfer backend said.

    Mooncake of half registered ranks refuses the pages; NIXL's connections to them end (see `real_failures`).
    """
    before = len(prefill.stats()["failed_writes"])
    prefill.call("hold_writes")
    prefill.open(name, room)
    for side in decode:
        offer(side, prefill, room, name=name, pages=[PAGES - 8, PAGES - 3])
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
