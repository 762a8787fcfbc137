"""Requests that an engine keeps although their hand-off has ended."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict
from pdpool_operator.diagnose.orphans import LEAKED_AFTER
from pdpool_operator.diagnose.pools import diagnose
from pdpool_operator.diagnose.track import RankTrack, follow
from pdpool_operator.observe.samples import QueueSample, RankSample

from tests.unit.operator.plan.makers import T0, follow_all, make_pod, make_sample, seconds

QUEUE = "prefill_inflight"
Shown = tuple[int, float | None, int]


def look(
    at: float, shown: Shown | None, handoffs: Shown, *, beat_age_s: float = 0.05, unsettled: int = 0
) -> RankSample:
    """A sample with one queue: as the engine shows it, and as the connector counts its hand-offs in it."""
    sample = make_sample(T0 + seconds(at), queues={QUEUE: handoffs}, beat_age_s=beat_age_s)
    assert sample.connector is not None
    engine_queues = {} if shown is None else {QUEUE: QueueSample(*shown)}
    return replace(sample, connector=replace(sample.connector, engine_queues=engine_queues, unsettled=unsettled))


def leaky(until: float, *, leaked: int = 1, busy: int = 0, **changes: float) -> list[RankSample]:
    """Samples of a queue in which requests leak at 0 s, beside `busy` others that come and go."""
    return [
        look(at, (leaked + busy, at, at), (busy, 0.5 if busy else None, at), **changes)
        for at in range(0, int(until) + 1, 3)
    ]


def judged(samples: list[RankSample], at: float) -> Diagnosis:
    track = follow_all(samples)
    assert track is not None
    own = Subject("chat", Role.PREFILL, 0, make_pod("chat-prefill-0-0"), leaving=False, tracks=(track,))
    (diagnosis,) = diagnose([own], (), stuck_after_s=30, now=T0 + seconds(at))
    return diagnosis


def leaks_of(samples: list[RankSample]) -> dict[str, int]:
    track = follow_all(samples)
    assert isinstance(track, RankTrack)
    return dict(track.leaked)


@pytest.mark.parametrize("busy", [0, 7])
def test_leak_is_found_with_traffic_and_without(busy: int) -> None:
    assert judged(leaky(18, busy=busy), 18).verdict.well
    found = judged(leaky(21, busy=busy), 21)
    assert found.verdict is Verdict.LEAKED
    assert found.message.endswith("1 request stays in prefill_inflight although no hand-off of it is under way")
    assert judged(leaky(300, busy=busy), 300).verdict is Verdict.LEAKED


def with_equal_counts(every: int, until: float = 300) -> list[RankSample]:
    """A leak at 0 s. The connector's count is older than the queue, so each `every`th sample shows as many in both."""
    return [
        look(at, (1, at, at), (1, 0.1, at)) if number % every == 1 else look(at, (1, at, at), (0, None, at))
        for number, at in enumerate(range(0, int(until) + 1, 3))
    ]


@pytest.mark.parametrize("every", [3, 4, 6])
def test_leak_is_found_in_traffic_whose_counts_are_not_of_one_moment(every: int) -> None:
    assert leaks_of(with_equal_counts(every, until=30)) == {QUEUE: 1}
    assert leaks_of(with_equal_counts(every)) == {QUEUE: 1}


def with_surplus(surplus: tuple[int, ...]) -> list[RankSample]:
    """A queue whose oldest request no hand-off explains. The engine shows so many more than the connector, by turns."""
    turns = zip(range(0, 301, 3), itertools.cycle(surplus), strict=False)
    return [look(at, (4 + more, at, at), (4, 0.1, at)) for at, more in turns]


@pytest.mark.parametrize("surplus", [(1, 0, 3, 0), (2, -1, 1, 2), (2, 0, 1)])
def test_leak_is_found_by_the_mean_of_counts_that_are_not_of_one_moment(surplus: tuple[int, ...]) -> None:
    assert leaks_of(with_surplus(surplus)) == {QUEUE: 1}


@pytest.mark.parametrize("surplus", [(0,), (-1,), (1, -1), (1, 0, 0)])
def test_request_of_which_the_connector_has_a_handoff_has_not_leaked(surplus: tuple[int, ...]) -> None:
    assert leaks_of(with_surplus(surplus)) == {}


def test_message_says_how_many() -> None:
    assert "3 requests stay in prefill_inflight" in judged(leaky(60, leaked=3, busy=2), 60).message


def test_stuck_request_beside_a_leaked_one_is_found() -> None:
    samples = leaky(60) + [look(at, (2, at, 60), (1, at - 60.0, 60)) for at in range(63, 103, 3)]
    assert judged(samples, 102).verdict is Verdict.STUCK


def test_queue_that_only_waits_long_has_no_leak() -> None:
    assert leaks_of([look(at, (4, at, 0), (4, at, 0)) for at in range(0, 300, 3)]) == {}


def test_engine_that_notices_late_has_no_leak() -> None:
    """At each look, another hand-off has ended that the engine has not noticed yet."""
    assert leaks_of([look(at, (3, 40.0, at), (2, 30.0, at)) for at in range(0, 300, 3)]) == {}


def test_requests_that_gain_a_newer_head_start_over() -> None:
    half = LEAKED_AFTER.total_seconds() - 3
    samples = leaky(half) + [look(half + at, (1, at, 5), (0, None, 5)) for at in range(3, 15, 3)]
    assert leaks_of(samples) == {}


def test_engine_whose_loop_hangs_has_no_leak() -> None:
    assert leaks_of(leaky(300, beat_age_s=6.0)) == {}


def test_unsettled_handoff_explains_a_request() -> None:
    assert leaks_of([look(at, (1, at, 0), (0, None, 0), unsettled=1) for at in range(0, 300, 3)]) == {}


def test_engine_that_does_not_show_a_queue_has_no_leak() -> None:
    assert leaks_of([look(at, None, (0, None, 0)) for at in range(0, 300, 3)]) == {}


def test_freed_request_is_forgotten() -> None:
    assert leaks_of([*leaky(60), look(63, (0, None, 61), (0, None, 61))]) == {}


def of_two_ranks(other: Callable[[float], RankSample]) -> Mapping[str, int]:
    """What has leaked at the first rank, for which all hand-offs of an instance of two ranks have ended."""
    track = None
    for mine in leaky(60):
        second = replace(other((mine.at - T0).total_seconds()), rank=1)
        track = follow(track, mine, [mine, second])
    assert track is not None
    return track.leaked


def test_request_that_waits_for_another_rank_has_not_leaked() -> None:
    assert of_two_ranks(lambda at: look(at, (0, None, at), (0, None, at))) == {QUEUE: 1}
    assert of_two_ranks(lambda at: look(at, (1, at, 0), (1, at, 0))) == {}
    assert of_two_ranks(lambda at: make_sample(T0 + seconds(at), connector_error="timeout")) == {}
