"""The API client: which objects it changes, what it sends, when it may not write, and which errors it distinguishes."""

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from pdpool_operator.runtime.api import REQUEST_TIMEOUT_S, Api
from pdpool_operator.runtime.api_errors import (
    ApiError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NameConflictError,
    NotFoundError,
    UnavailableError,
)
from pdpool_operator.runtime.resources import PODS, SECRETS, STATEFUL_SETS, Resource
from pdpool_operator.runtime.write_budget import NotLeaderError

from tests.serving import serving

OURS = {"kind": "PrefillPool", "name": "chat", "uid": "owner-1", "controller": True}
PATH = "/apis/apps/v1/namespaces/llm/statefulsets/x"


def child(**meta: Any) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "x", "namespace": "llm", "ownerReferences": [OURS], **meta},
        "spec": {"replicas": 1},
    }


class Server:
    """Answers by (method, path), and records its requests."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], tuple[int, Any]] = {}
        self.asked: list[tuple[str, str, dict[str, str], Any, str]] = []
        self.hang = asyncio.Event()
        self.hang.set()

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        body = json.loads(text) if text else None
        self.asked.append((request.method, request.path, dict(request.query), body, request.content_type))
        await self.hang.wait()
        status, answer = self.answers.get(
            (request.method, request.path), (404, {"reason": "NotFound", "message": "no"})
        )
        answer = answer(request) if callable(answer) else answer
        return answer if isinstance(answer, web.Response) else web.json_response(answer, status=status)

    def writes(self) -> list[tuple[str, str, dict[str, str], Any, str]]:
        return [asked for asked in self.asked if asked[0] != "GET"]


@pytest.fixture
async def server():
    one = Server()
    async with serving(one.handle) as one.url:
        yield one


@pytest.fixture
async def connect(server):
    clients = []

    def make(**options: Any) -> Api:
        client = ApiClient(Configuration(host=server.url))
        clients.append(client)
        return Api(client, **options)

    yield make
    for client in clients:
        await client.close()


async def test_a_child_that_does_not_exist_is_created_without_force(server, connect):
    server.answers["PATCH", PATH] = 201, child(uid="new")
    stored = await connect().apply(STATEFUL_SETS, child())
    assert stored["metadata"]["uid"] == "new"
    ((_, _, query, body, content),) = server.writes()
    assert query == {"fieldManager": "pdpool", "force": "false"}
    assert content == "application/apply-patch+yaml"
    assert "uid" not in body["metadata"]


async def test_a_child_of_ours_is_applied_with_force_and_its_uid(server, connect):
    server.answers["GET", PATH] = 200, child(uid="u7")
    server.answers["PATCH", PATH] = 200, child(uid="u7")
    await connect().apply(STATEFUL_SETS, child(), dry_run=True)
    ((_, _, query, body, _),) = server.writes()
    assert query == {"fieldManager": "pdpool", "force": "true", "dryRun": "All"}
    assert body["metadata"]["uid"] == "u7"


@pytest.mark.parametrize(
    "owners",
    [
        pytest.param([], id="no owner"),
        pytest.param([OURS | {"uid": "another"}], id="another controller"),
        pytest.param([OURS | {"controller": False}], id="ours, but not the controller"),
    ],
)
async def test_somebody_elses_object_is_not_touched(server, connect, owners):
    server.answers["GET", PATH] = 200, child(uid="u7", ownerReferences=owners)
    with pytest.raises(NameConflictError, match="StatefulSet x exists"):
        await connect().apply(STATEFUL_SETS, child())
    assert server.writes() == []


async def test_a_secret_is_written_without_ever_being_read(server, connect):
    path = "/api/v1/namespaces/llm/secrets/x"
    fields = {"f:data": {"f:key": {}}}
    mine = child(uid="u1", managedFields=[{"manager": "pdpool", "fieldsV1": fields}])
    server.answers["PATCH", path] = 200, mine
    await connect().apply_unread(SECRETS, child())
    assert [asked[0] for asked in server.asked] == ["PATCH", "PATCH"]
    assert server.asked[0][2]["dryRun"] == "All"
    assert "dryRun" not in server.asked[1][2]
    theirs = child(uid="u1", managedFields=[{"manager": "kubectl", "fieldsV1": fields}])
    server.answers["PATCH", path] = 200, theirs
    server.asked.clear()
    with pytest.raises(NameConflictError, match="kubectl"):
        await connect().apply_unread(SECRETS, child())
    assert len(server.asked) == 1


async def test_who_may_not_write_sends_nothing_and_may_still_read(server, connect):
    server.answers["GET", PATH] = 200, child(uid="u7")
    api = connect(write_budget=lambda: 0.0)
    for write in (
        api.apply(STATEFUL_SETS, child()),
        api.apply_unread(SECRETS, child()),
        api.apply_status(STATEFUL_SETS, child(uid="u7"), {}),
        api.delete(STATEFUL_SETS, "llm", "x", "u7"),
        api.create(STATEFUL_SETS, child()),
        api.replace(STATEFUL_SETS, child()),
        api.merge(STATEFUL_SETS, "llm", "x", {}),
    ):
        with pytest.raises(NotLeaderError):
            await write
    assert server.writes() == []
    assert await api.get(STATEFUL_SETS, "llm", "x")


async def test_a_write_ends_within_the_time_that_is_left_to_the_leader(server, connect):
    server.hang.clear()
    api = connect(write_budget=lambda: 0.2)
    started = asyncio.get_running_loop().time()
    with pytest.raises(UnavailableError, match=r"no answer within 0\.2 s"):
        await api.merge(STATEFUL_SETS, "llm", "x", {})
    assert asyncio.get_running_loop().time() - started < REQUEST_TIMEOUT_S / 2


@pytest.mark.parametrize("items", [None, [{"kind": "PartialObjectMetadata", "metadata": {"name": "p"}}]])
async def test_metadata_alone_is_asked_for_by_its_type_and_nothing_there_is_no_error(server, connect, items):
    accepted = []

    def answer(request: web.Request) -> dict[str, Any]:
        accepted.append(request.headers["Accept"])
        return {"kind": "PartialObjectMetadataList", "metadata": {}, "items": items}

    server.answers["GET", "/api/v1/namespaces/llm/pods"] = 200, answer
    found = [pod async for pod in connect().list(PODS, "llm", metadata_only=True)]
    assert accepted == ["application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"]
    assert [(pod["kind"], pod["metadata"]["name"]) for pod in found] == ([("Pod", "p")] if items else [])


async def test_lists_come_page_by_page_with_their_kind(server, connect):
    def page(request: web.Request) -> dict[str, Any]:
        first = "continue" not in request.query
        meta = {"continue": "more"} if first else {}
        return {"metadata": meta, "items": [{"metadata": {"name": "a" if first else "b"}}]}

    server.answers["GET", "/api/v1/namespaces/llm/pods"] = 200, page
    found = [pod async for pod in connect().list(PODS, "llm", "app=x", "spec.nodeName=n")]
    assert [(pod["kind"], pod["metadata"]["name"]) for pod in found] == [("Pod", "a"), ("Pod", "b")]
    assert [asked[2].get("continue") for asked in server.asked] == [None, "more"]
    assert all(asked[2]["labelSelector"] == "app=x" for asked in server.asked)
    assert all(asked[2]["fieldSelector"] == "spec.nodeName=n" for asked in server.asked)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, InvalidError),
        (401, ForbiddenError),
        (403, ForbiddenError),
        (404, NotFoundError),
        (409, ConflictError),
        (418, ApiError),
        (422, InvalidError),
        (429, UnavailableError),
        (500, UnavailableError),
        (504, UnavailableError),
    ],
)
async def test_errors_carry_the_servers_own_words(server, connect, status, error):
    server.answers["PUT", PATH] = status, {"reason": "R", "message": "spec.x: Invalid value"}
    with pytest.raises(error) as caught:
        await connect().replace(STATEFUL_SETS, child())
    assert caught.value.message == "spec.x: Invalid value"
    assert caught.value.reason == "R"
    assert "update /apis/apps" in str(caught.value)


async def test_a_500_for_an_object_that_apply_cannot_read_is_a_refusal_of_the_object(server, connect):
    message = "failed to create typed patch object (llm/x; apps/v1, Kind=StatefulSet): .spec.a: expected string"
    server.answers["PATCH", PATH] = 500, {"message": message}
    with pytest.raises(InvalidError, match="expected string"):
        await connect().apply(STATEFUL_SETS, child())


async def test_a_delete_names_the_uid_and_is_content_when_the_object_is_gone(server, connect):
    await connect().delete(PODS, "llm", "x", "u7", grace_period_s=30)
    ((method, path, _, body, _),) = server.asked
    assert (method, path) == ("DELETE", "/api/v1/namespaces/llm/pods/x")
    assert body["preconditions"] == {"uid": "u7"}
    assert body["gracePeriodSeconds"] == 30


async def test_nobody_there_is_unavailable_and_every_call_is_counted(server, connect):
    calls: list[tuple[str, str, int]] = []
    api = connect(on_call=lambda verb, plural, status: calls.append((verb, plural, status)))
    assert await api.get(PODS, "llm", "x") is None
    server.url = "http://127.0.0.1:1"
    with pytest.raises(UnavailableError):
        await connect(on_call=lambda verb, plural, status: calls.append((verb, plural, status))).get(PODS, "a", "b")
    assert calls == [("get", "pods", 404), ("get", "pods", 0)]


def test_names_cannot_break_out_of_their_path():
    assert Resource("", "v1", "pods", "Pod").path("a/b", "../c") == "/api/v1/namespaces/a%2Fb/pods/..%2Fc"


def told(*events: tuple[str, dict[str, Any]]) -> web.Response:
    return web.Response(text="".join(json.dumps({"type": kind, "object": obj}) + "\n" for kind, obj in events))


async def test_history_is_what_was_since_in_order_deleted_ones_too(server, connect):
    states = [{"metadata": {"uid": "u1", "resourceVersion": version}} for version in ("8", "9")]
    server.answers["GET", "/api/v1/namespaces/llm/pods"] = 200, told(("MODIFIED", states[0]), ("DELETED", states[1]))
    assert await connect().history(PODS, "llm", "a=b", "7") == tuple(states)
    query = {"watch": "1", "resourceVersion": "7", "timeoutSeconds": "5", "labelSelector": "a=b"}
    assert server.asked == [("GET", "/api/v1/namespaces/llm/pods", query, None, "application/json")]


@pytest.mark.parametrize("as_event", [False, True])
async def test_history_that_the_server_has_forgotten_is_gone(server, connect, as_event):
    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 7 (9)"}
    answer = (200, told(("ERROR", status))) if as_event else (410, status)
    server.answers["GET", "/api/v1/pods"] = answer
    with pytest.raises(GoneError, match="too old resource version"):
        await connect().history(PODS, None, "", "7")


@pytest.mark.parametrize("body", ["<html>", "[1]", ""])
async def test_an_answer_that_is_no_object_is_no_answer(server, connect, body):
    server.answers["GET", PATH] = 200, web.Response(text=body)
    with pytest.raises(UnavailableError):
        await connect().get(STATEFUL_SETS, "llm", "x")


async def test_adopting_merges_the_owner_into_the_others(server, connect):
    server.answers["PATCH", PATH] = 200, child(uid="u7")
    await connect().adopt(STATEFUL_SETS, "llm", "x", "u7", OURS)
    ((_, _, query, body, content),) = server.writes()
    assert content == "application/strategic-merge-patch+json"
    assert body == {"metadata": {"ownerReferences": [OURS], "uid": "u7"}}
    assert query == {"fieldManager": "pdpool"}


async def test_adopting_what_is_gone_does_nothing(server, connect):
    await connect().adopt(STATEFUL_SETS, "llm", "x", "u7", OURS)
    assert len(server.writes()) == 1


async def endless(status: int, request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(status=status)
    await answer.prepare(request)
    while True:
        await answer.write(b"x" * 65536)


class TestTextOfAPod:
    """Behind the proxy of the API server, which passes on each answer of a pod."""

    PATH = "/api/v1/namespaces/llm/pods/x:30000/proxy/metrics"

    async def test_parts_are_sifted_as_they_arrive(self, server, connect):
        server.answers["GET", self.PATH] = 200, web.Response(text="a" * 300_000 + "b")
        kept = await connect().text(PODS, self.PATH, take=lambda part: part.replace(b"a", b""))
        assert kept == "b"

    async def test_refused_part_ends_an_endless_answer(self, server, connect):
        def refuse(_: bytes) -> bytes:
            raise ValueError("too long")

        async with serving(partial(endless, 200)) as server.url:
            with pytest.raises(ValueError, match="too long"):
                await connect().text(PODS, self.PATH, take=refuse)

    async def test_endless_refusal_is_cut(self, server, connect):
        async with serving(partial(endless, 500)) as server.url:
            with pytest.raises(UnavailableError, match="xxx"):
                await connect().text(PODS, self.PATH)
