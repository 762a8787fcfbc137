"""`plan` against a fake API server with instances as the operator builds them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from pdpool_operator.api import names
from pdpool_operator.api.pools import DecodePool
from pdpool_operator.build.common import pod_security_context
from pdpool_operator.build.pool import instance_stateful_set
from pdpool_operator.build.settings import BuildSettings
from pdpool_operator.runtime.resources import DECODE_POOLS, OPERATIONS, PODS, SERVICES_PD, STATEFUL_SETS

from tests.fake_api import Call, FakeApi, Object

from .conftest import Kubectl

SETTINGS = BuildSettings("registry.example/engine:1", "registry.example/router:1")
"""Of the operator. The command does not know them."""
SIDE = {"poolRef": {"name": "chat"}}


def pool(**spec: Any) -> Object:
    spec = {"model": {"path": "tiny"}} | spec
    return {
        "apiVersion": names.API_VERSION,
        "kind": "DecodePool",
        "metadata": {"name": "chat", "namespace": "llm"},
        "spec": spec,
    }


def service(**spec: Any) -> Object:
    return {
        "apiVersion": names.API_VERSION,
        "kind": "DisaggregatedService",
        "metadata": {"name": "chat", "namespace": "llm"},
        "spec": {"prefill": SIDE, "decode": SIDE} | spec,
    }


def put_running(api: FakeApi, replicas: int, **spec: Any) -> None:
    """Store a pool of Ready instances, and the service that binds it."""
    stored = DecodePool.parse(api.put(DECODE_POOLS, "llm", "chat", pool(replicas=replicas, **spec)))
    api.put(SERVICES_PD, "llm", "chat", service())
    for index in range(replicas):
        built = instance_stateful_set(stored, index, SETTINGS)
        sts = api.put(STATEFUL_SETS, "llm", built["metadata"]["name"], built)
        made = built["spec"]["template"]["metadata"]
        owner = {"kind": "StatefulSet", "name": built["metadata"]["name"], "uid": sts["metadata"]["uid"]}
        status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
        meta = made | {"ownerReferences": [owner | {"controller": True}]}
        api.put(PODS, "llm", f"{owner['name']}-0", {"metadata": meta, "spec": {}, "status": status})


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(*bodies: Object) -> str:
        path = tmp_path / "objects.yaml"
        path.write_text(yaml.safe_dump_all(bodies))
        return str(path)

    return write


def refusing(code: int, reason: str, message: str) -> Any:
    async def fault(_: web.Request, call: Call) -> web.StreamResponse | None:
        if call.verb != "patch":
            return None
        return web.json_response({"kind": "Status", "reason": reason, "message": message}, status=code)

    return fault


async def planned(kubectl: Kubectl, path: str, code: int = 0) -> Object:
    result = await kubectl("plan", "-f", path, "-o", "json")
    assert result.exit_code == code, result.output
    (one,) = json.loads(result.stdout)["objects"]
    return dict(one)


def actions(one: Object) -> dict[str, str]:
    return {step["name"]: step["action"] for step in one["steps"]}


async def test_unchanged_spec_changes_nothing(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 2)
    result = await kubectl("plan", "-f", file(pool(), service()))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "DecodePool llm/chat: changes nothing that runs",
        "DisaggregatedService llm/chat: changes nothing that runs",
    ]


async def test_changed_spec_restarts_each_instance_drained(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 2)
    result = await kubectl("plan", "-f", file(pool(drainTimeoutSeconds=90)))
    assert result.stdout.splitlines() == [
        "DecodePool llm/chat: 2 to restart",
        "  chat-decode-1: restart: drained for up to 90 s; one instance at a time",
        "  chat-decode-0: restart: drained for up to 90 s; one instance at a time",
    ]


async def test_only_instance_is_replaced_by_surge(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 1)
    one = await planned(kubectl, file(pool(drainTimeoutSeconds=90)))
    assert actions(one) == {"chat-decode-1": "add", "chat-decode-0": "remove"}
    assert "once chat-decode-1 serves" in one["steps"][1]["how"]


async def test_only_instance_is_restarted_without_surge(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 1)
    one = await planned(kubectl, file(pool(drainTimeoutSeconds=90, rollout={"surge": "Never"})))
    assert actions(one) == {"chat-decode-0": "restart"}


async def test_fewer_replicas_remove_the_highest_index(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 3)
    one = await planned(kubectl, file(pool(replicas=2)))
    assert actions(one) == {"chat-decode-2": "remove"}


async def test_instance_at_fault_is_removed_first(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 3)
    body = api.objects[DECODE_POOLS]["llm", "chat"]
    api.put(DECODE_POOLS, "llm", "chat", body | {"status": {"instances": [{"index": 1, "verdict": "Stuck"}]}})
    one = await planned(kubectl, file(pool(replicas=2)))
    assert actions(one) == {"chat-decode-1": "remove"}


async def test_instance_that_an_operation_keeps_out_goes_first(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 3)
    uid = api.objects[STATEFUL_SETS]["llm", "chat-decode-0"]["metadata"]["uid"]
    status = {"phase": "Succeeded", "instanceUID": uid}
    operation = {"metadata": {}, "spec": {"type": "Drain", "instance": "chat-decode-0"}, "status": status}
    api.put(OPERATIONS, "llm", "aside", operation)
    one = await planned(kubectl, file(pool(replicas=2, drainTimeoutSeconds=90)))
    assert actions(one)["chat-decode-0"] == "remove"
    assert one["notes"] == ["restarts wait for the end of PoolOperation aside"]


async def test_more_replicas_add_instances(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 1)
    one = await planned(kubectl, file(pool(replicas=3)))
    assert actions(one) == {"chat-decode-1": "add", "chat-decode-2": "add"}


async def test_spec_that_renders_the_same_pod_restarts_nothing(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 2)
    one = await planned(kubectl, file(pool(template={"spec": {"automountServiceAccountToken": False}})))
    assert actions(one) == {}


async def test_same_pod_only_with_some_settings_counts_as_restart(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 2)
    spec = {"securityContext": pod_security_context()}
    one = await planned(kubectl, file(pool(template={"spec": spec})))
    assert actions(one) == {"chat-decode-0": "restart", "chat-decode-1": "restart"}


async def test_pool_without_router_is_not_drained(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 2)
    off = service(router={"enabled": False})
    result = await kubectl("plan", "-f", file(pool(drainTimeoutSeconds=90), off))
    assert "drained" not in result.stdout
    assert "chat-router: remove" in result.stdout


async def test_router_arguments_restart_the_router_alone(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 2)
    result = await kubectl("plan", "-f", file(pool(), service(router={"args": ["--x"]})))
    assert "chat-decode" not in result.stdout
    assert "chat-router: restart" in result.stdout


async def test_new_pool_adds_its_instances(api: FakeApi, kubectl: Kubectl, file: Any):
    one = await planned(kubectl, file(pool(replicas=2)))
    assert (one["exists"], actions(one)) == (False, {"chat-decode-0": "add", "chat-decode-1": "add"})


async def test_model_refuses_in_its_own_words(api: FakeApi, kubectl: Kubectl, file: Any):
    one = await planned(kubectl, file(pool(replicas=-1)), code=1)
    assert "spec.replicas" in one["refusals"][0]


async def test_template_that_the_operator_refuses_is_a_refusal(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 2)
    container = {"name": "engine", "env": [{"name": "PDPOOL_ROLE", "value": "x"}]}
    one = await planned(kubectl, file(pool(template={"spec": {"containers": [container]}})), code=1)
    assert "PDPOOL_ROLE" in one["refusals"][0]


async def test_router_flag_that_the_operator_owns_is_a_refusal(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 2)
    one = await planned(kubectl, file(service(router={"args": ["--port=1"]})), code=1)
    assert "--port" in one["refusals"][0]


@pytest.mark.parametrize("running", [0, 2])
async def test_api_server_refuses_in_its_own_words(api: FakeApi, kubectl: Kubectl, file: Any, running: int):
    if running:
        put_running(api, running)
    api.fault = refusing(422, "Invalid", "model must fit")
    one = await planned(kubectl, file(pool(drainTimeoutSeconds=90)), code=1)
    assert (one["refusals"], one["steps"]) == (["model must fit"], [])


async def test_forbidden_dry_run_is_a_note(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 2)
    api.fault = refusing(403, "Forbidden", 'User "x" cannot patch resource "decodepools"')
    one = await planned(kubectl, file(pool(drainTimeoutSeconds=90)))
    assert "cannot patch" in one["notes"][0]
    assert len(one["steps"]) == 2


async def test_admission_that_denies_is_a_refusal(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 2)
    api.fault = refusing(403, "Forbidden", 'admission webhook "x" denied the request')
    one = await planned(kubectl, file(pool(drainTimeoutSeconds=90)), code=1)
    assert one["refusals"] == ['admission webhook "x" denied the request']


async def test_unreadable_instances_are_not_guessed(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 2)

    async def fault(_: web.Request, call: Call) -> web.StreamResponse | None:
        refused = {"kind": "Status", "reason": "Forbidden", "message": "may not list"}
        return web.json_response(refused, status=403) if call.plural == "statefulsets" else None

    api.fault = fault
    one = await planned(kubectl, file(pool(replicas=1)))
    assert (one["known"], one["steps"]) == (False, [])
    assert "may not list" in one["notes"][0]


async def test_nothing_is_written(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 2)
    before = json.dumps([sorted(map(str, objects.items())) for objects in api.objects.values()])
    await kubectl("plan", "-f", file(pool(replicas=5, drainTimeoutSeconds=90), service(router={"replicas": 3})))
    assert json.dumps([sorted(map(str, objects.items())) for objects in api.objects.values()]) == before


@pytest.mark.parametrize(
    "text", ["", "a: [", "- 1", "kind: Pod\napiVersion: v1\nmetadata: {name: x}", "kind: DecodePool"]
)
async def test_file_without_pools_or_services_is_refused(kubectl: Kubectl, tmp_path: Path, text: str):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    result = await kubectl("plan", "-f", str(path))
    assert result.exit_code == 2
    assert "wrong.yaml" in result.output


async def test_absent_replicas_keep_the_live_number(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 3)
    one = await planned(kubectl, file(pool()))
    assert actions(one) == {}


@pytest.mark.parametrize(
    ("spec", "warnings"),
    [
        ({"model": {"path": "/models/a", "servedName": "chat"}}, []),
        (
            {"model": {"path": "/models/b", "servedName": "chat"}},
            ["model.path changes from /models/a to /models/b: until both pools have changed, requests pass"],
        ),
        (
            {"model": {"path": "/models/a", "servedName": "chat2"}},
            ["model.servedName changes from chat to chat2: until both pools have changed, hand-offs are refused"],
        ),
        ({"model": {"path": "/models/b", "servedName": "chat"}, "replicas": 0}, []),
    ],
    ids=["same", "other weights", "other name", "scaled to zero"],
)
async def test_model_changed_in_place_is_warned_of(
    api: FakeApi, kubectl: Kubectl, file: Any, spec: Object, warnings: list[str]
):
    put_running(api, 2, model={"path": "/models/a", "servedName": "chat"})
    notes = (await planned(kubectl, file(pool(**spec))))["notes"]
    assert len(notes) == len(warnings)
    assert all(note.startswith(warning) for note, warning in zip(notes, warnings, strict=True))


async def test_other_pool_of_a_running_service_is_warned_of(api: FakeApi, kubectl: Kubectl, file: Any):
    put_running(api, 2)
    one = await planned(kubectl, file(service(decode={"poolRef": {"name": "chat-v2"}})))
    (note,) = one["notes"]
    assert note.startswith("decode.poolRef changes from chat to chat-v2: for a moment, routers pair engines of both")
