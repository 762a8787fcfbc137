"""Spans show each hand-off on both sides, in the request's own trace, with the reason when it failed."""

import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from pdpool_connector import ConnectorConfig, PrefillConnector
from pdpool_connector.installed import install_command
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus
from pdpool_connector.runtime import connector as connector_module
from pdpool_connector.runtime.spans import ENDPOINTS, Spans, open_spans
from pdpool_connector.runtime.transfer import Transfer

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter) -> Spans:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(provider.get_tracer("test"), "decode", 3)


def transfer(room: int = 42) -> Transfer:
    made = Transfer(1, room, "req-1", "", lambda _: None)
    made.attempts = (AttemptId("b" * 32, 7),)
    return made


def test_a_span_has_the_trace_of_the_request_and_what_finds_it_in_the_logs(spans, exporter) -> None:
    one = transfer()
    spans.begin(one, PARENT)
    assert not exporter.get_finished_spans()
    spans.end(one, TransferStatus(Phase.DONE, bytes_moved=4096, releasable=True))
    (span,) = exporter.get_finished_spans()
    assert span.name == "pdpool decode hand-off"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes) == {
        "pdpool.room": 42,
        "pdpool.request_id": "req-1",
        "pdpool.role": "decode",
        "pdpool.rank": 3,
        "pdpool.attempt": "bbbbbbbb/7",
        "pdpool.bytes": 4096,
    }


def test_a_failure_ends_the_span_with_its_reason_and_once(spans, exporter) -> None:
    one = transfer()
    spans.begin(one, None)
    failed = TransferStatus(Phase.FAILED, Cause.PEER_LOST, "prefill p:1 was restarted")
    spans.end(one, failed)
    spans.end(one, failed)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "peer_lost: prefill p:1 was restarted"
    assert (span.attributes["pdpool.cause"], span.attributes["pdpool.releasable"]) == ("peer_lost", False)


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "00-" + "é" * 32])
def test_a_bad_header_is_ignored(spans, exporter, header) -> None:
    one = transfer()
    spans.begin(one, header)
    spans.end(one, TransferStatus(Phase.DONE, releasable=True))
    assert exporter.get_finished_spans()[0].parent is None


def test_a_connector_ends_the_span_of_what_it_fails(spans, exporter, memory, monkeypatch) -> None:
    monkeypatch.setattr(connector_module, "open_spans", lambda *_: spans)
    made = PrefillConnector(ConnectorConfig("127.0.0.1"), memory, lambda: None)
    made.start()
    made.open(9, "req-9", traceparent=PARENT).abort("the client left")
    deadline = time.monotonic() + 30
    while not (finished := exporter.get_finished_spans()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    made.close()
    late = made.open(10, "req-10")
    assert late.status.cause is Cause.SHUTDOWN
    assert f"{finished[0].context.trace_id:032x}" == TRACE
    assert finished[0].status.description == "aborted: the client left"
    assert len(exporter.get_finished_spans()) == 2


def test_spans_reach_an_endpoint_by_otlp_before_the_connector_is_closed(monkeypatch) -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        sent = open_spans("prefill", 0)
        assert sent is not None
        one = transfer()
        sent.begin(one, PARENT)
        sent.end(one, TransferStatus(Phase.DONE, releasable=True))
        sent.close(5.0)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    resource = ExportTraceServiceRequest.FromString(bodies[0]).resource_spans[0]
    assert resource.scope_spans[0].spans[0].trace_id.hex() == TRACE
    assert any(pair.value.string_value == "pdpool-prefill" for pair in resource.resource.attributes)


def test_without_an_endpoint_nothing_is_even_imported() -> None:
    code = """
import sys
from pdpool_connector.runtime.spans import open_spans
assert open_spans("prefill", 0) is None
assert not any(name.startswith("opentelemetry.sdk") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=_without_endpoints(), timeout=240)


def test_a_missing_package_is_named_where_an_endpoint_is_given_and_no_harm_is_done() -> None:
    code = """
import logging, sys
logging.basicConfig()
sys.modules["opentelemetry"] = None
from pdpool_connector.runtime.spans import open_spans
assert open_spans("prefill", 0) is None
"""
    env = _without_endpoints() | {ENDPOINTS[0]: "http://127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=env, timeout=240, capture_output=True, text=True
    )
    assert install_command("otel") in done.stderr


def _without_endpoints() -> dict[str, str]:

    return {name: value for name, value in os.environ.items() if name not in ENDPOINTS}
