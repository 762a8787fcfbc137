"""`record` against a fake cluster, `replay` of what it wrote, and the test that `replay --as-test` writes."""

import asyncio
import json
import runpy
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from pdpool_kubectl.record import record
from pdpool_kubectl.recording import load
from pdpool_operator.api.names import Role
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.resources import PREFILL_POOLS

from tests.fake_api import Call, FakeApi

from .conftest import SECRET, Kubectl, engines, lasting, put_engines, role_of, run, state


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
        look["services"].append(
            look["services"][0] | {"spec": sides, "metadata": {"name": "w", "namespace": "llm", "uid": "w"}}
        )
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


async def test_api_server_that_goes_away_leaves_the_looks_so_far(
    api: FakeApi, kubectl: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdpool_kubectl.cli.take_looks", partial(record, every_s=0.001))
    put_engines(api)
    looks = 0

    async def go_away(request: web.Request, call: Call) -> web.StreamResponse | None:
        nonlocal looks
        looks += call.plural == PREFILL_POOLS.plural
        if looks > 3:
            return web.json_response({"message": "is away"}, status=503)
        return await engines(request, call)

    api.fault = go_away
    file = tmp_path / "cut.json"
    result = await kubectl("record", str(file), "--seconds", "0.0095")
    assert result.exit_code == 1, result.exception
    assert len(load(file)) == 3
    assert f"wrote {file}: 3 looks" in result.stdout
    assert "look 4 is left out: " in result.stderr
    assert "is away" in result.stderr


async def test_interrupted_recording_keeps_its_looks(api: FakeApi) -> None:
    put_engines(api)
    api.fault = engines
    first = asyncio.Event()
    async with ApiClient(Configuration(host=api.url)) as client:
        task = asyncio.create_task(record(Api(client), "llm", 60, lambda _: first.set(), every_s=60))
        await asyncio.wait_for(first.wait(), 10)
        task.cancel()
        assert len(await task) == 1


@pytest.mark.parametrize("name", ["missing/calm.json", "folder"])
async def test_file_that_cannot_be_written_is_named_before_the_first_look(
    api: FakeApi, kubectl: Kubectl, tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    result = await kubectl("record", str(tmp_path / name), "--seconds", "0")
    assert result.exit_code == 2
    assert str(tmp_path / name) in result.stderr
    assert not api.calls


def test_module_never_overwrites_the_recording(recorded: Path) -> None:
    before = recorded.read_bytes()
    code, text = run("replay", str(recorded), "--as-test", f"{recorded.parent}/../{recorded.parent.name}/calm.json")
    assert code == 2
    assert "--as-test" in text
    assert recorded.read_bytes() == before
