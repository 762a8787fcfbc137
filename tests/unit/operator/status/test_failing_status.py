"""What the status of a pool says about instances that fail requests."""

import pytest
from pdpool_operator.diagnose.model import Verdict

from tests.unit.operator.plan.makers import make_instance, make_pool

from .test_pool_status import condition, diagnosis, outcome, status_of

MESSAGE = "prefill chat-prefill-1 is out of the rotation: 5 of its last 5 requests failed"


def test_failing_instance_is_named_while_its_pool_stays_available() -> None:
    pool = make_pool(replicas=2)
    failing = diagnosis(1, Verdict.FAILING, MESSAGE)
    status = status_of(pool, make_instance(pool), make_instance(pool, 1), diagnoses=[diagnosis(0), failing])
    assert outcome(status, "Available") == ("True", "Serving")
    assert outcome(status) == ("False", "EnginesNotReady")
    assert "chat-prefill-1 (fails requests)" in condition(status, "Ready").message
    assert outcome(status, "QueuesHealthy") == ("False", "RequestsFailing")
    assert condition(status, "QueuesHealthy").message == MESSAGE
    assert status.queues == "Failing (instance 1)"


@pytest.mark.parametrize(
    ("verdict", "reason"), [(Verdict.FAILING, "RequestsFailing"), (Verdict.NOTHING_FINISHES, "NothingFinishes")]
)
def test_pool_whose_only_instance_fails_is_not_available(verdict: Verdict, reason: str) -> None:
    pool = make_pool()
    status = status_of(pool, make_instance(pool), diagnoses=[diagnosis(0, verdict, "words")])
    assert outcome(status, "Available") == ("False", "EnginesNotReady")
    assert outcome(status, "QueuesHealthy") == ("False", reason)


def test_stuck_instance_hides_a_failing_one_in_the_column() -> None:
    pool = make_pool(replicas=2)
    both = [diagnosis(0, Verdict.FAILING), diagnosis(1, Verdict.STUCK)]
    assert status_of(pool, make_instance(pool), make_instance(pool, 1), diagnoses=both).queues == "Stuck (instance 1)"
