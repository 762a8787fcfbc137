"""Counters of routers: what the real router publishes, and what is read of it."""

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import aiohttp
import pytest
from aiohttp import web
from pdpool_operator.api.names import ROUTER_METRICS_PORT
from pdpool_operator.observe import router_outcomes
from pdpool_operator.observe.http import Unanswered, session
from pdpool_operator.observe.keys import Key
from pdpool_operator.observe.router_outcomes import RouterOutcomes, RouterSample, parse_outcomes
from pdpool_operator.observe.samples import Tally

from tests.serving import pod_address, serving

SERVICE = Key("DisaggregatedService", "llm", "chat")
NOW = datetime(2026, 11, 25, tzinfo=UTC)
ONE = b"""# TYPE smg_worker_cb_outcomes_total counter
smg_worker_cb_outcomes_total{worker="http://10.0.0.1:30000",outcome="failure"} 3
smg_worker_cb_outcomes_total{worker="http://10.0.0.1:30000",outcome="success"} 40
smg_worker_cb_outcomes_total{worker="http://[fd00::2]:30000",outcome="success"} 7
smg_worker_cb_state{worker="http://10.0.0.1:30000"} 0
"""


def test_counters_are_read_by_engine() -> None:
    assert parse_outcomes(ONE) == {
        "http://10.0.0.1:30000": Tally(40, 3),
        "http://[fd00::2]:30000": Tally(7, 0),
    }


@pytest.mark.parametrize(
    "line",
    [
        b'smg_worker_cb_outcomes_total{worker="http://a b",outcome="failure"} 3',
        b'smg_worker_cb_outcomes_total{worker="http://a",outcome="other"} 3',
        b'smg_worker_cb_outcomes_total{worker="http://a",outcome="failure"} -3',
        b'smg_worker_cb_outcomes_total{worker="http://a",outcome="failure"} 1e99',
        b"\xff\xfe",
        b"",
    ],
)
def test_other_lines_are_left_out(line: bytes) -> None:
    assert parse_outcomes(line) == {}


def test_too_many_engines_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_outcomes, "MAX_ENGINES", 1)
    with pytest.raises(Unanswered, match="more than 1 engines"):
        parse_outcomes(ONE)


@asynccontextmanager
async def a_router(status: int = 200, *, at: str = "", answers: bool = True) -> AsyncIterator[str]:
    async def handle(_: web.Request) -> web.Response:
        if not answers:
            await asyncio.Event().wait()
        return web.Response(status=status, body=ONE)

    app = web.Application()
    app.router.add_get("/metrics", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    address = at or pod_address()
    await web.TCPSite(runner, address, ROUTER_METRICS_PORT).start()
    yield address
    await runner.cleanup()


async def samples_of(*routers: tuple[str, str], then: tuple[tuple[str, str], ...] | None = None) -> list[RouterSample]:
    seen: list[RouterSample] = []
    async with session(4) as http:
        outcomes = RouterOutcomes(
            http, now=lambda: NOW, on_sample=lambda _, sample: seen.append(sample), on_reach=lambda _: None
        )
        outcomes.watch(SERVICE, routers)
        if then is not None:
            outcomes.watch(SERVICE, then)
        await outcomes.look()
    return seen


async def test_every_router_of_a_service_is_sampled() -> None:
    async with a_router() as one, a_router() as two:
        seen = await samples_of(("a", one), ("b", two))
    assert {sample.pod_uid for sample in seen} == {"a", "b"}
    assert seen[0].engines == parse_outcomes(ONE)


async def test_router_without_an_answer_has_no_sample() -> None:
    async with a_router(status=500) as failing, a_router() as one:
        seen = await samples_of(("a", failing), ("b", pod_address()), ("c", one))
    assert [sample.pod_uid for sample in seen] == ["c"]


async def test_router_that_is_gone_is_not_asked() -> None:
    async with a_router() as one:
        assert await samples_of(("a", one), then=()) == []


@pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="needs sglang-router")
@pytest.mark.timeout(60)
async def test_real_router_blames_the_decode_that_fails() -> None:
    """A client's own error (400) counts at no engine. The failing decode fails at its share of requests."""

    async def engine(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"model_path": "tiny", "data": [{"id": "tiny"}]})
        wrong = (await request.json())["sampling_params"]["temperature"] < 0
        return web.json_response({"output_ids": [1]}, status=400 if wrong else 200)

    async def broken(request: web.Request) -> web.Response:
        return await engine(request) if request.method == "GET" else web.Response(status=500)

    async with (
        serving(engine) as prefill,
        serving(engine) as good,
        serving(broken) as bad,
        session(4) as http,
        routing(http, prefill, good, bad) as (url, metrics),
    ):
        for number in range(20):
            body = {"input_ids": [1], "sampling_params": {"temperature": -1 if number % 4 == 3 else 0}}
            async with http.post(f"{url}/generate", json=body) as answer:
                await answer.read()
        async with http.get(metrics) as answer:
            engines = parse_outcomes(await answer.read())
    assert engines[good].done >= 1
    assert engines[good].failed == 0
    assert engines[bad].done == 0
    assert engines[bad].failed >= 1
    assert engines[prefill] == Tally(engines[good].done, engines[bad].failed)


@asynccontextmanager
async def routing(http: aiohttp.ClientSession, prefill: str, *decodes: str) -> AsyncIterator[tuple[str, str]]:
    """Run the real router; yields its URL and that of its metrics."""
    host = pod_address()
    command = ["-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", host, "--port", "8000"]
    command += ["--prometheus-host", host, "--prometheus-port", "29000", "--policy", "round_robin"]
    command += ["--decode-policy", "random", "--disable-circuit-breaker", "--log-level", "error"]
    command += ["--prefill", prefill, "8998", *(part for decode in decodes for part in ("--decode", decode))]
    quiet = asyncio.subprocess.DEVNULL
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=environment, stdout=quiet, stderr=quiet
    )
    try:
        async with asyncio.timeout(40):
            await until_known(http, f"http://{host}:8000/workers", 1 + len(decodes))
        yield f"http://{host}:8000", f"http://{host}:29000/metrics"
    finally:
        process.terminate()
        await process.wait()


async def until_known(http: aiohttp.ClientSession, url: str, engines: int) -> None:
    """Wait until the router lists so many healthy engines."""
    while True:
        try:
            async with http.get(url) as answer:
                workers = (await answer.json())["workers"]
        except (aiohttp.ClientError, OSError):
            workers = []
        if sum(worker["is_healthy"] for worker in workers) == engines:
            return
        await asyncio.sleep(0.2)


async def test_a_router_is_unreachable_after_two_failed_connections_until_one_succeeds() -> None:
    told: list[Key] = []
    seen = []
    async with session(4) as http:
        outcomes = RouterOutcomes(http, now=lambda: NOW, on_sample=lambda *_: None, on_reach=told.append)
        async with a_router() as address:
            outcomes.watch(SERVICE, [("uid", address)])
            seen.append(outcomes.reachable("uid"))
            await outcomes.look()
            seen.append(outcomes.reachable("uid"))
        for _ in range(3):
            await outcomes.look()
            seen.append(outcomes.reachable("uid"))
        async with a_router(at=address):
            await outcomes.look()
            seen.append(outcomes.reachable("uid"))
        outcomes.watch(SERVICE, ())
        seen.append(outcomes.reachable("uid"))
    assert seen == [None, True, None, False, False, True, None]
    assert told == [SERVICE] * 3


async def test_a_router_that_answers_late_or_wrongly_is_reachable() -> None:
    async with session(4) as http, a_router(status=500) as wrong, a_router(answers=False) as late:
        outcomes = RouterOutcomes(http, now=lambda: NOW, on_sample=lambda *_: None, on_reach=lambda _: None)
        outcomes.watch(SERVICE, [("wrong", wrong), ("late", late)])
        for _ in range(2):
            await outcomes.look()
        assert outcomes.reachable("wrong")
        assert outcomes.reachable("late")
