"""The router client: changes count when they show, invalid answers are unknown, keys belong to one service."""

import asyncio

import pytest
from aiohttp import web
from pdpool_operator.api.names import ROUTER_HTTP_PORT, Role
from pdpool_operator.observe import routers
from pdpool_operator.observe.http import Unanswered, session
from pdpool_operator.observe.routers import RouterClient, parse_workers
from pdpool_operator.runtime.write_budget import NotLeaderError

from tests.serving import pod_address


class Router:
    """A router's control endpoints. A change shows in its list `lag` reads after the request."""

    def __init__(self) -> None:
        self.ip = pod_address()
        self.workers: dict[str, dict] = {}
        self.pending: list = []
        self.lag = 0
        self.status = {"GET": 200, "POST": 202, "DELETE": 202}
        self.hang = asyncio.Event()
        self.hang.set()
        self.posted: list[dict] = []

    async def handle(self, request: web.Request) -> web.Response:
        await self.hang.wait()
        if request.headers.get("Authorization") != "Bearer secret":
            return web.Response(status=401)
        if self.status[request.method] >= 300:
            return web.Response(status=self.status[request.method], text="why")
        if request.method == "POST":
            self.posted.append(body := await request.json())
            worker = {"id": f"id-{len(self.posted)}", "is_healthy": True, **body}
            self.pending.append((self.lag, lambda: self.workers.update({worker["id"]: worker})))
        elif request.method == "DELETE":
            gone = request.path.rsplit("/", 1)[1]
            self.pending.append((self.lag, lambda: self.workers.pop(gone, None)))
        else:
            due = [change for lag, change in self.pending if lag <= 0]
            self.pending = [(lag - 1, change) for lag, change in self.pending if lag > 0]
            for change in due:
                change()
            return web.json_response({"workers": list(self.workers.values()), "total": len(self.workers)})
        return web.json_response({"status": "accepted"}, status=202)


@pytest.fixture
async def router():
    one = Router()
    app = web.Application()
    app.router.add_route("*", "/workers", one.handle)
    app.router.add_route("*", "/workers/{id}", one.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, one.ip, ROUTER_HTTP_PORT).start()
    yield one
    await runner.cleanup()


@pytest.fixture
async def client(monkeypatch):
    monkeypatch.setattr(routers, "POLL_S", (0.0, 0.0, 0.0, 0.0))
    async with session(4) as http:
        yield RouterClient(http, timeout_s=30.0)


async def test_an_engine_that_is_added_shows_with_its_role_and_port(router, client):
    assert await client.add(router.ip, "secret", "http://10.0.0.1:30000", Role.PREFILL, 8998)
    (worker,) = await client.workers(router.ip, "secret")
    assert (worker.url, worker.role, worker.bootstrap_port) == ("http://10.0.0.1:30000", Role.PREFILL, 8998)
    assert await client.add(router.ip, "secret", "http://10.0.0.2:30000", Role.DECODE, None)
    assert "bootstrap_port" not in router.posted[1]


async def test_a_change_is_awaited_until_the_list_shows_it(router, client):
    router.lag = 2
    assert await client.add(router.ip, "secret", "http://10.0.0.1:30000", Role.DECODE, None)
    (worker,) = await client.workers(router.ip, "secret")
    assert await client.remove(router.ip, "secret", worker.id)
    assert await client.workers(router.ip, "secret") == ()


async def test_a_change_that_does_not_show_in_time_is_not_said_to_be_done(router, client):
    router.lag = 50
    assert not await client.add(router.ip, "secret", "http://10.0.0.1:30000", Role.DECODE, None)


async def test_removing_what_is_not_there_is_done(router, client):
    router.status["DELETE"] = 404
    assert await client.remove(router.ip, "secret", "id-9")


@pytest.mark.parametrize("status", [400, 401, 403, 500, 302])
async def test_a_refusal_is_said_with_its_status(router, client, status):
    router.status["POST"] = router.status["DELETE"] = status
    with pytest.raises(Unanswered, match=f"http {status}"):
        await client.add(router.ip, "secret", "http://10.0.0.1:30000", Role.DECODE, None)
    with pytest.raises(Unanswered, match=f"http {status}"):
        await client.remove(router.ip, "secret", "id-1")


async def test_a_wrong_key_and_silence_are_unknown(router, client):
    with pytest.raises(Unanswered, match="http 401"):
        await client.workers(router.ip, "wrong")
    with pytest.raises(Unanswered, match="refused"):
        await client.workers(pod_address(), "secret")


async def test_a_hang_is_unknown(router):
    router.hang.clear()
    async with session(4) as http:
        with pytest.raises(Unanswered, match="timeout"):
            await RouterClient(http, timeout_s=0.2).workers(router.ip, "secret")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"workers": 1}', b'{"workers": [{"id": "../x", "url": "u", "worker_type": "decode"}]}']
)
def test_what_is_no_worker_list_is_unknown(body):
    with pytest.raises(Unanswered, match="invalid"):
        parse_workers(body)


def test_a_worker_of_a_type_that_has_no_place_matches_no_engine():
    (worker,) = parse_workers(b'{"workers": [{"id": "a", "url": "u", "worker_type": "regular"}]}')
    assert worker.role not in {Role.PREFILL, Role.DECODE}


async def test_one_who_may_not_write_changes_no_list_but_may_look(router):
    async with session(4) as http:
        client = RouterClient(http, write_budget=lambda: 0.0)
        assert await client.workers(router.ip, "secret") == ()
        for change in (
            client.add(router.ip, "secret", "http://10.0.0.1:30000", Role.DECODE, None),
            client.remove(router.ip, "secret", "id-1"),
        ):
            with pytest.raises(NotLeaderError, match="was not sent"):
                await change
    assert not router.posted
    assert not router.pending


async def test_a_change_ends_before_another_operator_may_write(router):
    router.hang.clear()
    async with session(4) as http:
        client = RouterClient(http, timeout_s=60.0, write_budget=lambda: 0.1)
        with pytest.raises(Unanswered, match="timeout"):
            async with asyncio.timeout(30):
                await client.add(router.ip, "secret", "http://10.0.0.1:30000", Role.DECODE, None)
