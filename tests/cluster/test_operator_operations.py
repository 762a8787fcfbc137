"""Operations on a real API server, with real routers: what it refuses, and what a drain and a restart do."""

import asyncio

import pytest
from click.testing import CliRunner
from pdpool_kubectl.cli import cli
from pdpool_operator.observe.cluster import OPERATIONS
from pdpool_operator.runtime.api import PODS, InvalidError

from tests.cluster.hands import Object, eventually
from tests.cluster.operator_harness import NOBODY, ON_CLUSTER, Bench
from tests.cluster.operator_routers import Routers

pytestmark = [*ON_CLUSTER, pytest.mark.timeout(120, func_only=True)]

ROUTER = {"replicas": 1, "template": {"spec": {"schedulerName": NOBODY}}}
P0, P1, D0 = "chat-prefill-0-0", "chat-prefill-1-0", "chat-decode-0-0"


async def ask(here: Bench, name: str, type_: str, instance: str, **spec: object) -> Object:
    meta = {"name": name, "namespace": here.namespace}
    return await here.admin.make(OPERATIONS, {"metadata": meta, "spec": {"type": type_, "instance": instance, **spec}})


async def until(here: Bench, name: str, phase: str, reason: str) -> Object:
    """Wait until an operation has this phase, with this reason in `Ready`. Return its status."""

    async def check() -> Object:
        body = await here.see(OPERATIONS, name)
        assert body is not None
        status: Object = body["status"]
        ready = next(one for one in status["conditions"] if one["type"] == "Ready")
        assert (status["phase"], ready["reason"]) == (phase, reason), status
        return status

    result: Object = await eventually(check, within_s=60)
    return result


async def test_api_server_refuses_what_no_operator_could_carry_out(here: Bench):
    refused: tuple[tuple[str, str, dict[str, object], str], ...] = (
        ("Reboot", "chat-decode-0", {}, "Unsupported value"),
        ("Restart", "chat", {}, "must be the name of an instance or of its pod"),
        ("Restart", "chat-decode-01", {}, "not 'chat-decode-01'"),
        ("Restart", "chat-decode-0-1", {}, "must be the name of an instance or of its pod"),
        ("Drain", "chat-decode-0", {"deadlineSeconds": 0}, "greater than or equal to 1"),
    )
    for type_, instance, spec, words in refused:
        with pytest.raises(InvalidError, match=words):
            await ask(here, "bad", type_, instance, **spec)
    made = await ask(here, "good", "Restart", "chat-decode-0-0")
    assert made["spec"]["deadlineSeconds"] == 1800
    for change in ({"type": "Drain"}, {"instance": "chat-decode-1"}, {"deadlineSeconds": 60}):
        with pytest.raises(InvalidError, match="cannot be changed"):
            await here.admin.edit(OPERATIONS, here.namespace, "good", {"spec": change})


async def test_operator_refuses_what_does_not_exist_and_a_drain_without_router(here: Bench):
    await here.operator().start()
    await here.pool("DecodePool")
    await here.run_pod(D0)
    await here.until("DecodePool", "Ready", status="True")
    await ask(here, "no-pool", "Restart", "chat-prefill-0")
    await ask(here, "no-router", "Drain", "chat-decode-0")
    pool = await until(here, "no-pool", "Failed", "PoolNotFound")
    assert "no PrefillPool chat" in pool["message"]
    await until(here, "no-router", "Failed", "NoRouter")
    words = ["restart", "chat-decode-7", "-n", here.namespace]
    result = await asyncio.to_thread(CliRunner().invoke, cli, words)
    assert result.exit_code == 1, result.output
    assert result.stdout == "Failed: DecodePool chat has no instance chat-decode-7; it has chat-decode-0\n"


async def test_drain_keeps_an_instance_out_and_restart_waits_for_another_that_serves(here: Bench, routers: Routers):
    await here.operator().start()
    await here.pool("PrefillPool", replicas=2)
    await here.pool("DecodePool")
    await here.service(router=ROUTER)
    for pod in (P0, P1, D0):
        await here.run_pod(pod)
    await routers.start("router-a")
    await routers.until("router-a", P0, P1, D0)

    here.engines[P1].running = 1
    await ask(here, "drain", "Drain", "chat-prefill-1")
    await routers.until("router-a", P0, D0)
    await until(here, "drain", "Draining", "Draining")
    here.engines[P1].running = 0
    drained = await until(here, "drain", "Succeeded", "Succeeded")
    assert drained["finishedAt"] >= drained["startedAt"]

    old = (await here.pod(P0))["metadata"]["uid"]
    await ask(here, "restart", "Restart", P0)
    await until(here, "restart", "Pending", "Waiting")  # chat-prefill-0 is the last one that serves
    assert (await here.pod(P0))["metadata"]["uid"] == old
    await routers.until("router-a", P0, D0)

    await here.admin.drop(OPERATIONS, here.namespace, "drain")
    await here.run_pod(P0, but_not=old)  # its pod was deleted, and the StatefulSet made another
    restarted = await until(here, "restart", "Succeeded", "Succeeded")
    assert restarted["podUID"] == old
    await routers.until("router-a", P0, P1, D0)
    pod = await here.see(PODS, P0)
    assert pod is not None
    assert pod["metadata"]["uid"] != old
