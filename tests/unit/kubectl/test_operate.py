"""`drain`, `restart`, `purge` and `fence` against a fake API server, where the test takes the place of the operator."""

import json
import re
from functools import partial

import pytest
from aiohttp import web
from pdpool_kubectl.operate import follow
from pdpool_operator.runtime.resources import OPERATIONS, Resource

from tests.fake_api import Call, FakeApi, Object

from .conftest import Kubectl


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and give up at the deadline."""
    monkeypatch.setattr("pdpool_kubectl.operation_commands.follow", partial(follow, every_s=0.01, grace_s=0.0))


def created(api: FakeApi) -> Object:
    (one,) = api.objects[OPERATIONS].values()
    return one


def operator(api: FakeApi, *statuses: tuple[str, str]) -> None:
    """Give each operation these phases and messages, one more at each look at it."""
    left = list(statuses)

    async def next_status(request: web.Request, call: Call) -> None:
        if (call.verb, call.plural) == ("get", OPERATIONS.plural) and left:
            phase, message = left.pop(0)
            body = created(api)
            status = {"phase": phase, "message": message}
            api.put(OPERATIONS, "llm", body["metadata"]["name"], body | {"status": status})

    api.fault = next_status


async def test_restart_is_followed_to_its_end(api: FakeApi, kubectl: Kubectl):
    operator(api, ("Pending", "Waits: x"), ("Pending", "Waits: x"), ("Draining", "1 left"), ("Succeeded", "is back"))
    result = await kubectl("restart", "chat-decode-1-0")
    assert result.exit_code == 0, result.output
    body = created(api)
    name = body["metadata"]["name"]
    assert body["spec"] == {"type": "Restart", "instance": "chat-decode-1-0"}
    assert result.stdout == "Succeeded: is back\n"
    assert result.stderr == f"created PoolOperation {name}\nPending: Waits: x\nDraining: 1 left\n"


async def test_drain_prints_the_command_that_ends_it(api: FakeApi, kubectl: Kubectl):
    operator(api, ("Succeeded", "is drained"))
    result = await kubectl("drain", "chat-decode-1")
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert first == "Succeeded: is drained"
    assert second.startswith(f"kubectl delete poolop {created(api)['metadata']['name']} -n llm ")


async def test_failed_operation_is_exit_code_1(api: FakeApi, kubectl: Kubectl):
    operator(api, ("Failed", "DecodePool chat has no instance chat-decode-7"))
    result = await kubectl("restart", "chat-decode-7", "-o", "json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    name = created(api)["metadata"]["name"]
    assert facts == {
        "namespace": "llm",
        "operation": name,
        "type": "Restart",
        "instance": "chat-decode-7",
        "phase": "Failed",
        "message": "DecodePool chat has no instance chat-decode-7",
    }


@pytest.mark.parametrize(
    ("options", "seconds"), [((), 60), (("--older-than", "90s"), 90), (("--older-than", "5m"), 300)]
)
async def test_purge_asks_for_the_age(api: FakeApi, kubectl: Kubectl, options: tuple[str, ...], seconds: int):
    operator(api, ("Purging", "Waits for chat-decode-1: rank 1"), ("Succeeded", "has ended 3 hand-offs"))
    result = await kubectl("purge", "chat-decode-1", *options)
    assert result.exit_code == 0, result.output
    assert created(api)["spec"] == {"type": "Purge", "instance": "chat-decode-1", "olderThanSeconds": seconds}
    assert result.stdout == "Succeeded: has ended 3 hand-offs\n"
    assert result.stderr.endswith("\nPurging: Waits for chat-decode-1: rank 1\n")


@pytest.mark.parametrize("age", ["60", "1d", "-1s", "1.5m", "", "25h"])
async def test_purge_with_a_bad_age_creates_nothing(api: FakeApi, kubectl: Kubectl, age: str):
    result = await kubectl("purge", "chat-decode-1", "--older-than", age)
    assert result.exit_code == 2, result.output
    assert "--older-than" in result.stderr
    assert not api.calls


async def test_no_wait_only_creates_the_operation_in_the_namespace(api: FakeApi, kubectl: Kubectl):
    result = await kubectl("drain", "chat-prefill-0", "--no-wait", "-n", "other")
    assert result.exit_code == 0, result.output
    assert created(api)["metadata"]["namespace"] == "other"
    assert [call.verb for call in api.calls] == ["create"]
    assert "kubectl get poolop drain-chat-prefill-0-" in result.stdout


@pytest.mark.parametrize("words", [("chat",), ("chat-decode-0-1",), ("chat-decode-0", "-A"), ()])
async def test_bad_argument_is_exit_code_2_and_creates_nothing(api: FakeApi, kubectl: Kubectl, words: tuple[str, ...]):
    result = await kubectl("restart", *words)
    assert result.exit_code == 2, result.output
    assert not api.calls


@pytest.mark.parametrize("command", ["drain", "restart", "purge", "fence", "record", "plan"])
async def test_command_for_one_namespace_has_no_option_for_all(kubectl: Kubectl, command: str):
    assert "--all-namespaces" not in (await kubectl(command, "--help")).stdout
    result = await kubectl(command, "chat-decode-0", "-A")
    assert result.exit_code == 2
    assert "No such option '-A'" in result.stderr


async def test_refusal_of_the_api_server_is_exit_code_3(api: FakeApi, kubectl: Kubectl):
    async def forbid(request: web.Request, call: Call) -> web.Response:
        return web.json_response({"code": 403, "message": "you may not"}, status=403)

    api.fault = forbid
    result = await kubectl("restart", "chat-decode-0")
    assert result.exit_code == 3
    assert "you may not" in result.stderr


async def test_operation_deleted_meanwhile_is_exit_code_3(api: FakeApi, kubectl: Kubectl):
    async def delete(request: web.Request, call: Call) -> None:
        if call.verb == "get":
            api.remove(OPERATIONS, "llm", created(api)["metadata"]["name"])

    api.fault = delete
    result = await kubectl("restart", "chat-decode-0")
    assert result.exit_code == 3
    assert "was deleted before it had ended" in result.stderr


async def test_api_server_that_is_away_for_a_moment_is_asked_again(api: FakeApi, kubectl: Kubectl):
    operator(api, ("Draining", "1 left"), ("Succeeded", "is back"))
    answer, away = api.fault, iter([True])
    assert answer is not None

    async def once_away(request: web.Request, call: Call) -> web.StreamResponse | None:
        if call.verb == "get" and next(away, False):
            return web.json_response({"code": 503, "message": "is away"}, status=503)
        return await answer(request, call)

    api.fault = once_away
    result = await kubectl("restart", "chat-decode-0")
    assert result.exit_code == 0, result.output
    assert "is away" in result.stderr


async def test_operation_that_no_operator_ends_is_given_up_after_its_deadline(api: FakeApi, kubectl: Kubectl):
    def short(_: FakeApi, resource: Resource, obj: Object) -> None:
        obj["spec"]["deadlineSeconds"] = 1

    api.on_put = short
    result = await kubectl("restart", "chat-decode-0")
    assert result.exit_code == 3
    assert "does an operator run?" in result.stderr


ANSWERS = [
    pytest.param((), "gpu-17\n", id="typed"),
    pytest.param(("--yes",), "", id="script"),
]


@pytest.mark.parametrize(("options", "typed"), ANSWERS)
async def test_fence_declares_the_node_off(api: FakeApi, kubectl: Kubectl, options: tuple[str, ...], typed: str):
    operator(api, ("Fencing", "Waits for chat-decode-0-0"), ("Succeeded", "No engine in llm holds memory"))
    result = await kubectl("fence", "gpu-17", "-o", "json", *options, typed=typed)
    assert result.exit_code == 0, result.output
    assert created(api)["spec"] == {"type": "Fence", "node": "gpu-17"}
    facts = json.loads(result.stdout)
    assert (facts["type"], facts["node"], facts["phase"]) == ("Fence", "gpu-17", "Succeeded")
    assert result.stderr.endswith("\nFencing: Waits for chat-decode-0-0\n")
    assert ("CORRUPTS that memory" in result.stderr) == (not options)


@pytest.mark.parametrize("typed", ["", "y\n", "gpu-71\n", "\n"])
async def test_fence_without_the_name_typed_creates_nothing(api: FakeApi, kubectl: Kubectl, typed: str):
    result = await kubectl("fence", "gpu-17", typed=typed)
    assert result.exit_code == 1, result.output
    assert "nothing was created" in result.stderr
    assert not api.calls


@pytest.mark.parametrize("words", [("GPU_17", "--yes"), ("gpu-17", "--yes", "-A"), ("--yes",)])
async def test_fence_with_a_bad_argument_creates_nothing(api: FakeApi, kubectl: Kubectl, words: tuple[str, ...]):
    result = await kubectl("fence", *words)
    assert result.exit_code == 2, result.output
    assert not api.calls


async def test_failed_fence_is_exit_code_1(api: FakeApi, kubectl: Kubectl):
    operator(api, ("Failed", "The kubelet of the Node gpu-17 reports"))
    result = await kubectl("fence", "gpu-17", "--yes")
    assert result.exit_code == 1
    assert result.stdout == "Failed: The kubelet of the Node gpu-17 reports\n"


@pytest.mark.parametrize("node", ["gpu-17.eu-1.example.com", "x" * 199 + ".example.com"])
async def test_fence_of_any_node_has_a_name_that_kubernetes_takes(api: FakeApi, kubectl: Kubectl, node: str):
    operator(api, ("Succeeded", "x"))
    assert (await kubectl("fence", node, "--yes")).exit_code == 0
    name = created(api)["metadata"]["name"]
    assert len(name) <= 253
    assert all(re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", part) for part in name.split("."))


async def test_creation_without_an_answer_names_the_operation_that_may_exist(api: FakeApi, kubectl: Kubectl):
    async def busy(request: web.Request, call: Call) -> web.Response:
        return web.json_response({"message": "request timed out"}, status=504)

    api.fault = busy
    result = await kubectl("restart", "chat-decode-0")
    assert result.exit_code == 3
    assert re.search(r"may exist: kubectl get poolop restart-chat-decode-0-[0-9a-f]{6} -n llm\n$", result.stderr)
