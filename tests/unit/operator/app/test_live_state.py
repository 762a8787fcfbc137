"""Plans with steps that cannot be undone are made again from live state. Other plans rest on watched objects."""

from types import SimpleNamespace
from typing import Any

import pytest
from pdpool_operator.api.key_epochs import FIRST_KEYS
from pdpool_operator.api.pools import PrefillPool
from pdpool_operator.controller import reconcile
from pdpool_operator.controller.reconcile import Controller
from pdpool_operator.observe.keys import Key
from pdpool_operator.plan.model import Delete, Patch, Plan
from pdpool_operator.plan.operation import OperationPlan
from pdpool_operator.plan.repair_model import RepairPlan
from pdpool_operator.runtime.manager import Result

from tests.unit.operator.plan.makers import SETTINGS

POOL = {"metadata": {"name": "chat", "namespace": "llm", "uid": "u1"}, "spec": {"model": {"path": "/m"}}}
SERVICE = {
    "metadata": {"name": "chat", "namespace": "llm", "uid": "u2"},
    "spec": {"prefill": {"poolRef": {"name": "chat"}}, "decode": {"poolRef": {"name": "chat"}}},
}
PLANS = {
    "deletes": Plan(delete=(Delete("Pod", "chat-prefill-0-0", "p1"),)),
    "patches": Plan(patch=(Patch("StatefulSet", "chat-prefill-0", {"spec": {"replicas": 0}}),)),
}


class CarriedOutError(Exception):
    """The plan was carried out."""


class Seen:
    """A cluster that shows one object, and records what was read."""

    def __init__(self, body: dict[str, Any], *, is_live: bool) -> None:
        self.stored, self.is_live, self.reads = body, is_live, 0

    async def body(self, *_: Any) -> dict[str, Any]:
        self.reads += 1
        return self.stored

    async def pool(self, _: Any) -> Any:
        return SimpleNamespace(keys=FIRST_KEYS)

    async def service(self, _: Any) -> Any:
        return SimpleNamespace(routers=())


async def no_repair(*_: Any) -> RepairPlan:
    return RepairPlan()


async def no_fleet(*_: Any) -> None:
    return None


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Any:
    async def carry_out(*_: Any) -> None:
        raise CarriedOutError

    monkeypatch.setattr(reconcile, "carry_out", carry_out)
    one: Any = SimpleNamespace(
        judge=SimpleNamespace(observed=lambda *_: None, marked=lambda _, pool: pool, judge=lambda _: ()),
        bindings=SimpleNamespace(bind=lambda *_: False, pools=lambda _: ()),
        engine_settings=lambda _: SETTINGS,
        router_key=lambda *_: "key",
        _watch_routers=lambda *_: None,
        _forget_fleet=no_fleet,
        _marked=lambda observed: observed,
        _forget=lambda _: None,
        now=lambda: None,
        repairs=SimpleNamespace(look=no_repair),
        operations=SimpleNamespace(plan=lambda *_: OperationPlan()),
        api=None,
        routers=None,
    )
    one._pool = lambda *args: Controller._pool(one, *args)
    one._carry_out = lambda *args: Controller._carry_out(one, *args)
    one._service = lambda *args: Controller._service(one, *args)
    return one


def plan(monkeypatch: pytest.MonkeyPatch, made: Plan) -> None:
    monkeypatch.setattr(reconcile, "plan_pool", lambda *_: made)
    monkeypatch.setattr(reconcile, "plan_service", lambda *_: made)


async def reconciled(controller: Any, kind: str, cached: Seen, live: Seen) -> Result:
    controller.cluster = cached
    cached.live = live  # type: ignore[attr-defined]
    if kind == "DisaggregatedService":
        return await Controller.reconcile_service(controller, Key(kind, "llm", "chat"))
    return await Controller.reconcile_pool(controller, Key(kind, "llm", "chat"), PrefillPool)


BODIES = {"PrefillPool": POOL, "DisaggregatedService": SERVICE}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("name", PLANS)
async def test_irreversible_plan_rests_on_live_state(controller, monkeypatch, kind, name):
    plan(monkeypatch, PLANS[name])
    cached, live = Seen(BODIES[kind], is_live=False), Seen(BODIES[kind], is_live=True)
    with pytest.raises(CarriedOutError):
        await reconciled(controller, kind, cached, live)
    assert live.reads == 1


@pytest.mark.parametrize("kind", BODIES)
async def test_live_state_that_needs_no_step_takes_none(controller, monkeypatch, kind):
    plan(monkeypatch, PLANS["deletes"])
    cached = Seen(BODIES[kind], is_live=False)

    async def forgotten(*_: Any) -> Result:
        return Result()

    controller._absent_pool = forgotten
    controller.bindings.drop = lambda _: None
    live: Any = Seen(BODIES[kind], is_live=True)
    live.stored = None  # deleted meanwhile
    assert await reconciled(controller, kind, cached, live) == Result()


@pytest.mark.parametrize("kind", BODIES)
async def test_other_plans_rest_on_watched_objects(controller, monkeypatch, kind):
    plan(monkeypatch, Plan())
    cached, live = Seen(BODIES[kind], is_live=False), Seen(BODIES[kind], is_live=True)
    with pytest.raises(CarriedOutError):
        await reconciled(controller, kind, cached, live)
    assert live.reads == 0
