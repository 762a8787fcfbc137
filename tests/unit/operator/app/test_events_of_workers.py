"""Events about worker lists depend on what each router accepted, not on how soon all of them show it."""

from typing import Any, cast

import pytest
from pdpool_operator.api.models import DisaggregatedServiceStatus
from pdpool_operator.api.names import Role
from pdpool_operator.api.reasons import Reason
from pdpool_operator.controller.apply import Outcome
from pdpool_operator.controller.reconcile import Controller
from pdpool_operator.observe.cluster import SERVICES_PD
from pdpool_operator.plan.model import Fault, Plan, WorkerAction, WorkerChange

ADD = WorkerChange("r1", "10.1", WorkerAction.ADD, "http://new", Role.DECODE)


class Recorded:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.recorder = self

    async def emit(self, _about: object, _obj: object, _type: str, reason: str, message: str) -> None:
        self.events.append(f"{reason}: {message}")


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (Outcome(workers=(ADD,)), ["WorkerAdded: Adding to rotation: decode http://new"]),
        (
            Outcome(workers=(ADD,), unsettled=("r1: does not show yet",)),
            ["WorkerAdded: Adding to rotation: decode http://new"],
        ),
        (Outcome(workers=(ADD,), unsettled=("r2: timeout",)), ["WorkerAdded: Adding to rotation: decode http://new"]),
        (
            Outcome(workers=(ADD,), faults=(Fault(Reason.APPLY_FAILED, "quota"),)),
            ["WorkerAdded: Adding to rotation: decode http://new"],
        ),
        (Outcome(unsettled=("r1: timeout",)), []),
    ],
    ids=["shows", "slow", "another router is silent", "an object is refused", "not accepted"],
)
async def test_accepted_change_is_an_event(outcome: Outcome, told: list[str]) -> None:
    seen, status = Recorded(), DisaggregatedServiceStatus()
    tell = Controller._tell(cast("Any", seen), SERVICES_PD, {}, Plan(workers=(ADD,)), outcome, status, status)
    await tell
    assert seen.events == told
