"""When an object is reconciled again."""

from pdpool_operator.api.reasons import Reason
from pdpool_operator.controller.again import UNSETTLED_AGAIN_S, result
from pdpool_operator.controller.apply import ApplyResult
from pdpool_operator.plan.model import Fault, Plan
from pdpool_operator.plan.objects import TAKEN_POLL_S, blocked
from pdpool_operator.runtime.manager import Result

from tests.unit.operator.plan.makers import make_instance, make_pool


def test_a_name_that_is_taken_is_looked_at_soon_for_nobody_announces_when_it_is_free() -> None:
    pool = make_pool()
    taken = make_instance(pool, controller_uid="other", controller="Deployment/x")
    plan = blocked(pool, [("StatefulSet", taken)])
    assert plan is not None
    assert result(plan, ApplyResult()) == Result(TAKEN_POLL_S, failed=True)


def test_what_was_refused_waits_for_the_back_off_whatever_the_plan_hoped_for() -> None:
    refused = ApplyResult(faults=(Fault(Reason.APPLY_FAILED, "exceeded quota"),))
    assert result(Plan(requeue_after_s=1.0), refused) == Result(failed=True)


def test_a_worker_list_that_does_not_show_a_change_is_looked_at_soon_also_while_an_object_is_refused() -> None:
    refused = ApplyResult((Fault(Reason.TEMPLATE_INVALID, "no such field"),), ("router-a: remove decode: timeout",))
    assert result(Plan(requeue_after_s=1.0), refused) == Result(UNSETTLED_AGAIN_S, failed=True)
