"""State items travel with the last pages, from pool to pool."""

from collections.abc import Iterator

import numpy as np
import pytest
from pdpool_connector import (
    Cause,
    ConnectorConfig,
    DecodeConnector,
    HostArena,
    KVMemory,
    Phase,
    PrefillConnector,
    StatePool,
)

PAGES, ITEM, ITEMS = 2 * 8 * 256, 32, 4


class Side:
    """Memory of eight pages and two state pools, without aux rows."""

    def __init__(self) -> None:
        self.arena = HostArena(PAGES + 2 * ITEM * ITEMS)
        starts = (PAGES, PAGES + ITEM * ITEMS)
        self.state = [self.arena.array(start, (ITEMS, ITEM), np.uint8) for start in starts]
        self.memory = KVMemory(
            kv=(self.arena.region(0, 256, 8), self.arena.region(8 * 256, 256, 8)),
            state=tuple(
                StatePool(name, (self.arena.region(start, ITEM, ITEMS),))
                for name, start in zip(("mamba", "swa"), starts, strict=True)
            ),
            page_tokens=16,
            layers=1,
            kv_heads=1,
            head_dim=4,
            dtype="float32",
            model="m",
        )


@pytest.fixture
def sides() -> list[Side]:
    made = [Side(), Side()]
    for pool, content in enumerate(made[0].state, start=1):
        content[:] = np.arange(ITEMS, dtype=np.uint8)[:, None] + 10 * pool
    return made


@pytest.fixture
def both(sides: list[Side]) -> Iterator[tuple[PrefillConnector, DecodeConnector]]:
    config = ConnectorConfig("127.0.0.1")
    with PrefillConnector(config, sides[0].memory) as prefill, DecodeConnector(config, sides[1].memory) as decode:
        yield prefill, decode


def test_items_of_each_pool_arrive(both, sides) -> None:
    prefill, decode = both
    source, target = prefill.open(1, "r"), decode.open(prefill.bootstrap_address, 1, "r")
    target.offer([3], state={"mamba": [2, 0], "swa": [1]})
    source.send([1], start=0)
    source.send([], start=1, last=True, state={"swa": np.array([0]), "mamba": [3, 1]})
    assert target.wait(30).phase is Phase.DONE, target.status
    mamba, swa = (pool[:, 0].tolist() for pool in sides[1].state)
    assert (mamba, swa) == ([11, 0, 13, 0], [0, 20, 0, 0])


def test_other_counts_of_items_fail_both_sides(both) -> None:
    prefill, decode = both
    source, target = prefill.open(1, "r"), decode.open(prefill.bootstrap_address, 1, "r")
    target.offer([3], state={"mamba": [2, 0]})
    source.send([1], start=0, last=True, state={"mamba": [1]})
    assert source.wait_released(30).cause is Cause.INVALID
    assert target.wait_released(30).cause is Cause.INVALID


def test_items_of_a_live_offer_are_refused(both) -> None:
    prefill, decode = both
    decode.open(prefill.bootstrap_address, 1, "r").offer([3], state={"swa": [2]})
    other = decode.open(prefill.bootstrap_address, 2, "s")
    with pytest.raises(ValueError, match=r"state\['swa'\] holds 2, which room 1"):
        other.offer([4], state={"swa": [2]})
    other.offer([4], state={"mamba": [2]})
