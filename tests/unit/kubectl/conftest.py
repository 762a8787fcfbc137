"""A fake API server with a kubeconfig, the command line run against it, and a recording of it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner, Result
from pdpool_kubectl.cli import cli
from pdpool_kubectl.recording import FORMAT, Answers, Look, load
from pdpool_operator.api import names
from pdpool_operator.api.names import Role
from pdpool_operator.runtime.resources import DECODE_POOLS, PODS, PREFILL_POOLS, SERVICES_PD, STATEFUL_SETS

from tests.fake_api import Call, FakeApi
from tests.serving import serving

SINCE = "2026-01-01T00:00:00Z"
SECRET = "hunter2"


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


def put_engines(api: FakeApi) -> None:
    """One instance of each role, Ready, with a secret in its environment."""
    put_service(api)
    for role, resource in ((Role.PREFILL, PREFILL_POOLS), (Role.DECODE, DECODE_POOLS)):
        containers = [{"name": "engine", "env": [{"name": "TOKEN", "value": SECRET}]}]
        template = {"spec": {"containers": containers}}
        spec = {"replicas": 1, "model": {"path": "tiny"}, "template": template}
        pool = api.put(resource, "llm", "chat", {"metadata": {}, "spec": spec})
        labels = names.instance_labels("chat", role, 0)
        owner = {"kind": pool["kind"], "name": "chat", "uid": pool["metadata"]["uid"], "controller": True}
        noted = {"note": SECRET}
        sts = api.put(
            STATEFUL_SETS,
            "llm",
            names.instance("chat", role, 0),
            {
                "metadata": {"labels": labels, "ownerReferences": [owner], "annotations": noted},
                "spec": {"replicas": 1, "template": template},
            },
        )
        owner = {"kind": "StatefulSet", "name": "x", "uid": sts["metadata"]["uid"], "controller": True}
        status = {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": SINCE}],
        }
        body = {
            "metadata": {"labels": labels, "ownerReferences": [owner]},
            "spec": {"containers": containers},
            "status": status,
        }
        api.put(PODS, "llm", f"{names.instance('chat', role, 0)}-0", body)


def state(beat_age_s: float) -> dict[str, Any]:
    return {"incarnation": "a", "queues": {"bootstrap": {"reqs": 0}}, "engine_beat_age_s": beat_age_s}


async def engines(_: web.Request, call: Call) -> web.StreamResponse | None:
    if "/proxy/" not in call.path:
        return None
    if "9400" in call.path:
        return web.json_response(state(0.1))
    return web.json_response({"message": "refused by policy"}, status=503)


@pytest.fixture
async def recorded(api: FakeApi, kubectl: Kubectl, tmp_path: Path) -> Path:
    put_engines(api)
    api.fault = engines
    file = tmp_path / "calm.json"
    result = await kubectl("record", str(file), "--seconds", "0")
    assert "unanswered" in result.stdout
    assert "refused by policy" in result.stdout
    assert result.exit_code == 1
    return file


def lasting(file: Path, *beat_ages: float) -> None:
    """Repeat the first look every 3 s. In each one, the decode engine's loop has this age."""
    look, *_ = load(file)
    looks = [_later(look, 3 * number, age) for number, age in enumerate(beat_ages)]
    file.write_text(json.dumps({"format": FORMAT, "namespace": "llm", "looks": [asdict(one) for one in looks]}))


def _later(look: Look, seconds: int, beat_age_s: float) -> Look:
    def moved(text: str) -> str:
        return (datetime.fromisoformat(text) + timedelta(seconds=seconds)).isoformat()

    decode = next(p["metadata"]["uid"] for p in look.pods if p["metadata"]["labels"][names.LABEL_ROLE] == Role.DECODE)
    answers = {
        uid: Answers(
            moved(one.asked_at),
            moved(one.at),
            [{"body": state(beat_age_s if uid == decode else 0.1)}],
            one.engine,
        )
        for uid, one in look.answers.items()
    }
    return replace(look, at=moved(look.at), answers=answers)


def run(*words: str) -> tuple[int, str]:
    """Run a command that needs no cluster; return exit code and output."""
    result = CliRunner().invoke(cli, list(words))
    return result.exit_code, result.output


def role_of(obj: dict[str, Any]) -> str:
    return "decode" if obj["kind"] == "DecodePool" else obj["metadata"].get("labels", {}).get(names.LABEL_ROLE, "")
