"""What one pod with hostile answers costs: bytes read, bytes allocated and objects kept are bounded."""

import json
import tracemalloc
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from pdpool_operator.api.engine import EngineType
from pdpool_operator.api.names import ADMIN_PORT, ENGINE_HTTP_PORT, Role
from pdpool_operator.engines.answers import MAX_HOLDS, MAX_RANKS
from pdpool_operator.observe.connector_state import parse_state
from pdpool_operator.observe.http import Unanswered, session
from pdpool_operator.observe.pod_reader import ANSWER_BYTES, LOOK_BYTES, PodReader, parse_loads
from pdpool_operator.observe.targets import Target

from tests.serving import pod_address

ALLOCATED = 16 << 20
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def state(**more: Any) -> dict[str, Any]:
    return {"incarnation": "a" * 32, "queues": {}, **more}


def packed(start: str, item: str, end: str) -> bytes:
    """Return as many items as one answer may have."""
    count = (ANSWER_BYTES - len(start) - len(end)) // (len(item) + 1)
    return (start + ",".join([item] * count) + end).encode()


def wide_load(i: int) -> dict[str, Any]:
    return {"dp_rank": i, "disaggregation": {f"prefill_{i}_{n}_queue_reqs": 1 for n in range(20)}}


ANSWERS = {
    "holds": packed('{"incarnation":"a","queues":{},"held_for":[', '{"incarnation":"bb"}', "]}"),
    "empty holds": packed('{"incarnation":"a","queues":{},"held_for":[', "{}", "]}"),
    "unknown list": packed('{"incarnation":"a","queues":{},"more":[', "0", "]}"),
    "unknown objects": packed('{"incarnation":"a","queues":{},"more":[', "{}", "]}"),
    "queues": packed('{"incarnation":"a","queues":{"a":{', '"x":1', "}}}"),
    "nested": b"[" * ANSWER_BYTES,
    "loads": packed('{"loads":[', "{}", "]}"),
    "wide loads": json.dumps({"loads": [wide_load(i) for i in range(MAX_RANKS)]}).encode()[:ANSWER_BYTES],
}


def parsed(parse: Callable[[], object]) -> object:
    try:
        return parse()
    except Unanswered as reason:
        return reason


@pytest.mark.parametrize("name", ANSWERS)
def test_parsing_one_answer_allocates_little(name):
    assert len(ANSWERS[name]) <= ANSWER_BYTES
    tracemalloc.start()
    try:
        kept = (
            parsed(lambda: parse_state(ANSWERS[name])),
            parsed(lambda: parse_loads(ANSWERS[name], Role.PREFILL, EngineType.REFERENCE)),
        )
        assert tracemalloc.get_traced_memory()[1] < ALLOCATED
    finally:
        tracemalloc.stop()
    assert kept


def test_holds_beyond_the_limit_are_left_for_later():
    holds = [{"incarnation": f"{i:032x}"} for i in range(MAX_HOLDS + 100)]
    sample = parse_state(json.dumps(state(holds=len(holds), held_for=holds)).encode())
    assert [hold.incarnation for hold in sample.held_for] == [hold["incarnation"] for hold in holds[:MAX_HOLDS]]
    assert sample.holds == len(holds)


def test_more_loads_than_ranks_are_refused():
    with pytest.raises(Unanswered, match="loads"):
        parse_loads(json.dumps({"loads": [{}] * (MAX_RANKS + 1)}).encode(), Role.PREFILL, EngineType.REFERENCE)


class HostilePod:
    """A pod that claims the most ranks, each with an answer as long as one may be, and counts the bytes it sent."""

    def __init__(self) -> None:
        self.ip = pod_address()
        holds = [{"incarnation": f"{i:032x}"} for i in range(MAX_HOLDS)]
        self.body = json.dumps(state(ranks=MAX_RANKS, held_for=holds, more="x" * (ANSWER_BYTES // 2))).encode()
        self.asked = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(body=self.body)

    async def serve(self, stack: AsyncExitStack) -> None:
        for port in (ENGINE_HTTP_PORT, *(ADMIN_PORT + rank for rank in range(MAX_RANKS))):
            app = web.Application()
            app.router.add_get("/{path:.*}", self.answer)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, self.ip, port).start()


async def test_one_look_at_a_hostile_pod_keeps_few_bytes():
    pod = HostilePod()
    async with AsyncExitStack() as stack:
        await pod.serve(stack)
        http = await stack.enter_async_context(session(64))
        reader = PodReader(http, now=lambda: NOW, timeout_s=10.0)
        samples = await reader.sample(Target("llm", "chat", Role.PREFILL, 0, "pod-1", pod.ip))
    read = [sample for sample in samples if sample.connector is not None]
    refused = {sample.connector_error for sample in samples if sample.connector is None}
    assert 0 < len(read) <= LOOK_BYTES // len(pod.body)
    assert len(samples) == MAX_RANKS
    assert refused == {"invalid: the answers of this pod are too long together"}
    assert sum(len(sample.connector.held_for) for sample in read) <= LOOK_BYTES // len(pod.body) * MAX_HOLDS
