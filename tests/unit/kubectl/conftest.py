"""A fake API server with a kubeconfig, and the command line run against it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pdpool_kubectl.cli import cli
from pdpool_operator.runtime.resources import DECODE_POOLS, PREFILL_POOLS, SERVICES_PD

from tests.fake_api import FakeApi
from tests.serving import serving

SINCE = "2026-01-01T00:00:00Z"


def condition(type_: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": SINCE,
        "observedGeneration": 1,
    }


def instance(role: str, index: int, verdict: str, message: str = "") -> dict[str, Any]:
    return {
        "index": index,
        "ready": True,
        "updated": True,
        "pod": f"chat-{role}-{index}-0",
        "podUID": f"pod-{role}-{index}",
        "verdict": verdict,
        "message": message,
    }


def put_pool(api: FakeApi, role: str, instances: list[dict[str, Any]], *conditions: dict[str, Any]) -> None:
    resource = PREFILL_POOLS if role == "prefill" else DECODE_POOLS
    worst = max((i["verdict"] for i in instances), default="")
    status = {
        "observedGeneration": 1,
        "replicas": len(instances),
        "readyReplicas": len(instances),
        "queues": worst,
        "instances": instances,
        "conditions": list(conditions),
    }
    body = {"metadata": {}, "spec": {"replicas": len(instances), "model": {"path": "tiny"}}, "status": status}
    api.put(resource, "llm", "chat", body)


def put_service(api: FakeApi, *conditions: dict[str, Any]) -> None:
    side = {"poolRef": {"name": "chat"}}
    status = {
        "observedGeneration": 1,
        "url": "http://chat-router.llm:8000",
        "routerReplicas": 1,
        "ready": "1/1 prefill, 2/2 decode",
        "conditions": list(conditions),
    }
    api.put(SERVICES_PD, "llm", "chat", {"metadata": {}, "spec": {"prefill": side, "decode": side}, "status": status})


def put_stuck(api: FakeApi) -> None:
    """Decode instance 1 is stuck, and prefill waits for it."""
    fine = condition("Available", "True", "Serving")
    blocked = "chat-prefill-0: 14 requests wait 92 s for bootstrap; chat-decode-1 has not polled for 88 s"
    stuck = "chat-decode-1: its scheduler loop has not run for 88 s"
    put_pool(
        api,
        "prefill",
        [instance("prefill", 0, "Blocked", blocked)],
        fine,
        condition("QueuesHealthy", "False", "QueuesBlocked", blocked),
    )
    put_pool(
        api,
        "decode",
        [instance("decode", 0, "Flowing"), instance("decode", 1, "Stuck", stuck)],
        fine,
        condition("QueuesHealthy", "False", "QueuesStuck", stuck),
    )
    put_service(api, fine)


def put_well(api: FakeApi) -> None:
    fine = condition("Available", "True", "Serving"), condition("QueuesHealthy", "True", "QueuesFlowing")
    put_pool(api, "prefill", [instance("prefill", 0, "Idle")], *fine)
    put_pool(api, "decode", [instance("decode", 0, "Idle")], *fine)
    put_service(api, *fine)


def put_watched(api: FakeApi) -> None:
    """A service with selectors. Its decode pod is stuck, and its prefill pod waits for it."""
    stuck = "decode d-1 rank 0: requests wait for memory or the handshake and nothing moves"
    blocked = "prefill p-1 rank 0: requests wait for bootstrap and nothing moves; d-1 also has overdue requests"
    pods = (("p-1", "prefill", "Blocked", blocked), ("d-1", "decode", "Stuck", stuck))
    status = {
        "observedGeneration": 1,
        "ready": "1/1 prefill, 1/1 decode",
        "instances": [
            {"pod": pod, "role": role, "ready": True, "verdict": verdict, "message": message}
            for pod, role, verdict, message in pods
        ],
        "conditions": [condition("QueuesHealthy", "False", "QueuesStuck", stuck)],
    }
    spec = {"prefill": {"selector": {"app": "p"}}, "decode": {"selector": {"app": "d"}}}
    api.put(SERVICES_PD, "llm", "watched", {"metadata": {}, "spec": spec, "status": status})


Kubectl = Callable[..., Awaitable[Result]]


@pytest.fixture
async def api() -> Any:
    one = FakeApi()
    async with serving(one.handle) as one.url:
        yield one


@pytest.fixture
def kubectl(api: FakeApi, tmp_path: Path) -> Kubectl:
    """Run a command with a kubeconfig whose context has the namespace llm."""
    config = tmp_path / "kubeconfig"
    context = {"cluster": "c", "user": "u", "namespace": "llm"}
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "fake",
                "contexts": [{"name": "fake", "context": context}],
                "clusters": [{"name": "c", "cluster": {"server": api.url}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )

    async def run(*words: str, typed: str = "") -> Result:
        return await asyncio.to_thread(CliRunner().invoke, cli, [*words, "--kubeconfig", str(config)], input=typed)

    return run
