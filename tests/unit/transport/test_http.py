import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.transport import http
from pdpool_connector.transport.http import HttpServer, Page

TIMEOUTS = Timeouts()
START_S, FIRST_S, IDLE_S = TIMEOUTS.http_start_s, TIMEOUTS.http_first_s, TIMEOUTS.http_idle_s
LARGE = bytes(16 << 20)
"""More than the buffers of two sockets hold."""


def test_connection_just_before_close_is_closed() -> None:
    server = HttpServer("127.0.0.1")
    port = server.serve(0, {"/": Page("text/plain", lambda: b"")})
    clients: list[socket.socket] = []
    busy, closing = threading.Event(), threading.Event()

    async def connect_while_the_loop_is_held() -> None:
        clients.extend(socket.create_connection(("127.0.0.1", port), timeout=START_S) for _ in range(3))
        busy.set()
        assert closing.wait(START_S)

    connected = server.submit(connect_while_the_loop_is_held())
    assert busy.wait(START_S)
    closer = threading.Thread(target=server.close)
    closer.start()
    while not server._loop._ready:
        pass
    closing.set()
    closer.join()
    connected.result(0)
    for client in clients:
        with client:
            assert client.recv(1) == b"", "closed by the server itself, not by the garbage collector"


@pytest.fixture
def server(request) -> Iterator[HttpServer]:
    made = HttpServer("127.0.0.1", getattr(request, "param", None))
    yield made
    made.close()


@pytest.mark.parametrize("step", ["result", "join"])
def test_interrupted_close_is_completed_by_the_next(server, monkeypatch, step) -> None:
    go_on = threading.Event()
    server._loop.call_soon_threadsafe(go_on.wait, START_S)  # there is more to end than one moment is enough for
    wait = Future.result

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def released(future: Future[None], timeout_s: float) -> None:
        go_on.set()
        wait(future, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted if step == "result" else released)
        patch.setattr(server._thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            server.close()
    monkeypatch.setattr(Future, "result", released)
    server.close()
    assert not server._thread.is_alive()
    assert server._loop.is_closed()


FIRST, IDLE = Timeouts(http_first_s=0.5), Timeouts(http_idle_s=0.5)


@pytest.mark.parametrize(
    ("server", "said", "answer"),
    [
        (FIRST, b"", b""),
        (FIRST, b"GET / HTTP/1.1\r\nHost:", b""),
        (IDLE, b"GET / HTTP/1.1\r\nHost: me\r\n\r\n", b"the page"),
        (IDLE, b"GET / HTTP/1.1\r\nHost: me\r\n\r\nGET / HT", b"the page"),
    ],
    indirect=["server"],
)
def test_unfinished_request_is_cut_off(server, said, answer) -> None:
    port = server.serve(0, {"/": Page("text/plain", lambda: b"the page")})
    with connect(port) as client:
        client.sendall(said)
        heard = b"".join(iter(lambda: client.recv(1024), b""))
    assert heard.endswith(answer)
    assert bool(heard) == bool(answer)


def test_idle_client_may_stay_longer(server) -> None:
    port = server.serve(0, {"/": Page("text/plain", lambda: b"the page")})
    with connect(port) as client:
        assert ask(client).endswith(b"the page")
        pass_time(server, FIRST_S + 1)
        assert ask(client).endswith(b"the page")
        pass_time(server, IDLE_S - 1)
        assert ask(client).endswith(b"the page")
        pass_time(server, IDLE_S + 1)
        assert client.recv(1) == b""


def pass_time(server: HttpServer, seconds: float) -> None:
    """Once the server is done with all that has come, put the clock of its loop forward, and let it look."""
    settle(server)
    clock = server._loop.time
    server._loop.time = lambda: clock() + seconds
    settle(server)


def settle(server: HttpServer) -> None:
    for _ in range(5):
        server.submit(asyncio.sleep(0)).result(START_S)


def test_connections_are_bounded(server, monkeypatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 2)
    port = server.serve(0, {"/": Page("text/plain", lambda: b"the page")})
    first, second = connect(port), connect(port)
    for client in (first, second):
        assert ask(client).endswith(b"the page")
    with connect(port) as third:
        assert third.recv(1) == b""
    with first, second:
        assert ask(first).endswith(b"the page")
        for client in (first, second):
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b"", "the server has seen its end"
    settle(server)  # and tidied up
    with connect(port) as fourth:
        assert ask(fourth).endswith(b"the page")


@pytest.mark.parametrize("server", [Timeouts(http_unread_s=0.3)], indirect=True)
def test_client_that_reads_nothing_is_cut_off(server, monkeypatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 1)
    port = server.serve(0, {"/": Page("text/plain", lambda: LARGE), "/small": Page("text/plain", lambda: b"the page")})
    with connect(port, receive_buffer=4096) as deaf:
        deaf.sendall(b"GET / HTTP/1.1\r\nHost: me\r\n\r\n" * 100)
        assert deaf.recv(1), "the server has begun to answer"
        deadline = time.monotonic() + 30
        heard, pause = b"", threading.Event()
        while not heard and time.monotonic() < deadline:
            with connect(port) as other, contextlib.suppress(ConnectionError):
                heard = ask(other, "/small")
            pause.wait(0.05)
    assert heard.endswith(b"the page")


@pytest.mark.parametrize("server", [Timeouts(http_unread_s=4.0)], indirect=True)
def test_slow_client_gets_the_whole_answer(server) -> None:
    port = server.serve(0, {"/": Page("text/plain", lambda: LARGE)})
    with connect(port, receive_buffer=4096) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: me\r\nConnection: close\r\n\r\n")
        began = time.monotonic()
        pause = threading.Event()
        heard = bytearray()
        while time.monotonic() - began < 1.25 * 4.0:
            heard += slow.recv(4096)
            pause.wait(0.1)
        assert len(heard) < len(LARGE), "the answer takes longer than a client may read nothing of it"
        while piece := slow.recv(1 << 20):
            heard += piece
    assert heard.endswith(LARGE)


def connect(port: int, *, receive_buffer: int | None = None) -> socket.socket:
    if receive_buffer is not None:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(START_S)
        client.connect(("127.0.0.1", port))
        return client
    return socket.create_connection(("127.0.0.1", port), timeout=START_S)


def ask(client: socket.socket, path: str = "/") -> bytes:
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: me\r\n\r\n".encode())
    answer = b""
    while not answer.endswith(b"the page") and (piece := client.recv(1024)):
        answer += piece
    return answer
