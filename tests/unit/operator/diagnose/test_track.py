import itertools
from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from pdpool_operator.diagnose.track import RankTrack, follow
from pdpool_operator.observe.samples import RankSample

from tests.unit.operator.plan.makers import T0, follow_all, make_sample, seconds

QUEUE = "prefill_bootstrap"


def look(at: float, reqs: int, moved: int | None, incarnation: str = "a") -> RankSample:
    return make_sample(T0 + seconds(at), queues={QUEUE: (reqs, None, moved)}, incarnation=incarnation)


def missed(at: float) -> RankSample:
    return make_sample(T0 + seconds(at), connector_error="timeout")


def still_since(samples: Sequence[RankSample]) -> float:
    track = follow_all(samples)
    assert track is not None
    return (track.queues[QUEUE].still_since - T0).total_seconds()


def test_a_queue_is_still_from_the_first_look_that_shows_it_so() -> None:
    assert still_since([look(0, 3, 7)]) == 0
    assert still_since([look(0, 3, 7), look(5, 4, 7), look(10, 3, 7)]) == 0


def test_movement_restarts_the_clock_whatever_the_level() -> None:
    assert still_since([look(0, 3, 7), look(5, 3, 8)]) == 5
    assert still_since([look(0, 3, 7), look(5, 9, 8), look(10, 9, 8)]) == 5


def test_an_empty_queue_is_never_still() -> None:
    assert still_since([look(0, 3, 7), look(5, 0, 7), look(10, 3, 7)]) == 5
    assert still_since([look(0, 0, 7), look(5, 0, 7)]) == 5


def test_a_new_incarnation_begins_anew_even_with_the_same_counter() -> None:
    assert still_since([look(0, 3, 7, "a"), look(5, 3, 7, "b")]) == 5


def test_looks_without_an_answer_neither_stop_nor_restart_the_clock() -> None:
    assert still_since([look(0, 3, 7), missed(5), look(10, 3, 7)]) == 0
    assert still_since([look(0, 3, 7), missed(5), look(10, 3, 8)]) == 10
    track = follow_all([look(0, 3, 7), missed(5)])
    assert track is not None
    assert track.latest.connector is None
    assert track.queues[QUEUE].still_since == T0


def test_another_pod_begins_anew() -> None:
    other = make_sample(T0 + seconds(5), pod_uid="other", queues={QUEUE: (3, None, 7)})
    assert still_since([look(0, 3, 7), other]) == 5


def test_a_rank_that_never_answered_has_no_incarnation() -> None:
    track = follow(None, missed(0))
    assert track == RankTrack(missed(0))


@hypothesis_settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from("ab"), st.booleans()), max_size=30))
def test_the_track_agrees_with_the_whole_history(history: list[tuple[int, int, str, bool]]) -> None:
    """Oracle: the last answered sample at which the queue was empty or differed from the sample before."""
    samples, answered, total = [], [], 0
    for number, (reqs, moved, incarnation, lost) in enumerate(history):
        total += moved
        samples.append(missed(number) if lost else look(number, reqs, total, incarnation))
        if not lost:
            answered.append((number, reqs, total, incarnation))
    track = follow_all(samples)
    if not answered:
        assert track is None or track.queues == {}
        return
    expected = answered[0][0]
    for before, now in itertools.pairwise(answered):
        if now[1] == 0 or now[2] != before[2] or now[3] != before[3]:
            expected = now[0]
    assert still_since(samples) == expected
