"""A reconcile shows the state of its object in the metrics."""

import pytest
from pdpool_operator.runtime.api_errors import ApiError
from prometheus_client import generate_latest

from .test_api_failures import World, webhook_down

POOL = '{namespace="llm",pool="chat",role="prefill"}'


def series(world: World, name: str) -> list[str]:
    text = generate_latest(world.metrics.registry).decode()
    return [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]


@pytest.mark.parametrize("name", ["wanted", "ready", "available"])
async def test_reconcile_shows_the_numbers_of_a_pool(name: str) -> None:
    world = World()
    await world.reconcile()
    assert series(world, f"pdpool_pool_{name}") == [f"pdpool_pool_{name}{POOL} 1.0"]


async def test_counters_of_repairs_and_fences_begin_at_zero() -> None:
    """A series that begins at 1 has no increase."""
    world = World()
    await world.reconcile()
    counters = series(world, "pdpool_repair_actions_total")
    assert len(counters) == 3 * 3
    assert all('namespace="llm"' in line and 'role="prefill"' in line and line.endswith(" 0.0") for line in counters)
    fences = [f'pdpool_fences_total{{outcome="{one}"}} 0.0' for one in ("given", "refused", "unanswered")]
    assert series(world, "pdpool_fences_total") == fences


async def test_deleted_pool_has_no_counters_of_repairs() -> None:
    world = World()
    await world.reconcile()
    world.metrics.repairs.labels("llm", "chat", "decode", "purge", "done").inc()  # of the other pool
    world.exists = False
    await world.reconcile()
    (left,) = series(world, "pdpool_repair_actions_total")
    assert 'role="decode"' in left
    assert series(world, "pdpool_pool_wanted") == []


async def test_conditions_in_metrics_are_those_of_the_status() -> None:
    world = World()
    await world.reconcile()
    shown = {line.partition('reason="')[2].partition('"')[0] for line in series(world, "pdpool_condition")}
    assert shown == {condition["reason"] for condition in world.stored["status"]["conditions"]}


async def test_refused_spec_replaces_the_conditions() -> None:
    world = World()
    await world.reconcile()
    world.stored["spec"] = {"replicas": -1}
    await world.reconcile()
    assert all('reason="SpecInvalid"' in line for line in series(world, "pdpool_condition") if 'type="Ready"' in line)


async def test_failed_writes_of_a_status_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    await world.reconcile()

    async def fail(*_: object) -> None:
        raise webhook_down()

    monkeypatch.setattr(world, "apply_status", fail)
    world.stored["spec"] = {"replicas": -1}
    with pytest.raises(ApiError):
        await world.reconcile()
    for outcome in ("ok", "failed"):
        labels = {"kind": "PrefillPool", "outcome": outcome}
        assert world.metrics.registry.get_sample_value("pdpool_status_writes_total", labels) == 1
