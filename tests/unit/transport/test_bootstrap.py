"""Asking a bootstrap registry: answers, wrong answers, none, and who may be asked at all."""

import asyncio
import http.server
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from pdpool_connector.layout.pairing import shard_model
from pdpool_connector.transport import resolve
from pdpool_connector.transport.address import Address, AddressError, is_allowed, parse_address
from pdpool_connector.transport.bootstrap import (
    BOOTSTRAP_PATH,
    MAX_INFO_BYTES,
    BootstrapClient,
    BootstrapError,
    BootstrapInfo,
    RankInfo,
)
from pdpool_connector.transport.http import Asked, HttpServer, Page, Reply
from pdpool_connector.transport.resolve import Resolver

LOOPBACK = ("127.0.0.0/8", "::1/128")
RANK = RankInfo(
    rank=0,
    incarnation="a" * 32,
    control="127.0.0.1:8999",
    shard=shard_model([2], 4)[0],
    protocol=(1, 1),
)
INFO = BootstrapInfo((RANK,))


def ask_bootstrap(prefill: str, networks: tuple[str, ...], timeout_s: float) -> BootstrapInfo:
    return asyncio.run(BootstrapClient(networks).ask(prefill, timeout_s))


def resolve_allowed(address: Address, networks: tuple[str, ...]) -> Address:
    return asyncio.run(Resolver(networks).resolve(address))


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], str]]:
    """Answer every question with the same bytes; give the address."""
    servers = []

    def start(body: bytes, *, path: str = BOOTSTRAP_PATH) -> str:
        server = HttpServer("127.0.0.1")
        servers.append(server)
        return f"127.0.0.1:{server.serve(0, {path: Page('application/json', lambda: body)})}"

    yield start
    for server in servers:
        server.close()


def test_an_answer_comes_back_as_it_was_given(serve) -> None:
    assert ask_bootstrap(serve(msgspec.json.encode(INFO)), LOOPBACK, 30.0) == INFO


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"<html>",
        b'{"ranks":[]}',
        b'{"ranks":' + b"[" * 100_000,
        b'{"other":"\xff\xfe"}',
        msgspec.json.encode(INFO).replace(b"a" * 32, b"a" * 31),
        msgspec.json.encode(INFO).replace(b'"rank":0', b'"rank":1'),
        msgspec.json.encode(INFO).replace(b'"layers":2', b'"layers":3'),
        b"x" * (MAX_INFO_BYTES + 1),
    ],
    ids=[
        *("empty", "object", "list", "html", "no ranks", "deep", "no text"),
        *("incarnation", "numbering", "part", "huge"),
    ],
)
def test_a_wrong_answer_is_worth_another_try(serve, body: bytes) -> None:
    with pytest.raises(BootstrapError) as caught:
        ask_bootstrap(serve(body), LOOPBACK, 30.0)
    assert not caught.value.final


def test_another_http_server_is_no_registry(serve) -> None:
    with pytest.raises(BootstrapError, match="404"):
        ask_bootstrap(serve(b"", path="/else"), LOOPBACK, 30.0)


def test_missing_ranks_are_passed_on() -> None:
    server = HttpServer("127.0.0.1")
    refusal = Reply(503, b'{"error":"of 2 ranks, these are missing: 1 (never registered)","missing":[1]}')
    port = server.serve(0, {}, {("GET", BOOTSTRAP_PATH): lambda _: refusal})
    with pytest.raises(BootstrapError, match=r"missing: 1 \(never registered\)") as caught:
        ask_bootstrap(f"127.0.0.1:{port}", LOOPBACK, 30.0)
    server.close()
    assert not caught.value.final


def test_refusal_is_passed_on_in_one_line() -> None:
    refusal = Reply(503, b'{"error":"later\\nWARNING a line of my own\\u001b[2J","missing":[]}')
    server = HttpServer("127.0.0.1")
    port = server.serve(0, {}, {("GET", BOOTSTRAP_PATH): lambda _: refusal})
    try:
        with pytest.raises(BootstrapError, match=re.escape(r"answered: later\nWARNING a line of my own\x1b[2J")):
            ask_bootstrap(f"127.0.0.1:{port}", LOOPBACK, 30.0)
    finally:
        server.close()


def test_a_redirect_is_not_followed() -> None:
    asked: list[Asked] = []
    server = HttpServer("127.0.0.1")
    port = server.serve(0, {}, {("GET", "/else"): lambda request: asked.append(request) or Reply(200, b"{}")})

    class Redirect(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{port}/else")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Redirect) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        with pytest.raises(BootstrapError, match="HTTP status 302"):
            ask_bootstrap(f"127.0.0.1:{other.server_port}", LOOPBACK, 30.0)
        thread.join(60)
    server.close()
    assert not asked


def test_control_outside_networks_is_refused(serve) -> None:
    body = msgspec.json.encode(INFO).replace(b"127.0.0.1:8999", b"192.0.2.1:8999")
    with pytest.raises(BootstrapError, match=r"192\.0\.2\.1") as caught:
        ask_bootstrap(serve(body), LOOPBACK, 30.0)
    assert caught.value.final


def test_nobody_listening_is_worth_another_try() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so that no other process listens there meanwhile
        with pytest.raises(BootstrapError, match="cannot be reached") as caught:
            ask_bootstrap(f"127.0.0.1:{taken.getsockname()[1]}", LOOPBACK, 30.0)
    assert (caught.value.final, caught.value.refused) == (False, True)


def test_silence_is_waited_for_no_longer_than_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = time.monotonic()
        with pytest.raises(BootstrapError) as caught:
            ask_bootstrap(f"127.0.0.1:{listener.getsockname()[1]}", LOOPBACK, 0.3)
        assert time.monotonic() - begun < 20
        assert not caught.value.refused


def test_dripping_answer_is_cut_off() -> None:
    class Drip(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b" ")
                    time.sleep(0.05)
            except OSError:
                return

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Drip) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(BootstrapError):
            ask_bootstrap(f"127.0.0.1:{server.server_port}", LOOPBACK, 0.5)
        assert time.monotonic() - begun < 20
        thread.join(60)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:8998", Address("10.0.0.1", 8998)),
        ("[::1]:1", Address("::1", 1)),
        ("pod-0.svc:9", Address("pod-0.svc", 9)),
    ],
)
def test_addresses_are_read_and_written(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:1x", "::1:8998"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError):
        parse_address(text)


@pytest.mark.parametrize(
    "host",
    ["a b", "a/b", "user@host", "a\r\nb", "a..b", ".a", "é", "a" * 64, "[http://a]", "[1.2.3.4]x", "[::g]", "[]"],
)
def test_impossible_host_is_no_address(host: str) -> None:
    with pytest.raises(AddressError, match="is no address"):
        parse_address(f"{host}:8998")


def test_a_hundred_silent_hosts_delay_nobody_else(serve) -> None:
    answering = serve(msgspec.json.encode(INFO))

    async def ask_all() -> None:
        client = BootstrapClient(LOOPBACK)
        silent = [asyncio.create_task(client.ask(f"127.0.0.1:{port}", 60.0)) for port in ports]
        await asyncio.sleep(0)
        assert await client.ask(answering, 20.0) == INFO
        assert not any(task.done() for task in silent)
        for task in silent:
            task.cancel()
        await asyncio.gather(*silent, return_exceptions=True)

    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(100)]
    ports = [listener.getsockname()[1] for listener in listeners]
    asyncio.run(ask_all())
    for listener in listeners:
        listener.close()


def test_unanswered_name_delays_no_other(monkeypatch) -> None:
    answer, asked = threading.Event(), []

    def getaddrinfo(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        if host == "silent":
            answer.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(resolve.socket, "getaddrinfo", getaddrinfo)

    async def look_up() -> None:
        resolver = Resolver(LOOPBACK)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(resolver.resolve(Address("silent", 1)), 0.02)
        assert await resolver.resolve(Address("quick", 2)) == Address("127.0.0.1", 2)
        answer.set()
        assert await resolver.resolve(Address("silent", 1)) == Address("127.0.0.1", 1)

    asyncio.run(look_up())
    assert asked.count("silent") == 1


def test_lookups_are_bounded(monkeypatch) -> None:
    answer = threading.Event()

    def getaddrinfo(*_: object, **__: object) -> list[object]:
        answer.wait(60)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(resolve.socket, "getaddrinfo", getaddrinfo)

    async def look_up() -> None:
        resolver = Resolver(LOOPBACK)
        tasks = [asyncio.create_task(resolver.resolve(Address(f"host{n}", 1))) for n in range(resolve.MAX_LOOKUPS)]
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="limit"):
            await resolver.resolve(Address("one-more", 1))
        answer.set()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, socket.gaierror)
        with pytest.raises(OSError, match="not known"):
            await resolver.resolve(Address("one-more", 1))

    asyncio.run(look_up())


def test_lookup_follows_a_missing_thread(monkeypatch) -> None:
    start = threading.Thread.start

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def look_up() -> None:
        resolver = Resolver(LOOPBACK)
        monkeypatch.setattr(threading.Thread, "start", fail)
        with pytest.raises(OSError, match="localhost cannot be looked up: can't start new thread"):
            await resolver.resolve(Address("localhost", 1))
        monkeypatch.setattr(threading.Thread, "start", start)
        assert await asyncio.wait_for(resolver.resolve(Address("localhost", 1)), 60) == Address("127.0.0.1", 1)

    asyncio.run(look_up())


def test_mapped_ipv4_is_checked_as_ipv4() -> None:
    assert is_allowed("::ffff:127.0.0.1", LOOPBACK)
    assert not is_allowed("::ffff:192.0.2.1", LOOPBACK)


def test_only_allowed_networks_are_resolved() -> None:
    assert resolve_allowed(Address("127.0.0.9", 5), LOOPBACK) == Address("127.0.0.9", 5)
    assert resolve_allowed(Address("::1", 5), LOOPBACK) == Address("::1", 5)
    with pytest.raises(AddressError, match=r"192\.0\.2\.1"):
        resolve_allowed(Address("192.0.2.1", 5), LOOPBACK)
