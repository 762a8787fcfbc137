"""Operations on a real API server: what it refuses, and what drain, restart and purge do to routers and engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner, Result
from pdpool_kubectl.cli import cli
from pdpool_operator.api.key_epochs import FIRST_EPOCH
from pdpool_operator.api.names import ADMIN_PORT, ENGINE_HTTP_PORT
from pdpool_operator.observe.http import request, session
from pdpool_operator.runtime.api_errors import InvalidError
from pdpool_operator.runtime.keys import Keys
from pdpool_operator.runtime.resources import OPERATIONS, PODS
from pdpool_reference.demo.launch import Child, Children

from tests.cluster.hands import Object, eventually
from tests.cluster.operator_harness import NOBODY, ON_CLUSTER, Bench
from tests.cluster.operator_routers import Routers

pytestmark = [*ON_CLUSTER, pytest.mark.timeout(120, func_only=True)]

ROUTER = {"replicas": 1, "template": {"spec": {"schedulerName": NOBODY}}}
P0, P1, D0 = "chat-prefill-0-0", "chat-prefill-1-0", "chat-decode-0-0"


async def ask(here: Bench, name: str, type_: str, instance: str, **spec: object) -> Object:
    meta = {"name": name, "namespace": here.namespace}
    return await here.admin.make(OPERATIONS, {"metadata": meta, "spec": {"type": type_, "instance": instance, **spec}})


async def pdpool(here: Bench, *words: str) -> Result:
    """Run `kubectl pdpool` in the test's namespace."""
    return await asyncio.to_thread(CliRunner().invoke, cli, [*words, "-n", here.namespace])


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
        ("Fence", "chat-decode-0", {}, "node is required for type Fence"),
        ("Fence", "chat-decode-0", {"node": "gpu-17"}, "instance is required for Drain, Restart and Purge"),
        ("Drain", "chat-decode-0", {"node": "gpu-17"}, "node is required for type Fence, and only allowed there"),
        ("Fence", "chat-decode-0", {"node": "GPU_17"}, "node must be the name of a node"),
        ("Restart", "chat", {}, "must be the name of an instance or of its pod"),
        ("Restart", "chat-decode-01", {}, "not 'chat-decode-01'"),
        ("Restart", "chat-decode-0-1", {}, "must be the name of an instance or of its pod"),
        ("Drain", "chat-decode-0", {"deadlineSeconds": 0}, "greater than or equal to 1"),
        ("Drain", "chat-decode-0", {"olderThanSeconds": 60}, "only for type Purge"),
        ("Purge", "chat-decode-0", {"olderThanSeconds": -1}, "greater than or equal to 0"),
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
    result = await pdpool(here, "restart", "chat-decode-7")
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


class Pair:
    """A prefill engine, and the decode engine in the place of the container of `chat-decode-0-0`."""

    def __init__(self, http: aiohttp.ClientSession, prefill: Child, decode: Child) -> None:
        self.http, self.prefill, self.decode = http, prefill, decode

    async def ask(self, engine: Child, path: str, **body: Any) -> tuple[int, Any]:
        """Post to an engine. Return the status, and the body."""
        status, answer = await request(self.http, "POST", engine.url + path, timeout_s=60, json=body)
        return status, json.loads(answer)

    def generate(self, room: int) -> list[asyncio.Task[tuple[int, Any]]]:
        """Send one request to both engines, as a router does."""
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.addresses["bootstrap_port"]}
        body = {"input_ids": [5] * 64, "sampling_params": {"max_new_tokens": 4}, "bootstrap_room": room, **where}
        return [asyncio.create_task(self.ask(one, "/generate", **body)) for one in (self.prefill, self.decode)]

    async def queued(self, engine: Child) -> dict[str, float]:
        """Return the age of the oldest hand-off in each queue of an engine's connector that has any."""
        url = f"http://{engine.addresses['admin']}/v1/state"
        _, answer = await request(self.http, "GET", url, timeout_s=60)
        queues = json.loads(answer)["queues"]
        return {name: queue["oldest_s"] for name, queue in queues.items() if queue["reqs"]}


@pytest.fixture
async def pair(here: Bench) -> AsyncIterator[Pair]:
    await here.operator().start()
    await here.pool("DecodePool")
    ip = await here.run_pod(D0, engine=False)
    uid = (await here.pod(D0))["metadata"]["uid"]
    key = here.folder / "operator.pem"
    key.write_text(Keys({FIRST_EPOCH: (here.folder / "seed").read_bytes().strip()}).public(FIRST_EPOCH))
    extra = ["--host", ip, "--advertise-host", ip, "--port", str(ENGINE_HTTP_PORT), "--admin-port", str(ADMIN_PORT)]
    extra += ["--pod-uid", uid, "--operator-key", str(key)]
    with Children() as children:
        prefill = children.engine("prefill", model_path="tiny", extra=["--enable-faults"])
        decode = children.engine("decode", model_path="tiny", extra=extra)
        async with session(8) as http:
            yield Pair(http, prefill, decode)


async def test_purge_ends_a_request_that_hangs_and_restarts_nothing(here: Bench, pair: Pair):
    pod = await here.pod(D0)
    await pair.ask(pair.prefill, "/faults", freeze_scheduler=True)
    hangs = pair.generate(room=1)

    async def hangs_for_a_while() -> bool:
        return (await pair.queued(pair.decode)).get("decode_transfer", 0) >= 2

    await eventually(hangs_for_a_while, within_s=60)
    younger = await pdpool(here, "purge", "chat-decode-0", "--older-than", "1h")
    assert younger.stdout == "Succeeded: chat-decode-0 has ended 0 hand-offs older than 3600 s\n", younger.output
    assert "decode_transfer" in await pair.queued(pair.decode)

    purged = await pdpool(here, "purge", D0, "--older-than", "1s", "-o", "json")
    assert purged.exit_code == 0, purged.output
    name = json.loads(purged.stdout)["operation"]
    assert (await until(here, name, "Succeeded", "Succeeded"))["purged"] == 1

    async def are_empty() -> bool:
        return not (await pair.queued(pair.decode) or await pair.queued(pair.prefill))

    await eventually(are_empty, within_s=60)
    await pair.ask(pair.prefill, "/faults", freeze_scheduler=False)
    for status, answer in await asyncio.gather(*hangs):
        assert (status, answer["error"]["code"]) == (503, "purged")
    assert [status for status, _ in await asyncio.gather(*pair.generate(room=2))] == [200, 200]
    assert (await here.pod(D0))["metadata"]["uid"] == pod["metadata"]["uid"]
    assert pair.decode.process.poll() is None


async def test_purge_waits_for_an_engine_that_does_not_answer(here: Bench):
    await here.operator().start()
    await here.pool("DecodePool")
    await here.run_pod(D0, engine=False)
    await ask(here, "purge", "Purge", "chat-decode-0", deadlineSeconds=5)
    late = await until(here, "purge", "Failed", "DeadlinePassed")
    assert "chat-decode-0: rank 0 does not answer (refused)" in late["message"]
