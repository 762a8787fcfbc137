"""Asking a bootstrap registry: answers, wrong answers, none, and who may be asked at all."""

import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from pdpool_connector.transport.address import Address, AddressError, parse_address, resolve_allowed
from pdpool_connector.transport.bootstrap import BOOTSTRAP_PATH, BootstrapError, BootstrapInfo, RankInfo, ask_bootstrap
from pdpool_connector.transport.http import HttpServer, Page

LOOPBACK = ("127.0.0.0/8", "::1/128")
INFO = BootstrapInfo(
    protocol=(1, 1),
    incarnation="a" * 32,
    ranks=(RankInfo(rank=0, control="127.0.0.1:8999"),),
    geometry={"model": "m", "layers": 2},
)


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
    assert ask_bootstrap(serve(msgspec.json.encode(INFO)), LOOPBACK, 2.0) == INFO


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b"<html>", msgspec.json.encode(INFO).replace(b"a" * 32, b"a" * 31), b"x" * 100_000],
    ids=["empty", "object", "list", "html", "incarnation", "huge"],
)
def test_a_wrong_answer_is_worth_another_try(serve, body: bytes) -> None:
    with pytest.raises(BootstrapError) as caught:
        ask_bootstrap(serve(body), LOOPBACK, 2.0)
    assert not caught.value.final


def test_another_http_server_is_no_registry(serve) -> None:
    with pytest.raises(BootstrapError, match="404"):
        ask_bootstrap(serve(b"", path="/else"), LOOPBACK, 2.0)


def test_a_control_channel_outside_the_allowed_networks_is_refused_for_good(serve) -> None:
    body = msgspec.json.encode(INFO).replace(b"127.0.0.1:8999", b"192.0.2.1:8999")
    with pytest.raises(BootstrapError, match=r"192\.0\.2\.1") as caught:
        ask_bootstrap(serve(body), LOOPBACK, 2.0)
    assert caught.value.final


def test_nobody_listening_is_worth_another_try() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(BootstrapError, match="cannot be reached") as caught:
        ask_bootstrap(f"127.0.0.1:{port}", LOOPBACK, 2.0)
    assert not caught.value.final


def test_silence_is_waited_for_no_longer_than_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = time.monotonic()
        with pytest.raises(BootstrapError):
            ask_bootstrap(f"127.0.0.1:{listener.getsockname()[1]}", LOOPBACK, 0.3)
        assert time.monotonic() - begun < 2.0


def test_an_answer_that_drips_is_cut_off_in_time() -> None:
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
        assert time.monotonic() - begun < 3.0
        thread.join(5)


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
def test_a_host_that_nobody_could_look_up_is_no_address(host: str) -> None:
    with pytest.raises(AddressError, match="is no address"):
        parse_address(f"{host}:8998")


def test_only_allowed_networks_are_resolved() -> None:
    assert resolve_allowed(Address("127.0.0.9", 5), LOOPBACK) == Address("127.0.0.9", 5)
    assert resolve_allowed(Address("::1", 5), LOOPBACK) == Address("::1", 5)
    with pytest.raises(AddressError, match=r"192\.0\.2\.1"):
        resolve_allowed(Address("192.0.2.1", 5), LOOPBACK)
