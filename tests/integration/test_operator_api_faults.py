"""The operator's process with an API server that fails in every way: it goes on, calls seldom, and notices changes."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pdpool_operator.runtime.resources import LEASES, PODS, PREFILL_POOLS, STATEFUL_SETS

from tests.cluster.hands import eventually
from tests.fake_api import Call, FakeApi, Fault
from tests.operator_process import SPEC, World, running
from tests.serving import serving

pytestmark = pytest.mark.timeout(240)
FAULT_S = 8.0
OUTAGE_S = 18.0
"""How long a fault lasts. An outage is longer than a Lease."""
CALLS_A_SECOND = 2


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    api = FakeApi()
    api.put(PREFILL_POOLS, "llm", "first", {"spec": SPEC})
    async with serving(api.handle) as api.url, running(api, tmp_path) as one:
        await one.until(lambda: one.made("first"), within_s=60)
        yield one


def refused(status: int) -> Fault:
    async def fault(_: web.Request, call: Call) -> web.StreamResponse | None:
        return web.json_response({"message": "no"}, status=status) if call.verb in ("list", "watch") else None

    return fault


async def all_down(_: web.Request, call: Call) -> web.StreamResponse | None:
    return web.json_response({"message": "down"}, status=503)


async def in_stream(request: web.Request, lines: bytes) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    await answer.write(lines)
    return answer


def watch_sends(lines: bytes) -> Fault:
    async def fault(request: web.Request, call: Call) -> web.StreamResponse | None:
        return await in_stream(request, lines) if call.verb == "watch" else None

    return fault


async def reset_in_list(request: web.Request, call: Call) -> web.StreamResponse | None:
    if call.verb == "watch":
        return web.json_response({"code": 410}, status=410)
    if call.verb != "list" or call.plural == LEASES.plural:
        return None
    answer = web.StreamResponse(headers={"Content-Length": "1000"})
    await answer.prepare(request)
    await answer.write(b'{"metadata": {"resourceVersion": "1"}, "items": [{"metadata"')
    assert request.transport is not None
    request.transport.abort()
    return answer


async def frozen(_: web.Request, __: Call) -> web.StreamResponse | None:
    await asyncio.sleep(3600)  # until the client gives up or the test ends
    return None


def error_line(code: int) -> bytes:
    return json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "no"}}).encode() + b"\n"


FAULTS = {
    "410 for each watch": refused(410),
    "410 in each stream": watch_sends(error_line(410)),
    "500 in each stream": watch_sends(error_line(500)),
    "half a line": watch_sends(b'{"type": "ADDED", "object": {"metada'),
    "closed at once": watch_sends(b""),
    "no JSON": watch_sends(b"<html>gateway</html>\n"),
    "500 for lists and watches": refused(500),
    "403 for lists and watches": refused(403),
    "429 for lists and watches": refused(429),
    "everything down": all_down,
    "reset in the middle of a list": reset_in_list,
    "frozen": frozen,
}


@pytest.mark.parametrize("name", FAULTS)
async def test_fault_neither_ends_nor_hides_anything(world: World, name: str):
    world.api.fault = FAULTS[name]
    world.api.cut_watches()
    began = time.monotonic()
    await asyncio.sleep(
        OUTAGE_S if FAULTS[name] in (all_down, frozen) else FAULT_S
    )  # the time over which calls are counted
    world.alive()
    counts = world.api.per_resource(began)
    limit = CALLS_A_SECOND * (time.monotonic() - began) + 1
    assert {plural: count for plural, count in counts.items() if count > limit} == {}
    world.api.put(PREFILL_POOLS, "llm", "second", {"spec": SPEC})
    world.api.fault = None
    await world.until(lambda: world.made("second"))
    await world.until_ready("leader")
    assert (await world.probe("/healthz")) == (200, "ok\n")
    assert world.process.log.count("Traceback") == 0


async def test_frozen_server_shows_in_both_probes(world: World):
    await world.until_ready("leader")
    world.api.fault = frozen
    world.api.cut_watches()
    await world.until_ready("not ready")  # the Lease cannot be renewed

    async def blind() -> bool:
        return "ok, but no" in (await world.probe("/healthz"))[1]

    await eventually(blind, within_s=60)
    world.api.fault = None
    await world.until_ready("leader")
    world.alive()


async def test_deletion_that_no_watch_showed_is_noticed(world: World):
    await world.until_ready("leader")
    world.api.remove(STATEFUL_SETS, "llm", "first-prefill-0", unseen=True)
    began = time.monotonic()
    world.api.fault = refused(410)
    world.api.cut_watches()

    async def refused_once() -> bool:
        return any(
            call.verb == "watch" and call.plural == "statefulsets" and call.at > began for call in world.api.calls
        )

    await eventually(refused_once)
    world.api.fault = None
    await world.until(lambda: world.made("first"))


async def test_history_is_read_from_a_version_of_pods(world: World):
    async def recorded() -> str:
        lease: dict[str, Any] = next(iter(world.api.objects[LEASES].values()))
        return str((lease["metadata"].get("annotations") or {}).get("pdpool.dev/history-from", ""))

    version = await eventually(recorded)
    assert int(version) <= world.api.version
    assert any(call.verb == "watch" and call.plural == PODS.plural for call in world.api.calls)
