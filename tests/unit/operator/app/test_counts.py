"""Numbers of a pool that its metrics show."""

from dataclasses import replace

import pytest
from pdpool_operator.api.pools import PoolStatus
from pdpool_operator.api.services import RepairMode, RepairSpec
from pdpool_operator.controller.counts import pool_counts
from pdpool_operator.plan.repair_model import RepairPlan

from tests.unit.operator.plan.makers import make_instance, make_observed, make_pool


@pytest.mark.parametrize(
    ("mode", "budget"), [(RepairMode.OFF, None), (RepairMode.OBSERVE, None), (RepairMode.ENFORCE, 0)]
)
def test_only_enforce_has_a_budget(mode: RepairMode, budget: int | None) -> None:
    """A budget of 0 fires PdpoolRepairBudgetSpent, and in Observe there is no repair that could stop."""
    pool = make_pool()
    observed = replace(make_observed(pool, make_instance(pool)), repair=RepairSpec(mode=mode, restarts_per_hour=0))
    assert pool_counts(observed, (), PoolStatus(), RepairPlan(remaining=0)).repair_budget == budget
