"""The dashboard's panels, drawn from what a Prometheus answers."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit

import pytest

from dev.dashboard import ROWS
from proof.cluster import dashboard

LABELS = {"namespace": "llm", "pool": "chat", "role": "decode", "instance": "1", "service": "chat", "part": "router"}


class Prometheus(BaseHTTPRequestHandler):
    """Answers queries for a metric of one series; refuses those that were told to be bad."""

    bad = ""
    silent = ""

    def do_GET(self) -> None:
        (query,) = parse_qs(urlsplit(self.path).query)["query"]
        assert "$" not in query
        found = (
            [] if self.silent and self.silent in query else [{"metric": LABELS, "values": [[100, "1"], [105, "NaN"]]}]
        )
        self.send_response(400 if self.bad and self.bad in query else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": {"result": found}}).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def prometheus(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Prometheus)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_every_panel_is_read_and_drawn(prometheus, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Prometheus, "silent", "pdpool_leader")
    found = dashboard.read(prometheus, 100.0, 110.0)
    assert list(found) == [panel.title for panels in ROWS.values() for panel in panels]
    assert not found["Operator leads"]
    assert found["Serving parts of services"][0].name == "chat router"
    dashboard.draw(found, 100.0, tmp_path / "x.svg")
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_refused_query_is_an_error(prometheus, monkeypatch) -> None:
    monkeypatch.setattr(Prometheus, "bad", "pdpool_leader")
    with pytest.raises(HTTPError, match="400"):
        dashboard.read(prometheus, 100.0, 110.0)
