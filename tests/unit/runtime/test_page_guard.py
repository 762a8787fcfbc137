"""No page and no state item is offered in two hand-offs at a time: what would be written twice is refused by name."""

import numpy as np
import pytest
from pdpool_connector.protocol.events import OpenAttempt
from pdpool_connector.runtime.page_guard import PageGuard


@pytest.fixture
def offered() -> PageGuard:
    return PageGuard()


def params(handle: int, *pages: int, state: tuple[int, ...] = ()) -> OpenAttempt:
    packed, items = (np.array(ids, "<i4").tobytes() for ids in (pages, state))
    return OpenAttempt(handle, "p:1", handle, 0, f"r{handle}", packed, 0, 0, 30.0, state=items)


def test_what_another_hand_off_has_is_refused_with_its_name_and_nothing_is_taken(offered: PageGuard) -> None:
    offered.take(params(1, 3, 4, state=(2,)))
    with pytest.raises(ValueError, match="pages holds 4, which is offered to room 1, request 'r1'"):
        offered.take(params(2, 5, 4, 6))
    with pytest.raises(ValueError, match="state holds 2, which is offered to room 1, request 'r1'"):
        offered.take(params(3, 7, state=(2,)))
    offered.take(params(4, 5, 6, 7, state=(0, 1, 3)))


def test_what_was_given_back_can_be_offered_again_and_only_that(offered: PageGuard) -> None:
    first = params(1, 3, 4)
    offered.take(first)
    offered.take(params(2, 5))
    offered.give_back(first)
    offered.give_back(first)
    offered.take(params(3, 4, 3))
    offered.give_back(first)
    with pytest.raises(ValueError, match="pages holds 3, which is offered to room 3"):
        offered.take(params(4, 3))
    with pytest.raises(ValueError, match="pages holds 5, which is offered to room 2"):
        offered.take(params(5, 5))
