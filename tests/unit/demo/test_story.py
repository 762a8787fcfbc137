"""What `pdpool demo` takes for an answer."""

import socket
import threading
from contextlib import contextmanager

import pytest
from pdpool_reference.demo.launch import LaunchError
from pdpool_reference.demo.story import stream_chat

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data):
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


TEXT = chunk(b'{"choices":[{"delta":{"content":"Paris is"}}]}')


@contextmanager
def server_of(answer, head=HEAD):
    """Where one request gets this answer."""

    def serve():
        connection, _ = listener.accept()
        with connection:
            asked = b""
            while not asked.endswith(b"}"):
                asked += connection.recv(1 << 16)
            connection.sendall(head + answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_stream_with_done_is_an_answer():
    with server_of(TEXT + chunk(b"[DONE]") + END) as url:
        assert list(stream_chat(url, "?")) == ["Paris is"]


@pytest.mark.parametrize("end", [END, b""], ids=["ended", "cut"])
def test_stream_without_done_is_an_error(end):
    with server_of(TEXT + end) as url, pytest.raises(LaunchError, match="without \\[DONE\\]"):
        list(stream_chat(url, "?"))


def test_stream_with_error_event_names_it():
    answer = chunk(b'{"error":{"message":"shutting down"}}') + END
    with server_of(answer) as url, pytest.raises(LaunchError, match="ended in an error: shutting down"):
        list(stream_chat(url, "?"))


def test_error_status_keeps_its_message():
    head = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 33\r\n\r\n"
    answer = server_of(b'{"error":{"message":"peer_lost"}}', head)
    with answer as url, pytest.raises(LaunchError, match=r"the answer was 502: .*peer_lost"):
        list(stream_chat(url, "?"))
