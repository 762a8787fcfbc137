"""No page, state item or aux row is offered in two hand-offs at a time."""

import numpy as np
import pytest
from pdpool_connector.protocol.events import OfferPages
from pdpool_connector.runtime.page_guard import PageGuard


@pytest.fixture
def guard() -> PageGuard:
    return PageGuard(["mamba", "window"])


def packed(ids) -> bytes:
    return np.array(ids, "<i4").tobytes()


def take(guard: PageGuard, handle: int, *pages: int, mamba=(), window=(), aux_slot=None) -> None:
    offer = OfferPages(handle, packed(pages), 0, aux_slot, (packed(mamba), packed(window)))
    guard.take(offer, handle, f"r{handle}")


def test_live_memory_is_refused_by_name_and_whole(guard: PageGuard) -> None:
    take(guard, 1, 3, 4, mamba=[2], aux_slot=1)
    with pytest.raises(ValueError, match="pages holds 4, which room 1, request 'r1' was offered: wait until"):
        take(guard, 2, 5, 4, 6)
    with pytest.raises(ValueError, match=r"state\['mamba'\] holds 2, which room 1"):
        take(guard, 3, 7, mamba=[2])
    with pytest.raises(ValueError, match="aux_slot holds 1, which room 1"):
        take(guard, 3, 7, aux_slot=1)
    take(guard, 4, 5, 6, 7, mamba=[0, 1, 3], window=[2], aux_slot=0)


def test_memory_given_back_can_be_offered_again(guard: PageGuard) -> None:
    take(guard, 1, 3, 4, aux_slot=2)
    take(guard, 2, 5)
    guard.give_back(1)
    guard.give_back(1)
    take(guard, 3, 4, 3, aux_slot=2)
    guard.give_back(1)
    with pytest.raises(ValueError, match="pages holds 3, which room 3"):
        take(guard, 4, 3)
    with pytest.raises(ValueError, match="pages holds 5, which room 2"):
        take(guard, 5, 5)
