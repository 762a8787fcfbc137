"""Pods that have just become Ready start; they are not unknown."""

from dataclasses import replace
from datetime import timedelta

import pytest
from pdpool_operator.diagnose.evidence import STALE_S
from pdpool_operator.diagnose.model import Verdict
from pdpool_operator.diagnose.pools import diagnose, subjects_of
from pdpool_operator.diagnose.track import follow

from tests.unit.operator.plan.makers import T0, make_instance, make_observed, make_pool, make_sample


def verdict(*, ready_for_s: float, refused: bool, answered_before: bool = False) -> Verdict:
    pool = make_pool()
    instance = make_instance(pool)
    assert instance.pod is not None
    pod = replace(instance.pod, ready_since=T0 - timedelta(seconds=ready_for_s))
    tracks = {}
    if refused:
        before = follow(None, make_sample(pod_uid=pod.uid)) if answered_before else None
        tracks = {pod.uid: {0: follow(before, make_sample(pod_uid=pod.uid, connector_error="refused", running=None))}}
    observed = make_observed(pool, replace(instance, pod=pod))
    (diagnosis,) = diagnose(subjects_of(observed, tracks), (), stuck_after_s=30, now=T0)
    return diagnosis.verdict


@pytest.mark.parametrize("refused", [False, True], ids=["never sampled", "refused"])
def test_a_new_pod_starts(refused: bool) -> None:
    assert verdict(ready_for_s=1, refused=refused) is Verdict.STARTING
    assert verdict(ready_for_s=STALE_S, refused=refused) is Verdict.UNKNOWN


def test_a_pod_that_answered_before_is_unknown_at_once() -> None:
    assert verdict(ready_for_s=1, refused=True, answered_before=True) is Verdict.UNKNOWN
