"""How the connector's benchmark judges what it counted."""

from collections import Counter

import pytest
from pdpool_connector.protocol.frames import Accepted, AttemptId

from proof.bench.connector import frames, rooms


def counted(direction: str, handoffs: int = 200) -> Counter[frames.Said]:
    """What a run without repeats says."""
    return Counter({(name, room): 1 for name in frames.NEEDED[direction] for room in range(handoffs)})


@pytest.mark.parametrize(("direction", "needed"), [("write", 4), ("read", 5)])
def test_frames_meet_the_target_by_the_value_that_is_shown(direction: str, needed: int) -> None:
    each, again, safety = frames.judged("nixl", direction, counted(direction), 200)
    assert (each.value, each.target, each.met) == (needed, f"<= {needed}", True)
    assert (again.value, again.met) == (0, None)
    assert (safety.value, safety.met) == (0, True)


def test_one_frame_too_many_in_all_hand_offs_misses_the_target() -> None:
    counts = counted("write")
    counts["Sending", 7] += 1
    each, *_ = frames.judged("nixl", "write", counts, 200)
    assert each.value == pytest.approx(4.005)
    assert each.met is False


def test_what_is_said_again_has_a_row_of_its_own_and_its_reason() -> None:
    counts = counted("write")
    counts["Accepted", 7] += 10
    each, again, _ = frames.judged("nixl", "write", counts, 200)
    assert each.value == 4
    assert again.value == pytest.approx(0.05)
    assert "Accepted 0.05; Accepted answers" in again.note


@pytest.mark.parametrize("name", frames.ABORT_FRAMES)
def test_a_frame_for_aborts_misses_its_target(name: str) -> None:
    counts = counted("write")
    counts[name, 7] += 1
    assert [row.met for row in frames.judged("nixl", "write", counts, 200)] == [False, None, False]


def test_the_same_frame_of_another_attempt_is_not_said_again() -> None:
    ours, theirs = (
        Accepted(version=4, sender="a" * 32, attempt=AttemptId("b" * 32, number), room=1, sibling=0)
        for number in (1, 2)
    )
    assert frames.said(ours) == frames.said(ours)
    assert frames.said(ours) != frames.said(theirs)


def test_rooms_are_judged_by_the_worst_point_of_the_first() -> None:
    flat = {1: [100.0, 200.0], 100: [110.0, 220.0], 1000: [100.0, 200.0], 10_000: [105.0, 210.0]}
    row = rooms.judged("nixl", flat)
    assert (row.value, row.met) == (pytest.approx(1.1), True)
    row = rooms.judged("nixl", flat | {1000: [130.0, 260.0]})
    assert (row.value, row.met) == (pytest.approx(1.3), False)
    assert "(1000)" in row.what
