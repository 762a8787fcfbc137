"""What a pool does with an instance that an operation keeps out of the rotation."""

from pdpool_operator.api.names import Role
from pdpool_operator.api.operations import OperationPhase
from pdpool_operator.api.reasons import Reason
from pdpool_operator.observe.kept_out import with_operations
from pdpool_operator.observe.model import DrainReason, ObservedInstance
from pdpool_operator.plan.model import Plan
from pdpool_operator.plan.pool import plan_pool
from pdpool_operator.plan.rotation import receiving

from .makers import SETTINGS, T0, make_instance, make_observed, make_pool
from .test_operation import begun

POOL = make_pool(Role.DECODE, replicas=2)


def held(instance: ObservedInstance) -> ObservedInstance:
    return with_operations(instance, [begun(phase=OperationPhase.SUCCEEDED)])


def planned(*instances: ObservedInstance, replicas: int = 2) -> Plan:
    pool = make_pool(Role.DECODE, replicas=replicas)
    return plan_pool(make_observed(pool, *instances), SETTINGS, T0)


def old(index: int) -> ObservedInstance:
    return make_instance(make_pool(Role.DECODE, replicas=2, model={"servedName": "before"}), index)


def test_it_gets_no_requests() -> None:
    observed = make_observed(POOL, held(make_instance(POOL, 0)), make_instance(POOL, 1))
    assert receiving(observed) == {"10.0.2.2"}


def test_its_drain_is_neither_ended_nor_written() -> None:
    plan = planned(held(make_instance(POOL, 0)), make_instance(POOL, 1))
    assert not plan.acts
    assert plan.progress is not None
    assert plan.progress.reason is Reason.DRAINING
    assert "PoolOperation one" in plan.progress.message


def test_an_update_waits_for_its_end() -> None:
    for first in (old(0), make_instance(POOL, 0)):
        plan = planned(held(first), old(1))
        assert not plan.patch
        assert not plan.delete
        assert plan.progress is not None
        assert "the update waits" in plan.progress.message


def test_it_is_the_first_to_be_removed() -> None:
    plan = planned(held(make_instance(POOL, 0)), make_instance(POOL, 1), replicas=1)
    assert plan.surplus == ("chat-decode-0",)
    (patch,) = plan.patch
    assert patch.name == "chat-decode-0"
    assert patch.body["metadata"]["annotations"]["pdpool.dev/drain-reason"] == DrainReason.SCALE_DOWN


def test_it_returns_when_the_operation_is_deleted() -> None:
    observed = make_observed(POOL, make_instance(POOL, 0), make_instance(POOL, 1))
    assert receiving(observed) == {"10.0.2.1", "10.0.2.2"}
