"""`record` against a fake cluster, `replay` of what it wrote, and the test that `replay --as-test` writes."""

import asyncio
import json
import runpy
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner
from pdpool_kubectl.cli import cli
from pdpool_kubectl.recording import FORMAT, Answers, Look, load
from pdpool_operator.api import names
from pdpool_operator.api.names import Role
from pdpool_operator.runtime.resources import DECODE_POOLS, PODS, PREFILL_POOLS, STATEFUL_SETS

from tests.fake_api import Call, FakeApi

from .conftest import SINCE, Kubectl, put_service

SECRET = "hunter2"


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


async def test_engine_that_hangs_does_not_stretch_a_look(api: FakeApi, kubectl: Kubectl, tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def hang(_: web.Request, call: Call) -> web.StreamResponse | None:
        if call.path.endswith("/v1/loads"):
            await ended.wait()
        return await engines(_, call)

    put_engines(api)
    api.fault = hang
    file = tmp_path / "hangs.json"
    await kubectl("record", str(file), "--seconds", "0")
    ended.set()
    (look,) = load(file)
    assert [one.engine for one in look.answers.values()] == [{"error": "no answer within 3 s"}] * 2
    assert all("body" in one.connectors[0] for one in look.answers.values())


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
    result = CliRunner().invoke(cli, list(words))
    return result.exit_code, result.output


def test_recording_holds_no_secret(recorded: Path) -> None:
    assert SECRET not in recorded.read_text()


def test_calm_recording_gives_one_verdict_each(recorded: Path) -> None:
    lasting(recorded, 0.1, 0.1)
    code, text = run("replay", str(recorded), "-o", "json")
    changes = json.loads(text)["changes"]
    assert [(c["instance"], c["verdict"]) for c in changes] == [("chat-prefill-0", "Idle"), ("chat-decode-0", "Idle")]
    assert code == 0


def test_frozen_loop_becomes_stuck_at_its_time(recorded: Path) -> None:
    lasting(recorded, 0.1, 20.0, 40.0)
    code, text = run("replay", str(recorded))
    assert code == 1
    assert text.splitlines()[-1] == (
        "    6.0 s  chat-decode-0  Stuck: decode chat-decode-0 rank 0: "
        "engine loop does not run while its connector answers"
    )


def test_false_alarm_becomes_a_failing_test(recorded: Path) -> None:
    lasting(recorded, 0.1, 40.0)
    module = recorded.with_name("test_calm.py")
    run("replay", str(recorded), "--as-test", str(module))
    check = runpy.run_path(str(module))["test_calm_raises_no_alarm"]
    with pytest.raises(AssertionError):
        check()
    lasting(recorded, 0.1)
    check()


def role_of(obj: dict[str, Any]) -> str:
    return "decode" if obj["kind"] == "DecodePool" else obj["metadata"].get("labels", {}).get(names.LABEL_ROLE, "")


@pytest.mark.parametrize("unbound", [False, True])
def test_deleted_pool_is_blamed_no_longer(recorded: Path, unbound: bool) -> None:
    """Its engine was frozen. Requests wait in prefill after the pool's deletion, or after that of the service."""
    lasting(recorded, *[40.0] * 4)
    body = json.loads(recorded.read_text())
    for look in body["looks"][2:]:
        for part in ("services",) if unbound else ("pools", "stateful_sets", "pods"):
            look[part] = [one for one in look[part] if not unbound and role_of(one) != Role.DECODE]
        uid = next(pod["metadata"]["uid"] for pod in look["pods"] if role_of(pod) == Role.PREFILL)
        queue = {"prefill_bootstrap": {"reqs": 3, "oldest_s": 50.0, "moved_total": 0}}
        look["answers"][uid]["connectors"] = [{"body": state(0.1) | {"queues": queue}}]
    recorded.write_text(json.dumps(body))
    _, text = run("replay", str(recorded))
    last = text.splitlines()[-1]
    assert "chat-prefill-0" in last
    assert "chat-decode-0" not in last


def test_recording_of_version_1_is_replayed(recorded: Path) -> None:
    lasting(recorded, 0.1, 20.0, 40.0)
    code, expected = run("replay", str(recorded))
    body = json.loads(recorded.read_text()) | {"format": "pdpool-recording/1"}
    for look in body["looks"]:
        sides = {"prefill": {"selector": {"app": "p"}}, "decode": {"selector": {"app": "d"}}}
        look["services"].append(look["services"][0] | {"spec": sides, "metadata": {"name": "w", "namespace": "llm"}})
        for answers in look["answers"].values():
            del answers["metrics"]
    recorded.write_text(json.dumps(body))
    assert run("replay", str(recorded)) == (code, expected)


@pytest.mark.parametrize(("limit", "verdict"), [(30, "Unknown"), (5, "Stuck"), (None, "Unknown")])
def test_limit_of_the_service_that_binds_a_pool_applies(recorded: Path, limit: int | None, verdict: str) -> None:
    """Without a service, the default limit applies."""
    lasting(recorded, *[0.1] * 5)
    body = json.loads(recorded.read_text())
    for look in body["looks"]:
        for service in look["services"]:
            service["spec"]["stuckAfterSeconds"] = limit
        look["services"] = look["services"] if limit else []
        uid = next(pod["metadata"]["uid"] for pod in look["pods"] if role_of(pod) == Role.PREFILL)
        queue = {"prefill_bootstrap": {"reqs": 3, "oldest_s": 50.0, "moved_total": 0}}
        look["answers"][uid]["connectors"] = [{"body": state(0.1) | {"queues": queue}}]
    recorded.write_text(json.dumps(body))
    _, text = run("replay", str(recorded), "-o", "json")
    changes = [change for change in json.loads(text)["changes"] if change["instance"] == "chat-prefill-0"]
    assert changes[-1]["verdict"] == verdict


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", f"the field format must be '{FORMAT}' or 'pdpool-recording/1', not None"),
        ("[", "Expecting value"),
        (json.dumps({"format": FORMAT, "looks": [{"at": 1}]}), f"a look is not as {FORMAT} has it"),
    ],
)
def test_foreign_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "foreign.json"
    file.write_text(text)
    code, output = run("replay", str(file))
    assert code == 3
    assert message in output
