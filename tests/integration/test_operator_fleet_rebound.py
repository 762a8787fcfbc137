"""A service that watched pods and then binds pools, or the other way round, under the operator's process."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pdpool_operator.runtime.resources import DECODE_POOLS, PODS, PREFILL_POOLS, SERVICES_PD

from tests.cluster.hands import eventually
from tests.fake_fleet import running_pods
from tests.operator_process import SPEC, World, running
from tests.serving import serving

pytestmark = pytest.mark.timeout(120)
ROLES = ("prefill", "decode")
WATCHES = {role: {"selector": {"engine": role}, "engine": "SGLang", "connector": "Native"} for role in ROLES}
BINDS = {role: {"poolRef": {"name": "chat"}} for role in ROLES}


def engine_pod(role: str) -> dict[str, Any]:
    status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    container = {"name": "engine", "image": "engine"}
    return {"metadata": {"labels": {"engine": role}}, "spec": {"containers": [container]}, "status": status}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    api = running_pods()
    for role, kind in zip(ROLES, (PREFILL_POOLS, DECODE_POOLS), strict=True):
        api.put(PODS, "llm", f"their-{role}", engine_pod(role))
        api.put(kind, "llm", "chat", {"spec": SPEC})
    api.put(SERVICES_PD, "llm", "chat", {"spec": WATCHES})
    async with serving(api.handle) as api.url, running(api, tmp_path) as one:
        yield one


async def judged(world: World) -> set[str]:
    """Return the instances that have a verdict."""
    text = (await world.probe("/metrics"))[1]
    lines = (
        line for line in text.splitlines() if line.startswith("pdpool_instance_verdict{") and line.endswith(" 1.0")
    )
    return {line.partition('instance="')[2].partition('"')[0] for line in lines}


async def until_judged(world: World, *instances: str) -> None:
    async def so() -> bool:
        world.alive()
        assert await judged(world) == set(instances)
        return True

    await eventually(so, within_s=60)


async def test_service_that_binds_pools_now_watches_no_pods(world: World) -> None:
    await until_judged(world, "their-prefill", "their-decode", "0")
    world.api.remove(SERVICES_PD, "llm", "chat")
    world.api.put(SERVICES_PD, "llm", "chat", {"spec": BINDS})
    await until_judged(world, "0")
    world.api.remove(SERVICES_PD, "llm", "chat")
    world.api.put(SERVICES_PD, "llm", "chat", {"spec": WATCHES})
    await until_judged(world, "their-prefill", "their-decode", "0")
