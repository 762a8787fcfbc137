"""A connector whose own loop hangs. Its admin endpoint answers from another thread, with the last numbers it has."""

from dataclasses import replace

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict
from pdpool_operator.diagnose.pools import diagnose
from pdpool_operator.observe.samples import QueueSample, RankSample

from tests.unit.operator.plan.makers import T0, follow_all, make_pod, make_sample, seconds

BOOTSTRAP, TRANSFER = "prefill_bootstrap", "decode_transfer"
HUNG_AT = 9


def prefill_look(at: float, lag_s: float) -> RankSample:
    """Its engine takes requests in, and the connector does not. Numbers of the queue stay as they were at 9 s."""
    sample = make_sample(T0 + seconds(at), queues={BOOTSTRAP: (1, 0.2, 5)})
    assert sample.connector is not None
    shown = {BOOTSTRAP: QueueSample(1 + int(at), max(at - HUNG_AT, 0.0), 5)}
    return replace(sample, connector=replace(sample.connector, loop_lag_s=lag_s, engine_queues=shown))


def prefill(*lags: float) -> Subject:
    track = follow_all(prefill_look(3 * number, lag) for number, lag in enumerate(lags))
    assert track is not None
    return Subject("chat", Role.PREFILL, 0, make_pod("chat-prefill-0-0"), leaving=False, tracks=(track,))


def decode(at: float) -> Subject:
    uid = "uid-of-chat-decode-0-0"
    looks = [
        make_sample(T0 + seconds(m), pod_uid=uid, queues={TRANSFER: (2, m, 5) if m else (0, None, 5)})
        for m in range(0, int(at) + 1, 3)
    ]
    track = follow_all(looks)
    assert track is not None
    return Subject("chat", Role.DECODE, 0, make_pod("chat-decode-0-0"), leaving=False, tracks=(track,))


def judge(own: Subject, other: Subject, at: float) -> Diagnosis:
    (diagnosis,) = diagnose([own], [other], stuck_after_s=30, now=T0 + seconds(at))
    return diagnosis


def hung_until(at: int) -> tuple[float, ...]:
    return tuple(max(0.0, moment - HUNG_AT) for moment in range(0, at + 1, 3))


@pytest.mark.parametrize("at", [42, 90, 300])
def test_engine_whose_connector_hangs_is_stuck(at: int) -> None:
    found = judge(prefill(*hung_until(at)), decode(at), at)
    assert found.verdict is Verdict.STUCK
    assert "connector loop does not run while its admin endpoint answers" in found.message


def test_engine_that_waits_for_a_hung_connector_is_blocked() -> None:
    found = judge(decode(90), prefill(*hung_until(90)), 90)
    assert (found.verdict, found.blames) == (Verdict.BLOCKED, ("chat-prefill-0",))


def test_process_that_stood_still_as_a_whole_is_not_stuck_afterwards() -> None:
    """The longest turn of the last seconds is shown for a while, although the loop runs again."""
    assert judge(prefill(0.0, 0.0, 60.0, 60.0), decode(0), 9).verdict is Verdict.FLOWING


def test_hung_connector_is_well_again_when_its_loop_runs() -> None:
    assert judge(prefill(*hung_until(90), 84.0, 0.0), decode(96), 96).verdict is not Verdict.STUCK


def test_request_that_a_hung_connector_has_not_taken_in_is_no_leak() -> None:
    (track,) = prefill(*hung_until(36)).tracks
    assert track.leaked == {}
