"""What docs/security.md says of each right that the operator's process may lack."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pdpool_operator.runtime.resources import PREFILL_POOLS

from tests.cluster.hands import eventually
from tests.fake_api import Call, FakeApi, Fault
from tests.operator_process import SPEC, World, running
from tests.serving import serving

pytestmark = pytest.mark.timeout(240)
START_S = 60.0
Denying = Callable[..., AbstractAsyncContextManager[World]]


def lacking(plural: str, *verbs: str, subresource: str = "") -> Fault:
    """Refuse these verbs of one resource, or of its subresource, as the API server does without a right."""

    async def fault(_: web.Request, call: Call) -> web.StreamResponse | None:
        if call.plural != plural or call.verb not in verbs or not call.path.endswith(subresource):
            return None
        words = f'User "operator" cannot {call.verb} resource "{plural}"'
        return web.json_response({"kind": "Status", "reason": "Forbidden", "message": words}, status=403)

    return fault


@pytest.fixture
def denying(tmp_path: Path) -> Denying:
    @asynccontextmanager
    async def start(fault: Fault) -> AsyncIterator[World]:
        api = FakeApi(fault=fault)
        api.put(PREFILL_POOLS, "llm", "first", {"spec": SPEC})
        async with serving(api.handle) as api.url, running(api, tmp_path) as world:
            yield world

    return start


def conditions(world: World) -> dict[str, Any]:
    (pool,) = world.api.objects[PREFILL_POOLS].values()
    return {one["type"]: one for one in pool.get("status", {}).get("conditions", ())}


async def test_kind_that_may_not_be_listed_is_named(denying: Denying) -> None:
    async with denying(lacking("pods", "list", "watch")) as world:
        await world.until(lambda: "lost sight of pods" in world.process.log, within_s=START_S)

        async def named() -> bool:
            return "no pods seen" in (await world.probe("/healthz"))[1]

        await eventually(named, within_s=START_S)
        assert (await world.probe("/readyz"))[0] == 503
        world.alive()


async def test_object_that_may_not_be_made_is_named_in_the_status(denying: Denying) -> None:
    async with denying(lacking("statefulsets", "patch", "create")) as world:
        await world.until(lambda: "Stalled" in conditions(world), within_s=START_S)
        stalled = conditions(world)["Stalled"]
        assert (stalled["status"], stalled["reason"]) == ("True", "ApplyFailed")
        assert 'The API server refuses StatefulSet first-prefill-0: User "operator" cannot' in stalled["message"]


async def test_pool_whose_status_may_not_be_written_is_made(denying: Denying) -> None:
    async with denying(lacking("prefillpools", "patch", subresource="/status")) as world:
        await world.until(lambda: world.made("first"), within_s=START_S)
        await world.until(lambda: "reconcile failed" in world.process.log, within_s=START_S)
        assert conditions(world) == {}


async def test_events_that_may_not_be_written_are_logged(denying: Denying) -> None:
    async with denying(lacking("events", "create", "patch")) as world:
        await world.until(lambda: world.made("first"), within_s=START_S)
        await world.until(lambda: "event not recorded" in world.process.log, within_s=START_S)
        await world.until(lambda: "Ready" in conditions(world), within_s=START_S)


async def test_lease_that_may_not_be_written_leaves_no_leader(denying: Denying) -> None:
    async with denying(lacking("leases", "create", "update")) as world:
        await world.until(lambda: "lease not written" in world.process.log, within_s=START_S)
        assert (await world.probe("/readyz"))[0] == 503
        assert not world.made("first")
