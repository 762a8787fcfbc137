"""What an operator at rest asks of the API server: 50 services and 100 pools, counted by a server of the test's own."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pdpool_operator.runtime.resources import DECODE_POOLS, LEASES, PREFILL_POOLS, SERVICES_PD, Resource

from tests.cluster.hands import at_rest
from tests.fake_api import FakeApi
from tests.fake_fleet import fleet
from tests.operator_process import operator
from tests.serving import serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(420)]
MEASURED_S = 60.0
CALLS_A_MINUTE = 10
WRITES = frozenset({"create", "update", "patch", "delete"})


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    one = fleet(services=50, instances=1)
    async with serving(one.handle) as one.url:
        yield one


def calls(api: FakeApi, since: float, *, of: frozenset[str] | None = None) -> list[str]:
    return [
        f"{call.verb} {call.path}"
        for call in api.calls
        if call.at >= since and call.plural != LEASES.plural and (of is None or call.verb in of)
    ]


async def test_idle_operator_makes_few_calls(api: FakeApi, tmp_path: Path):
    async with operator(api, tmp_path) as one:

        async def written() -> float:
            assert one.process.returncode is None, one.log[-3000:]
            return float(len(calls(api, 0.0, of=WRITES)))

        await at_rest(written, every_s=40.0, within_s=240.0)
        for resource in (PREFILL_POOLS, DECODE_POOLS, SERVICES_PD):
            assert all(has_status(api, resource))
        began = time.monotonic()
        await asyncio.sleep(MEASURED_S)  # the time over which calls are counted
        made = calls(api, began)
        minutes = (time.monotonic() - began) / 60
    assert [call for call in made if call.split()[0] in WRITES] == []
    assert len(made) / minutes < CALLS_A_MINUTE, made


def has_status(api: FakeApi, resource: Resource) -> list[bool]:
    return ["status" in obj for obj in api.objects[resource].values()]
