"""An instance is not blamed for requests that wait for a process of the other side that is gone."""

from dataclasses import replace

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.diagnose.departures import REMEMBERED, Departures, follow_departures
from pdpool_operator.diagnose.model import Subject, Verdict
from pdpool_operator.diagnose.pools import diagnose
from pdpool_operator.diagnose.track import follow

from tests.unit.operator.plan.makers import T0, make_pod, make_sample, seconds

from .test_simulated_faults import TRANSFER, subject

P0 = "chat-prefill-0"


def process(incarnation: str = "a", *, pod: str = "chat-prefill-0-0", answers: bool = True) -> Subject:
    error = "" if answers else "refused"
    sample = make_sample(pod_uid=f"uid-of-{pod}", incarnation=incarnation, connector_error=error)
    return Subject("chat", Role.PREFILL, 0, make_pod(pod), leaving=False, tracks=(follow(None, sample),))


def being_removed(subject: Subject) -> Subject:
    assert subject.pod is not None
    return replace(subject, pod=replace(subject.pod, terminating=True))


WITHOUT_POD = Subject("chat", Role.PREFILL, 0, None, leaving=False, tracks=())
UNSAMPLED = Subject("chat", Role.PREFILL, 0, make_pod("another"), leaving=False, tracks=())


@pytest.mark.parametrize(
    ("after", "departed"),
    [
        pytest.param((process(),), (), id="same process"),
        pytest.param((replace(process(), tracks=()),), (), id="not sampled again"),
        pytest.param((process(answers=False),), (), id="does not answer"),
        pytest.param((being_removed(process()),), (), id="being removed, and still answers"),
        pytest.param((being_removed(process(answers=False)),), (P0,), id="being removed, and its process has ended"),
        pytest.param((process("b"),), (P0,), id="restarted"),
        pytest.param((process("a", pod="another"),), (P0,), id="replaced"),
        pytest.param((UNSAMPLED,), (P0,), id="replaced, and not sampled yet"),
        pytest.param((WITHOUT_POD,), (P0,), id="pod is gone"),
        pytest.param((), (P0,), id="instance is gone"),
    ],
)
def test_process_that_is_gone_has_departed(after: tuple[Subject, ...], departed: tuple[str, ...]) -> None:
    state = follow_departures(Departures(), [process()], T0)
    state = follow_departures(state, after, T0 + seconds(1))
    state = follow_departures(state, after, T0 + seconds(2))
    assert state.within(seconds(1), T0 + seconds(2)) == departed
    assert state.within(seconds(1), T0 + seconds(3)) == ()


def test_pod_that_never_answered_does_not_depart() -> None:
    state = follow_departures(Departures(), [process(answers=False)], T0)
    assert follow_departures(state, [], T0 + seconds(1)).at == {}


def test_old_departure_is_forgotten() -> None:
    state = follow_departures(follow_departures(Departures(), [process()], T0), [], T0)
    assert follow_departures(state, [], T0 + REMEMBERED).at == {P0: T0}
    assert follow_departures(state, [], T0 + REMEMBERED + seconds(1)).at == {}


@pytest.mark.parametrize(
    ("since_s", "verdict"), [(0, Verdict.BLOCKED), (60, Verdict.BLOCKED), (61, Verdict.STUCK)], ids=str
)
def test_decode_is_blocked_after_prefill_was_replaced(since_s: int, verdict: Verdict) -> None:
    own = subject(Role.DECODE, at=90, queues={TRANSFER: (1, 90.0, 5)})
    gone = Departures(at={P0: T0 + seconds(90 - since_s)})
    sibling = subject(Role.PREFILL, 1, at=90)
    (found,) = diagnose(
        [own], [WITHOUT_POD, sibling], stuck_after_s=30, now=T0 + seconds(90), departures=[Departures(), gone]
    )
    assert found.verdict is verdict
    assert found.blames == ((P0,) if verdict is Verdict.BLOCKED else ())
