"""A purge goes to one rank's admin endpoint, signed for its pod. Every answer has an outcome."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from pdpool_connector.transport.tokens import TokenVerifier
from pdpool_operator.api.names import ADMIN_PORT
from pdpool_operator.controller.engines import Engines
from pdpool_operator.observe.http import session
from pdpool_operator.plan.model import Purge
from pdpool_operator.runtime.keys import Keys
from pdpool_operator.runtime.write_budget import NotLeaderError

from tests.serving import pod_address

KEYS = Keys({1: b"0123456789abcdef0123456789abcdef"})
IP = pod_address()
PURGE = Purge("pod-1", IP, 1, older_than_s=30.0, reason="requests that leaked", key_epoch=1)


class Admin:
    """The admin endpoint of rank 1, as a connector has it."""

    def __init__(self) -> None:
        self.gate = TokenVerifier(KEYS.public(1), "pod-1")
        self.bodies: list[Any] = []
        self.status, self.answer = 200, '{"purged": 3}'

    async def purge(self, request: web.Request) -> web.Response:
        assert self.gate.admit(request.headers["Authorization"], "purge") == "operator x"
        self.bodies.append(await request.json())
        return web.Response(status=self.status, text=self.answer)


@pytest.fixture
async def admin() -> AsyncIterator[Admin]:
    one, app = Admin(), web.Application()
    app.router.add_post("/v1/purge", one.purge)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, IP, ADMIN_PORT + 1).start()
    yield one
    await runner.cleanup()


@pytest.fixture
async def engines(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engines]:
    monkeypatch.setattr("pdpool_operator.controller.engines.TIMEOUT_S", 60.0)
    async with session(4) as http:
        yield Engines(http, KEYS, "operator x")


async def test_purge_is_signed_and_counts_handoffs(admin: Admin, engines: Engines) -> None:
    purged = await engines.purge(PURGE)
    assert (purged.outcome, purged.count, purged.words) == ("given", 3, "")
    assert admin.bodies == [{"older_than_s": 30.0, "reason": "requests that leaked"}]


async def test_refusal_carries_the_connectors_words(admin: Admin, engines: Engines) -> None:
    admin.status, admin.answer = 403, "read only"
    purged = await engines.purge(PURGE)
    assert (purged.outcome, purged.words) == ("refused", "http 403: read only")


@pytest.mark.parametrize(
    "answer", ["", "[]", "{}", '{"purged": "many"}', '{"purged": null}', '{"purged": 1e999}', '{"purged": -1}']
)
async def test_answer_without_a_count_is_no_answer(admin: Admin, engines: Engines, answer: str) -> None:
    admin.answer = answer
    purged = await engines.purge(PURGE)
    assert (purged.outcome, purged.words) == ("unanswered", f"invalid: {answer}")


async def test_closed_port_is_no_answer(engines: Engines) -> None:
    purged = await engines.purge(PURGE)
    assert (purged.outcome, purged.words) == ("unanswered", "refused")


async def test_without_the_lease_nothing_is_sent(admin: Admin) -> None:
    async with session(4) as http:
        with pytest.raises(NotLeaderError):
            await Engines(http, KEYS, "operator x", write_budget=lambda: 0.0).purge(PURGE)
    assert admin.bodies == []
