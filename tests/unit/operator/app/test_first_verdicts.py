"""A service keeps its status while this process has not judged its pools. The rest of a reconcile still counts."""

from types import SimpleNamespace
from typing import Any

import pytest
from pdpool_operator.controller import reconcile
from pdpool_operator.controller.again import FIRST_VERDICTS_AGAIN_S
from pdpool_operator.controller.apply import ApplyResult
from pdpool_operator.controller.reconcile import Controller
from pdpool_operator.observe.keys import Key
from pdpool_operator.plan.model import Plan
from pdpool_operator.runtime.api_errors import ApiError

KEY = Key("DisaggregatedService", "llm", "chat")
STUCK = {
    "type": "QueuesHealthy",
    "status": "False",
    "reason": "QueuesStuck",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}
SERVICE = {
    "metadata": {"name": "chat", "namespace": "llm", "uid": "u2"},
    "spec": {"prefill": {"poolRef": {"name": "chat"}}, "decode": {"poolRef": {"name": "chat"}}},
    "status": {"conditions": [STUCK]},
}


class World:
    """A controller with stand-ins around one service. `failure`: what carrying out the plan ends with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: ApiError | None) -> None:
        self.written: list[Any] = []
        self.told: list[Any] = []
        self.again_s: tuple[float | None, ...] = ()
        monkeypatch.setattr(reconcile, "plan_service", lambda *_: Plan())
        monkeypatch.setattr(reconcile, "service_status", lambda *_: "not judged")
        monkeypatch.setattr(reconcile, "ServiceFacts", lambda *_: None)
        monkeypatch.setattr(reconcile, "service_parts", lambda *_: {})

        async def body(*_: Any) -> dict[str, Any]:
            return SERVICE

        async def service(_: Any) -> Any:
            return SimpleNamespace(routers=())

        async def no_fleet(_: Any) -> None:
            return None

        async def carry_out(*_: Any) -> tuple[ApplyResult, ApiError | None]:
            return ApplyResult(), failure

        async def write(*arguments: Any) -> None:
            self.written.append(arguments[3:])

        async def tell(*arguments: Any) -> None:
            self.told.append(arguments[3:])

        def result(_plan: Any, _outcome: Any, *again_s: float | None) -> str:
            self.again_s = again_s
            return "result"

        monkeypatch.setattr(reconcile, "result", result)
        self.cluster = SimpleNamespace(body=body, service=service, is_live=True)
        self.controller: Any = SimpleNamespace(
            bindings=SimpleNamespace(bind=lambda *_: False, pools=lambda _: ()),
            engine_settings=lambda _: None,
            metrics=SimpleNamespace(states=SimpleNamespace(show_service=lambda *_: None)),
            now=lambda: None,
            rng=SimpleNamespace(uniform=lambda *_: 1.0),
            _watch_routers=lambda *_: None,
            _forget_fleet=no_fleet,
            _marked=lambda observed: observed,
            _carry_out=carry_out,
            _lacks_first_verdicts=lambda *_: True,
            reporter=SimpleNamespace(write_status=write, record_events=tell),
        )

    async def reconcile(self) -> object:
        return await Controller._service(self.controller, KEY, self.cluster)  # type: ignore[arg-type]


async def test_status_stays_and_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, failure=None)
    assert await world.reconcile() == "result"
    ((before, after),) = world.written
    assert before is after
    assert world.told == [(before, before)]
    assert FIRST_VERDICTS_AGAIN_S in world.again_s


async def test_failure_of_the_plan_is_still_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApiError):
        await World(monkeypatch, failure=ApiError(500, "InternalError", "broken", "patch /x")).reconcile()
