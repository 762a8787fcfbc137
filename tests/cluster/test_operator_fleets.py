"""A service that watches Deployments of engines that know nothing of pdpool."""

from typing import Any

import pytest
from pdpool_operator.api.names import ENGINE_HTTP_PORT
from pdpool_operator.runtime.resources import DEPLOYMENTS, PODS, SERVICES_PD

from tests.cluster.hands import Object, eventually
from tests.cluster.operator_harness import ADDRESSES, NOBODY, ON_CLUSTER, Bench
from tests.stock_sglang import Stock, StockServer

pytestmark = [*ON_CLUSTER, pytest.mark.timeout(240, func_only=True)]

SELECTORS = {"prefill": {"selector": {"app": "sglang-prefill"}}, "decode": {"selector": {"app": "sglang-decode"}}}
NOT_THEIRS = ("resourceVersion", "managedFields", "generation")
"""What their own controllers and this test change."""


class Fleet:
    """Two Deployments of one stock engine each."""

    def __init__(self, here: Bench) -> None:
        self.here = here
        self.servers: dict[str, StockServer] = {}
        self.pods: dict[str, str] = {}

    async def start(self) -> None:
        """Make the Deployments, and run their pods as a kubelet would, with an engine in each."""
        for role in ("prefill", "decode"):
            await self.here.admin.make(DEPLOYMENTS, self._deployment(role))
            self.pods[role], ip = await self._pod(role), next(ADDRESSES)
            self.servers[role] = await StockServer(Stock(role)).start(ip, ENGINE_HTTP_PORT)
            await self.here.set_ready(self.pods[role], ready=True, ip=ip)

    async def stop(self) -> None:
        for server in self.servers.values():
            await server.stop()

    async def objects(self) -> list[Object]:
        """Everything of the fleet, without what its own controllers and this test change."""
        found = []
        for resource in (DEPLOYMENTS, PODS):
            for body in await self.here.admin.all(resource, self.here.namespace):
                meta = {key: value for key, value in body["metadata"].items() if key not in NOT_THEIRS}
                found.append({"metadata": meta, "spec": body["spec"]})
        return found

    def _deployment(self, role: str) -> Object:
        labels = {"app": f"sglang-{role}"}
        container = {"name": "sglang", "image": "lmsysorg/sglang:latest"}
        spec = {"schedulerName": NOBODY, "containers": [container]}
        return {
            "metadata": {"name": f"sglang-{role}", "namespace": self.here.namespace},
            "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}},
        }

    async def _pod(self, role: str) -> str:
        async def made() -> str:
            pods = await self.here.admin.all(PODS, self.here.namespace, f"app=sglang-{role}")
            return str(pods[0]["metadata"]["name"]) if pods else ""

        return str(await eventually(made))


@pytest.fixture
async def fleet(here: Bench) -> Any:
    one = Fleet(here)
    await one.start()
    yield one
    await one.stop()


async def watch(here: Bench) -> None:
    await here.operator().start()
    body = {"metadata": {"name": "watched", "namespace": here.namespace}, "spec": {**SELECTORS, "stuckAfterSeconds": 5}}
    await here.admin.make(SERVICES_PD, body)


async def verdicts(here: Bench, **wanted: str) -> dict[str, Object]:
    """Wait for verdicts by role, and return the entries of the status by role."""

    async def shown() -> dict[str, Object]:
        service = await here.see(SERVICES_PD, "watched")
        assert service is not None
        found = {one["role"]: one for one in service["status"]["instances"]}
        assert {role: one["verdict"] for role, one in found.items()} == wanted, found
        return found

    found: dict[str, Object] = await eventually(shown)
    return found


async def test_stock_engines_are_judged_and_left_alone(here: Bench, fleet: Fleet):
    before = await fleet.objects()
    await watch(here)
    await verdicts(here, prefill="Idle", decode="Idle")
    await here.until("DisaggregatedService", "Ready", name="watched", status="True")

    # Requests wait at both sides, and no counter changes: the handshake is decode's to make.
    fleet.servers["prefill"].stock = Stock("prefill", {"prefill_bootstrap": 4})
    fleet.servers["decode"].stock = Stock("decode", {"decode_prealloc": 4})
    found = await verdicts(here, prefill="Blocked", decode="Stuck")
    assert found["decode"]["pod"] == fleet.pods["decode"]
    assert fleet.pods["decode"] in found["prefill"]["message"]
    await here.until("DisaggregatedService", "QueuesHealthy", name="watched", status="False", reason="QueuesStuck")

    metrics = await here.operators[0].get("/metrics")
    instance = f'instance="{fleet.pods["prefill"]}"'
    shown = [line for line in metrics.splitlines() if line.startswith("pdpool_queue_reqs{") and instance in line]
    assert [line.rpartition(" ")[2] for line in shown if 'queue="prefill_bootstrap"' in line] == ["4.0"], shown
    assert 'pdpool_samples_total{outcome="ok",role="decode",source="metrics"}' in metrics
    assert await fleet.objects() == before


async def test_engines_without_metrics_are_unknown_and_not_stuck(here: Bench, fleet: Fleet):
    for role, queue in (("prefill", "prefill_bootstrap"), ("decode", "decode_prealloc")):
        fleet.servers[role].missing = ("/metrics",)
        fleet.servers[role].stock = Stock(role, {queue: 4})
    await watch(here)
    found = await verdicts(here, prefill="Unknown", decode="Unknown")
    assert "nothing shows whether the queue moves (/metrics: http 404)" in found["prefill"]["message"]


async def test_decode_whose_metrics_hang_while_it_serves_is_not_stuck(here: Bench, fleet: Fleet):
    fleet.servers["prefill"].stock = Stock("prefill", {"prefill_bootstrap": 4})
    fleet.servers["decode"].stock = Stock("decode", {"decode_prealloc": 4}, running=3)
    fleet.servers["decode"].hanging = ("/metrics",)
    await watch(here)
    # Prefill's queue does not move, but nothing shows whether decode runs. So neither is at fault.
    found = await verdicts(here, prefill="Unknown", decode="Unknown")
    assert f"nothing shows whether {fleet.pods['decode']} runs" in found["prefill"]["message"]
    assert "nothing shows whether the queue moves (/metrics: timeout)" in found["decode"]["message"]

    for role, server in fleet.servers.items():
        server.stock = Stock(role)
    await verdicts(here, prefill="Idle", decode="Idle")
    fleet.servers["decode"].hanging = ("/metrics", "/v1/loads")
    found = await verdicts(here, prefill="Idle", decode="Unknown")
    assert "does not report its queues (timeout; /metrics: timeout)" in found["decode"]["message"]
    await here.until("DisaggregatedService", "QueuesHealthy", name="watched", status="Unknown", reason="QueuesUnknown")
