"""How the connector's benchmark judges what it counted."""

from collections import Counter

import pytest
from pdpool_connector.protocol.frames import Accepted, AttemptId

from proof.bench.connector import figures, frames, rooms
from proof.bench.connector.scheduler import Times


def counted(handoffs: int = 200) -> Counter[frames.Content]:
    """The frames of a run without repetitions."""
    return Counter({(name, room): 1 for name in frames.NEEDED for room in range(handoffs)})


def test_frames_are_judged_by_the_shown_value() -> None:
    each, again, safety = frames.judged("nixl", counted(), 200)
    assert (each.value, each.target, each.met) == (4, "<= 4", True)
    assert (again.value, again.met) == (0, None)
    assert (safety.value, safety.met) == (0, True)


def test_one_frame_too_many_misses_the_target() -> None:
    counts = counted()
    counts["Goodbye", 7] += 1
    each, *_ = frames.judged("nixl", counts, 200)
    assert each.value == pytest.approx(4.005)
    assert each.met is False


def test_repetitions_and_their_answers_have_a_row() -> None:
    counts = counted()
    counts["Open", 7] += 10
    counts["Accepted", 7] += 10
    each, again, _ = frames.judged("nixl", counts, 200)
    assert each.value == 4
    assert again.value == pytest.approx(0.1)
    assert again.note == "Open 0.05, Accepted 0.05"


@pytest.mark.parametrize("name", frames.ABORT_FRAMES)
def test_frame_for_aborts_misses_its_target(name: str) -> None:
    counts = counted()
    counts[name, 7] += 1
    assert [row.met for row in frames.judged("nixl", counts, 200)] == [False, None, False]


def test_same_frame_of_another_attempt_is_no_repetition() -> None:
    ours, theirs = (
        Accepted(version=1, sender="a" * 32, attempt=AttemptId("b" * 32, number), room=1) for number in (1, 2)
    )
    assert frames.content(ours) == frames.content(ours)
    assert frames.content(ours) != frames.content(theirs)


def test_latency_begins_with_the_later_part() -> None:
    prefill = Times(sent={1: 10.0, 2: 10.0})
    decode = Times(offered={1: 9.0, 2: 11.0}, done={1: 12.0, 2: 12.0})
    assert figures.latencies((prefill, decode)) == [2.0, 1.0]


def test_rooms_are_judged_by_the_worst_point() -> None:
    flat = {1: [100.0, 200.0], 100: [110.0, 220.0], 1000: [100.0, 200.0], 10_000: [105.0, 210.0]}
    row = rooms.judged("nixl", flat)
    assert (row.value, row.met) == (pytest.approx(1.1), True)
    row = rooms.judged("nixl", flat | {1000: [130.0, 260.0]})
    assert (row.value, row.met) == (pytest.approx(1.3), False)
    assert "(1000)" in row.what
