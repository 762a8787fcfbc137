"""The edge alone, around a handler of the test's."""

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web
from pdpool_reference import http_edge
from pdpool_reference.http_edge import listen, read_body

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def length(request):
    return web.json_response({"bytes": len(await read_body(request))})


async def broken(request):
    raise ZeroDivisionError("a prompt")


@asynccontextmanager
async def connected(handler):
    """Streams to a server that has this handler."""
    app, runners = web.Application(client_max_size=100), []
    app.add_routes([web.post("/", handler)])
    port = await listen(app, "127.0.0.1", 0, runners)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield reader, writer
    writer.close()
    for runner in runners:
        await runner.cleanup()


async def error_of(reader):
    """Status, and the error in the body."""
    status = int((await reader.readline()).split()[1])
    text = await reader.readuntil(b"\r\n\r\n")
    size = int(next(line.split(b":")[1] for line in text.lower().split(b"\r\n") if line.startswith(b"content-length")))
    return status, json.loads(await reader.readexactly(size)).get("error")


async def test_incomplete_body_is_refused_after_limit(monkeypatch):
    monkeypatch.setattr(http_edge, "BODY_S", 0.05)
    async with connected(length) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 50\r\n\r\nabc")
        status, error = await error_of(reader)
    assert (status, error["code"]) == (408, "request_timeout")
    assert "the rest did not come" in error["message"]


async def test_handler_fault_reveals_nothing_of_request():
    async with connected(broken) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
        status, error = await error_of(reader)
    assert (status, error["type"], error["code"]) == (500, "server_error", "internal_error")
    assert "prompt" not in error["message"]


async def test_the_application_s_own_bound_holds():
    async with connected(length) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 200\r\n\r\n" + b"x" * 200)
        status, error = await error_of(reader)
    assert (status, error["code"]) == (413, "request_entity_too_large")
    assert "more than 100 bytes" in error["message"]


async def test_a_connection_serves_one_request_after_the_other():
    async with connected(length) as (reader, writer):
        for _ in range(2):
            writer.write(HEAD + b"Content-Length: 3\r\n\r\nabc")
            assert await error_of(reader) == (200, None)
