"""A peer whose engine uses another transfer backend: both sides name what the other is."""

import asyncio
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pdpool_connector.transport.bootstrap import BOOTSTRAP_PATH, BootstrapClient, BootstrapError
from pdpool_connector.transport.http import HttpServer, Page


class Other(BaseHTTPRequestHandler):
    """The registry of an engine's own backend."""

    def do_GET(self):
        self.send_response(200 if self.path == "/route" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def other():
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_foreign_registry_ends_the_search(other):
    with pytest.raises(BootstrapError, match="another transfer backend") as caught:
        asyncio.run(BootstrapClient(("127.0.0.0/8",)).ask(other, 5.0))
    assert caught.value.final
    assert other in str(caught.value)
    assert BOOTSTRAP_PATH in str(caught.value)


def test_foreign_client_reads_what_this_is():
    server = HttpServer("127.0.0.1")
    try:
        port = server.serve(0, {"/v1/state": Page("text/plain", lambda: b"")})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/route?prefill_dp_rank=-1")
        with caught.value as answer:
            assert answer.code == 404
            assert "/route is not served here: this is a process of pdpool's connector" in answer.read().decode()
    finally:
        server.close()
