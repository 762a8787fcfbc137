"""A reconcile whose calls of the API fail: silent the first time, shown from the second on, healed by a success."""

# ruff: noqa: ARG002 -- stand-ins have the signatures of what they stand for
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pdpool_operator.api.base import ConditionStatus
from pdpool_operator.api.pools import PrefillPool
from pdpool_operator.controller.judge import Judge
from pdpool_operator.controller.operations import Operations
from pdpool_operator.controller.reconcile import Controller
from pdpool_operator.controller.reporter import Reporter
from pdpool_operator.observe.keys import Bindings, Key
from pdpool_operator.plan.fences import Fencing
from pdpool_operator.plan.repair_model import RepairPlan
from pdpool_operator.runtime.api_errors import ApiError, ConflictError, UnavailableError

from tests.unit.operator.plan.makers import POOL_UID, SETTINGS, T0, make_instance, make_observed, make_pool

from .metrics import idle_metrics

KEY = Key("PrefillPool", "llm", "chat")
FOREIGN = {"type": "Audited", "status": "True", "reason": "Checked", "lastTransitionTime": "2026-11-21T12:00:00Z"}


def webhook_down(status: int = 500) -> UnavailableError:
    return UnavailableError(status, "InternalError", "failed calling webhook: connection refused", "patch /x")


class World:
    """One pool whose only object to apply is its missing PodDisruptionBudget."""

    is_live = True

    def __init__(self, **spec: Any) -> None:
        meta = {"name": "chat", "namespace": "llm", "uid": POOL_UID, "generation": 1}
        self.stored: dict[str, Any] = {"metadata": meta, "spec": {"model": {"path": "/models/smollm2"}, **spec}}
        self.exists = True
        self.owned: set[str] = set()
        """Types of the conditions that server-side apply has recorded as the operator's."""
        self.read_error: ApiError | None = None
        self.write_error: ApiError | None = None
        self.events: list[tuple[str, str]] = []
        self.writes = 0
        self.metrics = idle_metrics()
        judge = Judge(Bindings(), lambda: T0, lambda _: None)
        nothing = SimpleNamespace(take=lambda *_: Fencing(()), send=self.nothing)
        served = cast("Any", SimpleNamespace(storable=lambda _, status: status))
        self.controller = Controller(
            api=cast("Any", self),
            cluster=cast("Any", self),
            routers=cast("Any", None),
            router_outcomes=cast("Any", None),
            metrics=self.metrics,
            judge=judge,
            fencer=cast("Any", nothing),
            repairs=cast("Any", SimpleNamespace(look=self.no_repair)),
            operations=Operations(
                cast("Any", self), cast("Any", None), cast("Any", None), cast("Any", self), self.metrics, lambda: T0
            ),
            node_fences=cast("Any", None),
            bindings=Bindings(),
            reporter=Reporter(cast("Any", self), served, cast("Any", self), self.metrics, lambda: T0),
            engine_settings=lambda _: SETTINGS,
            router_key=lambda *_: "",
            enqueue=lambda _: None,
            now=lambda: T0,
        )

    async def no_repair(self, *_: Any) -> RepairPlan:
        return RepairPlan()

    async def nothing(self, *_: Any) -> tuple[()]:
        return ()

    async def operations(self, *_: Any) -> tuple[()]:
        return ()

    async def forget_pool(self, *_: Any) -> None:
        pass

    async def body(self, resource: Any, namespace: str, name: str) -> dict[str, Any] | None:
        return self.stored if self.exists else None

    async def pool(self, pool: Any) -> Any:
        if self.read_error is not None:
            raise self.read_error
        observed = make_observed(pool, make_instance(make_pool()))
        return replace(observed, objects=tuple(o for o in observed.objects if o.kind != "PodDisruptionBudget"))

    async def apply(self, resource: Any, body: Any, *, dry_run: bool = False) -> None:
        if self.write_error is not None:
            raise self.write_error

    async def apply_status(self, resource: Any, live: Any, status: dict[str, Any]) -> None:
        """Keep conditions of other writers, as server-side apply does with a list that is a map."""
        self.writes += 1
        now_ours = {condition["type"] for condition in status["conditions"]}
        before = self.stored.get("status", {}).get("conditions", [])
        foreign = [c for c in before if c["type"] not in now_ours | self.owned]
        self.owned = now_ours
        self.stored["status"] = {**status, "conditions": [*status["conditions"], *foreign]}

    async def emit(self, about: Any, obj: Any, type_: str, reason: str, message: str) -> None:
        self.events.append((type_, reason))

    async def reconcile(self) -> None:
        await self.controller.reconcile(KEY)

    async def fail(self) -> None:
        with pytest.raises(ApiError):
            await self.reconcile()

    def shown(self, kind: str) -> tuple[str, str]:
        conditions = self.stored.get("status", {}).get("conditions", [])
        found = next((c for c in conditions if c["type"] == kind), None)
        return (found["status"], found["reason"]) if found is not None else ("", "")


@pytest.mark.parametrize("status", [500, 503, 429, 0])
async def test_failing_writes_are_shown_from_the_second_on(status: int) -> None:
    world = World()
    world.write_error = webhook_down(status)
    await world.fail()
    assert world.writes == 0
    await world.fail()
    assert world.shown("Ready") == ("False", "ApiFailing")
    assert world.shown("Reconciling") == ("True", "ApiFailing")
    assert world.shown("Available") == ("True", "Serving")
    for _ in range(5):
        await world.fail()
    assert (world.writes, world.events.count(("Warning", "ApiFailing"))) == (1, 1)
    world.write_error = None
    await world.reconcile()
    assert world.shown("Ready") == ("True", "Ready")
    assert world.shown("Reconciling") == ("", "")


async def test_failing_reads_are_shown_from_the_second_on() -> None:
    world = World()
    await world.reconcile()
    world.read_error = webhook_down()
    await world.fail()
    assert world.shown("Ready") == ("True", "Ready")
    await world.fail()
    assert world.shown("Ready") == ("Unknown", "ApiFailing")
    assert world.shown("Available") == ("Unknown", "ApiFailing")
    writes = world.writes
    await world.fail()
    assert world.writes == writes
    world.read_error = None
    await world.reconcile()
    assert world.shown("Available") == ("True", "Serving")


async def test_conflicts_of_writers_are_not_shown() -> None:
    world = World()
    world.write_error = ConflictError(409, "Conflict", "changed", "patch /x")
    for _ in range(3):
        await world.fail()
    assert (world.writes, world.events) == (0, [])


async def test_a_single_failure_between_successes_is_not_shown() -> None:
    world = World()
    for _ in range(3):
        world.write_error = webhook_down()
        await world.fail()
        world.write_error = None
        await world.reconcile()
    assert world.shown("Ready") == ("True", "Ready")
    assert [reason for _, reason in world.events if reason == "ApiFailing"] == []


@pytest.mark.parametrize("spec", [{"replicas": -1}, {"model": {"path": ""}}, {"engine": {"type": "Unknown"}}])
async def test_an_unreadable_spec_stalls_and_keeps_foreign_conditions(spec: dict[str, Any]) -> None:
    world = World()
    await world.reconcile()
    world.stored["status"]["conditions"].append(FOREIGN)
    world.stored["spec"] = spec
    for _ in range(2):
        await world.reconcile()
    assert world.shown("Stalled") == ("True", "SpecInvalid")
    assert world.shown("Ready") == ("False", "SpecInvalid")
    assert world.shown("Available") == ("Unknown", "SpecInvalid")
    assert world.events.count(("Warning", "SpecInvalid")) == 1
    world.stored["spec"] = {"model": {"path": "/models/smollm2"}}
    await world.reconcile()
    assert world.shown("Stalled") == ("", "")
    assert world.shown("Audited") == ("True", "Checked")
    assert PrefillPool.parse(world.stored).status.conditions[0].status is ConditionStatus.TRUE


async def test_foreign_conditions_cause_no_writes() -> None:
    world = World()
    await world.reconcile()
    world.stored["status"]["conditions"].append(FOREIGN)
    writes = world.writes
    for _ in range(3):
        await world.reconcile()
    assert world.writes == writes
    assert world.shown("Audited") == ("True", "Checked")
