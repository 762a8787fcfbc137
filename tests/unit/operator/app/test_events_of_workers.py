"""Events about worker lists depend on what each router accepted, not on how soon all of them show it."""

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.api.reasons import Reason
from pdpool_operator.controller.apply import ApplyResult
from pdpool_operator.controller.reconcile import completed
from pdpool_operator.plan.model import Fault, Plan, WorkerAction, WorkerChange

ADD = WorkerChange("r1", "10.1", WorkerAction.ADD, "http://new", Role.DECODE)


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (ApplyResult(workers=(ADD,)), ["WorkerAdded: Adding to rotation: decode http://new"]),
        (
            ApplyResult(workers=(ADD,), unsettled=("r1: does not show yet",)),
            ["WorkerAdded: Adding to rotation: decode http://new"],
        ),
        (
            ApplyResult(workers=(ADD,), unsettled=("r2: timeout",)),
            ["WorkerAdded: Adding to rotation: decode http://new"],
        ),
        (
            ApplyResult(workers=(ADD,), faults=(Fault(Reason.APPLY_FAILED, "quota"),)),
            ["WorkerAdded: Adding to rotation: decode http://new"],
        ),
        (ApplyResult(unsettled=("r1: timeout",)), []),
    ],
    ids=["shows", "slow", "another router is silent", "an object is refused", "not accepted"],
)
def test_accepted_change_is_an_event(outcome: ApplyResult, told: list[str]) -> None:
    events = completed(Plan(workers=(ADD,)), outcome)
    assert [f"{event.reason}: {event.message}" for event in events] == told
