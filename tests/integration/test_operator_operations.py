"""Operations by real operator processes: what is refused, and a restart whose operator ends between intent and deed."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pdpool_operator.api.base import format_time
from pdpool_operator.runtime.resources import DECODE_POOLS, OPERATIONS, PODS, STATEFUL_SETS

from tests.cluster.hands import eventually
from tests.fake_api import Call, FakeApi
from tests.fake_fleet import running_pods
from tests.operator_process import operator
from tests.serving import serving

pytestmark = pytest.mark.timeout(120)
ASKED = {
    "restart": {"type": "Restart", "instance": "chat-decode-1"},
    "again": {"type": "Restart", "instance": "chat-decode-1-0"},
    "drain": {"type": "Drain", "instance": "chat-decode-0"},
    "unknown": {"type": "Restart", "instance": "other-prefill-0"},
}


async def refuse_deletions(_: web.Request, call: Call) -> web.Response | None:
    return web.json_response({"code": 500}, status=500) if (call.verb, call.plural) == ("delete", "pods") else None


def ask(api: FakeApi) -> None:
    """Create the operations, the first one a second before the others."""
    for number, (name, spec) in enumerate(ASKED.items()):
        made = api.put(OPERATIONS, "llm", name, {"spec": spec | {"deadlineSeconds": 600}})
        now = datetime.now(UTC)
        made["metadata"]["creationTimestamp"] = format_time(now.replace(second=0) if number == 0 else now)


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    one = running_pods()
    one.put(DECODE_POOLS, "llm", "chat", {"spec": {"model": {"path": "tiny"}, "replicas": 2}})
    async with serving(one.handle) as one.url:
        yield one


async def test_restart_survives_its_operator_and_others_are_refused(api: FakeApi, tmp_path: Path) -> None:
    def status(name: str) -> Any:
        return api.objects[OPERATIONS]["llm", name].get("status", {})

    async def phases() -> dict[str, str]:
        return {name: status(name).get("phase", "") for name in ASKED}

    async def has_pods() -> bool:
        return len(api.objects.get(PODS, {})) == 2

    async def intended() -> bool:
        return status("restart").get("phase") == "Restarting" and (await phases())["unknown"] == "Failed"

    async with operator(api, tmp_path):
        await eventually(has_pods, within_s=60)
    ask(api)
    api.fault = refuse_deletions
    before = {name: pod["metadata"]["uid"] for (_, name), pod in api.objects[PODS].items()}
    async with operator(api, tmp_path):
        await eventually(intended, within_s=60)
    assert status("restart")["podUID"] == before["chat-decode-1-0"]
    assert "PoolOperation restart (Restart) has chat-decode-1" in status("again")["message"]
    assert "No router of pdpool's" in status("drain")["message"]
    assert status("unknown")["message"] == "There is no PrefillPool other in the namespace llm"
    assert {name: pod["metadata"]["uid"] for (_, name), pod in api.objects[PODS].items()} == before

    async def deleted() -> bool:
        return ("llm", "chat-decode-1-0") not in api.objects[PODS]

    async def ended() -> bool:
        return bool(status("restart").get("finishedAt"))

    api.fault = None
    async with operator(api, tmp_path):
        await eventually(deleted, within_s=60)
        api.on_put(api, STATEFUL_SETS, api.objects[STATEFUL_SETS]["llm", "chat-decode-1"])
        await eventually(ended, within_s=60)
    assert await phases() == {"restart": "Succeeded", "again": "Failed", "drain": "Failed", "unknown": "Failed"}
    after = {name: pod["metadata"]["uid"] for (_, name), pod in api.objects[PODS].items()}
    assert after["chat-decode-0-0"] == before["chat-decode-0-0"]
    assert after["chat-decode-1-0"] != before["chat-decode-1-0"]
