"""A real operator process watches two engines that nothing of pdpool runs, and writes nothing but its own status."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pdpool_operator.runtime.resources import PODS, SERVICES_PD

from tests.cluster.hands import eventually
from tests.fake_api import FakeApi
from tests.integration.test_operator_stop import operator
from tests.serving import serving

pytestmark = pytest.mark.timeout(120)
WRITES = frozenset({"create", "update", "patch", "delete"})


class Engines:
    """SGLang's own report, for both engines."""

    def __init__(self) -> None:
        self.transfer = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/v1/loads":
            return web.Response(status=404)
        queues = {"mode": "decode", "decode_transfer_queue_reqs": self.transfer, "prefill_bootstrap_queue_reqs": 0}
        load = {"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "disaggregation": queues}
        return web.json_response({"loads": [load]})


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    one = FakeApi(bookmark_s=20.0)
    async with serving(Engines().handle) as engine, serving(one.handle) as one.url:
        port = int(engine.rpartition(":")[2])
        for role in ("prefill", "decode"):
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": [ready]}
            one.put(PODS, "llm", f"sglang-{role}-x", {"metadata": {"labels": {"app": role}}, "status": status})
        spec = {role: {"selector": {"app": role}, "port": port} for role in ("prefill", "decode")}
        one.put(SERVICES_PD, "llm", "watched", {"spec": spec})
        yield one


async def test_foreign_engines_are_judged_and_left_alone(api: FakeApi, tmp_path: Path) -> None:
    pods = json.dumps(list(api.objects[PODS].values()))

    async def ready() -> bool:
        status = api.objects[SERVICES_PD]["llm", "watched"].get("status", {})
        return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))

    began = time.monotonic()
    async with operator(api, tmp_path) as one:
        await eventually(ready, within_s=60.0)
        assert one.process.returncode is None, one.log[-3000:]
    status: Any = api.objects[SERVICES_PD]["llm", "watched"]["status"]
    assert [(i["pod"], i["verdict"]) for i in status["instances"]] == [
        ("sglang-prefill-x", "Idle"),
        ("sglang-decode-x", "Idle"),
    ]
    written = {call.path for call in api.calls if call.at >= began and call.verb in WRITES and call.plural != "leases"}
    own = "/apis/pdpool.dev/v1alpha1/namespaces/llm/disaggregatedservices/watched/status"
    assert {path for path in written if "/events" not in path} == {own}
    assert json.dumps(list(api.objects[PODS].values())) == pods
