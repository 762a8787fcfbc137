"""Greeting a Mooncake process, and ending what Mooncake asks of one that is silent; over real sockets."""

import socket
import threading
import time
from contextlib import contextmanager

import pytest
from pdpool_connector.backends.mooncake_probe import answers, bounded


@contextmanager
def listening(host="127.0.0.1"):
    """A socket that the kernel accepts connections for, and its session."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as door:
        port = door.getsockname()[1]
        yield door, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def saying(answer, host="127.0.0.1"):
    """The session of a peer that reads a greeting, sends `answer` and closes; and what it has read."""
    heard = []

    def greet():
        connection, _ = door.accept()
        with connection:
            heard.append(connection.recv(4096))
            connection.sendall(answer)

    with listening(host) as (door, session):
        thread = threading.Thread(target=greet)
        thread.start()
        try:
            yield session, heard
        finally:
            thread.join(10)


GOOD = (3).to_bytes(8, "little") + b"\x03{}"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_answers_a_probe_is_there(host):
    with saying(GOOD, host) as (session, heard):
        assert answers(session, 30.0) is True
    assert heard == [(4).to_bytes(8, "little") + b"\x03{}\n"]


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", GOOD[:8] + b"\x01{}", b"x" * 10_000])
def test_who_says_something_else_is_not_mooncake(said):
    with saying(said) as (session, _):
        assert answers(session, 30.0) is False


def test_where_nobody_listens_nobody_answers():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so that nobody else comes to listen there meanwhile
        assert answers(f"127.0.0.1:{taken.getsockname()[1]}", 30.0) is False


@pytest.mark.parametrize("session", ["a..b:80", "x" * 100 + ":80", "127.0.0.1:99999"])
def test_at_a_session_that_cannot_be_called_nobody_answers(session):
    assert answers(session, 30.0) is False


def test_silence_is_not_an_answer_and_ends_on_time():
    with listening() as (_, session):
        begun = time.monotonic()
        assert answers(session, 0.3) is None
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_connections_to_that_session_are_cut_and_only_when_it_takes_too_long(host):
    with listening(host) as (door, session), listening(host) as (other, _):
        asked, bystander = (socket.create_connection(there.getsockname()[:2], 30) for there in (door, other))
        with asked, bystander:
            with bounded(session, 30.0):
                pass
            asked.sendall(b"in time")
            with bounded(session, 0.1):
                assert asked.recv(1) == b"", "shut down under the hands of who reads"
            with other.accept()[0] as far:
                far.sendall(b"untouched")
                assert bystander.recv(9) == b"untouched"
