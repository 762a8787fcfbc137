"""Pure parts of the demo."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import click
import pytest
import yaml

from dev.demo import down, questions, stuck
from dev.demo.engine import ENGINES
from dev.demo.install import STUCK_AFTER_S, demo_objects, helm_values
from dev.demo.lock import alone
from dev.demo.screen import DemoError, Screen
from dev.demo.story import Figures
from dev.demo.target import CurrentContext, Images
from dev.shell import CommandError

EXAMPLE = """
apiVersion: pdpool.dev/v1alpha1
kind: PrefillPool
metadata: {name: chat}
spec: {replicas: 2}
---
apiVersion: pdpool.dev/v1alpha1
kind: DecodePool
metadata: {name: chat}
spec: {replicas: 2%s}
---
apiVersion: pdpool.dev/v1alpha1
kind: DisaggregatedService
metadata: {name: chat}
spec: {prefill: {poolRef: {name: chat}}, decode: {poolRef: {name: chat}}}
"""


@pytest.mark.parametrize(
    ("template", "args"),
    [
        ("", ["--enable-faults"]),
        (
            ", template: {spec: {containers: [{name: engine, args: [--kv-pages=512]}]}}",
            ["--kv-pages=512", "--enable-faults"],
        ),
        (", template: {spec: {containers: [{name: side}]}}", ["--enable-faults"]),
    ],
)
def test_faults_are_enabled_on_decode_engines_only_and_said(template: str, args: list[str]) -> None:
    objects, changes = demo_objects(EXAMPLE % template, ENGINES["reference"], "engine:1")
    prefill, decode, service = objects
    containers = {c["name"]: c for c in decode["spec"]["template"]["spec"]["containers"]}
    assert containers["engine"]["args"] == args
    assert "template" not in prefill["spec"]
    assert service["spec"]["stuckAfterSeconds"] == STUCK_AFTER_S
    assert [change.split(":")[0] for change in changes] == ["DecodePool", "DisaggregatedService"]


def test_questions_are_32_different_ones_of_many_lengths() -> None:
    asked = questions.questions()
    assert len(asked) == len(set(asked)) == 32
    assert "Japan" in asked[questions.EXAMPLE]
    assert min(map(len, asked)) < 40
    assert max(map(len, asked)) > 16 * 16


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("decode chat-decode-1 rank 0: engine loop has not run for 12 s while its connector answers", True),
        ("decode chat-decode-0 rank 0: engine loop has not run for 12 s while its connector answers", False),
        ("Hand-off queues are empty or move", False),
    ],
)
def test_only_a_message_with_the_frozen_engine_names_it(message: str, named: bool) -> None:
    assert stuck.names_instance(message, "1") is named


def test_the_last_line_has_every_figure() -> None:
    figures = Figures(ttft_ms=123.4, requests=32, asked=32, kv_bytes=1024, apply_to_ready_s=9.87)
    figures.freeze = stuck.Outcome(fire_s=40.04, resolve_s=7.0, completed=12)
    assert figures.line() == (
        "demo ok: ttft_ms=123 requests=32/32 kv_bytes=1024 apply_to_ready_s=9.9 alert_fire_s=40.0 alert_resolve_s=7.0"
    )


def test_windows_of_the_demo_are_among_the_printed_values() -> None:
    values = yaml.safe_dump(helm_values(Images("localhost", "dev", "localhost/prometheus:1", "abc")))
    assert "bootstrapQueueStuck: 15s" in values
    assert "noProgress: 12s" in values


def test_a_second_demo_is_refused_with_the_process_of_the_first(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PDPOOL_CACHE", str(tmp_path))
    with alone(), pytest.raises(click.ClickException, match=rf"as process {os.getpid()} .*Ctrl-C"), alone():
        pytest.fail("two demos at once")
    with alone():
        "the first has ended"


class _Pod(BaseHTTPRequestHandler):
    """Answers each request with its own content."""

    def do_GET(self) -> None:
        self.send_response(404 if self.path == "/nothing" else 200)
        self.end_headers()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.wfile.write(json.dumps([self.command, self.path, body]).encode())

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


class _Walled(CurrentContext):
    """A cluster with enforced NetworkPolicies: the API server cannot reach pods, but a forwarded port can."""

    def __init__(self, url: str) -> None:
        self._url = url

    def kubectl(self, *arguments: str, **_: object) -> str:
        raise CommandError(f"kubectl {arguments}: timed out")

    @contextlib.contextmanager
    def reach(self, namespace: str, kind: str, name: str, port: int) -> Iterator[str]:
        assert (namespace, kind, name, port) in {("llm", "pod", "chat-decode-0-0", port) for port in (9400, 30000)}
        yield self._url


@pytest.fixture
def walled() -> Iterator[_Walled]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pod) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield _Walled(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


def test_engines_are_asked_past_the_api_server_which_network_policies_keep_out(walled: _Walled) -> None:
    assert walled.ask_pod("llm", "chat-decode-0-0", 9400, "/v1/state") == ["GET", "/v1/state", ""]
    assert walled.ask_pod("llm", "chat-decode-0-0", 30000, "/faults", b"{}") == ["POST", "/faults", "{}"]
    with pytest.raises(DemoError, match=r"chat-decode-0-0, port 9400, did not answer /nothing .*404"):
        walled.ask_pod("llm", "chat-decode-0-0", 9400, "/nothing")
    stuck._freeze(Screen(), walled, ENGINES["reference"], "chat-decode-0-0", frozen=True)


class _Cluster:
    """Counts its requests."""

    def __init__(self) -> None:
        self.asked = []

    def stop(self) -> None:
        self.asked.append("stop")

    def kubectl(self, *arguments: str, **_: object) -> str:
        self.asked.append(arguments[0])
        return ""

    def get(self, *arguments: str) -> dict[str, list[object]]:
        self.asked.append(f"get {arguments[0]}")
        return {"items": []}


@pytest.mark.parametrize(("stops", "asked"), [(True, ["stop"]), (False, ["get", "get namespaces"])])
def test_a_cluster_of_our_own_goes_without_being_emptied_first(stops: bool, asked: list[str]) -> None:
    cluster = _Cluster()
    down.everything(Screen(), cluster, stops=stops)
    assert cluster.asked == asked
