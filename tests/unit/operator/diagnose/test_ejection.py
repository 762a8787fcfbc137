"""Ejection of stuck instances: every sequence of verdicts, and how the time out grows."""

import itertools
from collections.abc import Iterable
from datetime import datetime, timedelta

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.diagnose.ejection import LONGEST_RETURN, RETURN_AFTER, Ejection, eject, with_ejections
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict
from pdpool_operator.diagnose.trials import FORGIVEN_AFTER

from ..plan.makers import T0, make_pod

LOOK = timedelta(seconds=5)
NEEDED = RETURN_AFTER // LOOK + 1
"""Looks in a row that must show work before a first return."""


def diagnosis(verdict: Verdict, pod: str = "chat-decode-0-0") -> Diagnosis:
    return Diagnosis(Subject("chat", Role.DECODE, 0, make_pod(pod), False, ()), verdict, "why")


def play(verdicts: Iterable[Verdict], start: datetime = T0, state: dict[str, Ejection] | None = None) -> list[bool]:
    """Return after each look whether the instance is out."""
    state, out = state or {}, []
    for look, verdict in enumerate(verdicts):
        seen = [diagnosis(verdict)]
        state = eject(seen, state, start + look * LOOK)
        out.append(with_ejections(seen, state)[0].out)
    return out


def test_every_sequence_leaves_at_once_and_returns_late():
    kinds = (Verdict.STUCK, Verdict.IDLE, Verdict.UNKNOWN)
    for verdicts in itertools.product(kinds, repeat=7):
        out = play(verdicts)
        for look, (verdict, is_out) in enumerate(zip(verdicts, out, strict=True)):
            was_stuck = Verdict.STUCK in verdicts[: look + 1]
            worked = [one is Verdict.IDLE for one in verdicts[max(0, look + 1 - NEEDED) : look + 1]]
            assert is_out or verdict is not Verdict.STUCK
            assert was_stuck or not is_out
            if look and out[look - 1] and not is_out:
                assert worked == [True] * NEEDED, verdicts


def test_returns_once_it_has_worked_for_long_enough():
    assert play([Verdict.STUCK, *[Verdict.IDLE] * (NEEDED + 1)]) == [True] * NEEDED + [False] * 2


@pytest.mark.parametrize("verdict", Verdict)
def test_only_verdicts_of_work_bring_it_back(verdict: Verdict):
    back = not play([Verdict.STUCK, *[verdict] * 20])[-1]
    works = {Verdict.IDLE, Verdict.FLOWING, Verdict.SATURATED, Verdict.LEAKED, Verdict.BLOCKED}
    assert back is (verdict in works)


def test_time_out_doubles_up_to_a_limit_and_is_forgiven():
    state: dict[str, Ejection] = {}
    now, lasted = T0, []
    for _ in range(8):
        state = eject([diagnosis(Verdict.STUCK)], state, now)
        began = now = now + LOOK
        while state["uid-of-chat-decode-0-0"].out:
            state = eject([diagnosis(Verdict.FLOWING)], state, now)
            now += LOOK
        lasted.append(now - LOOK - began)
    assert lasted == [min(RETURN_AFTER * 2**time, LONGEST_RETURN) for time in range(8)]
    now += FORGIVEN_AFTER
    assert eject([diagnosis(Verdict.IDLE)], state, now) == {}
    assert eject([diagnosis(Verdict.STUCK)], state, now) == {"uid-of-chat-decode-0-0": Ejection()}


def test_new_pod_serves_at_once():
    state = eject([diagnosis(Verdict.STUCK, "old")], {}, T0)
    seen = [diagnosis(Verdict.IDLE, "new")]
    state = eject(seen, state, T0 + LOOK)
    assert state == {}
    assert not with_ejections(seen, state)[0].out


def test_instance_without_pod_has_no_ejection():
    gone = Diagnosis(Subject("chat", Role.DECODE, 0, None, False, ()), Verdict.STARTING, "why")
    assert eject([gone], {}, T0) == {}
    assert with_ejections([gone], {}) == (gone,)
