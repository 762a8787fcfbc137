"""The operator's time, while the clock of its node is set."""

from datetime import UTC, datetime, timedelta

import pytest
from pdpool_operator.runtime.steady_clock import SteadyClock

START = datetime(2026, 1, 2, tzinfo=UTC)


class Node:
    """Its clock and its uptime, in seconds."""

    def __init__(self) -> None:
        self.wall, self.uptime = START.timestamp(), 500.0
        self.clock = SteadyClock(lambda: self.wall, lambda: self.uptime)

    def passes(self, seconds: float) -> datetime:
        self.wall, self.uptime = self.wall + seconds, self.uptime + seconds
        return self.clock()


@pytest.fixture
def node() -> Node:
    return Node()


def test_clock_that_is_never_set_is_followed(node: Node) -> None:
    assert [node.passes(3) for _ in range(3)] == [START + timedelta(seconds=s) for s in (3, 6, 9)]


@pytest.mark.parametrize("jump", [60.0, -60.0, 3599.0, -3599.0])
def test_jump_is_no_time_that_passes(node: Node, jump: float) -> None:
    before = node.passes(3)
    node.wall += jump
    assert node.clock() == before
    assert timedelta(seconds=2.69) < node.passes(3) - before < timedelta(seconds=3.31)


@pytest.mark.parametrize("jump", [60.0, -60.0])
def test_jump_is_made_up_for_slowly(node: Node, jump: float) -> None:
    node.wall += jump
    for _ in range(190):
        node.passes(3)
    assert node.clock().timestamp() != pytest.approx(node.wall, abs=1)
    for _ in range(20):
        node.passes(3)
    assert node.clock().timestamp() == pytest.approx(node.wall, abs=1e-3)


def test_wrong_start_is_corrected_at_once(node: Node) -> None:
    node.wall += 4000
    assert node.clock() == START + timedelta(seconds=4000)
