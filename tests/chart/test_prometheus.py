"""The local cluster's Prometheus: its discovery, and the targets that its scrape jobs keep."""

import json
import re
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from pdpool_operator.api import names
from pdpool_reference.demo.launch import free_port

from dev.prometheus.deploy import manifests, not_loaded
from dev.prometheus.discover import Reloader, targets
from dev.shell import wait_for

from .conftest import Render, Rendered


def pod(labels: dict[str, str], ports: dict[str, int], **status: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "namespace": "llm", "labels": labels},
        "spec": {"containers": [{"ports": [{"name": n, "containerPort": p} for n, p in ports.items()]}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1"} | status,
    }


def configuration() -> dict[str, Any]:
    found = [m for m in manifests("i", "d", "") if m["kind"] == "ConfigMap" and "prometheus.yml" in m["data"]]
    config = yaml.safe_load(found[0]["data"]["prometheus.yml"])
    assert isinstance(config, dict)
    return config


def jobs_that_keep(labels: dict[str, str]) -> list[str]:
    kept = []
    for job in configuration()["scrape_configs"]:
        (keep,) = [rule for rule in job["relabel_configs"] if rule.get("action") == "keep"]
        value = ";".join(labels.get(name, "") for name in keep["source_labels"])
        if re.fullmatch(keep["regex"], value):
            kept.append(job["job_name"])
    return kept


def test_every_port_of_a_running_pod_is_a_target_with_kubernetes_labels() -> None:
    engine = pod(names.instance_labels("chat", names.Role.PREFILL, 0), {"http": 30000, "admin": 9400})
    found = targets([engine])
    assert [group["targets"] for group in found] == [["10.0.0.1:30000"], ["10.0.0.1:9400"]]
    assert found[0]["labels"] == {
        "__meta_kubernetes_namespace": "llm",
        "__meta_kubernetes_pod_name": "p",
        "__meta_kubernetes_pod_container_port_name": "http",
        "__meta_kubernetes_pod_label_app_kubernetes_io_managed_by": "pdpool",
        "__meta_kubernetes_pod_label_app_kubernetes_io_part_of": "chat",
        "__meta_kubernetes_pod_label_pdpool_dev_role": "prefill",
        "__meta_kubernetes_pod_label_pdpool_dev_pool": "chat",
        "__meta_kubernetes_pod_label_pdpool_dev_instance": "0",
    }


def test_pods_without_an_address_or_past_their_end_are_no_targets() -> None:
    ports = {"http": 1}
    assert targets([pod({}, ports, podIP=""), pod({}, ports, phase="Failed")]) == []
    assert targets([pod({}, ports, podIP="fd00::1")])[0]["targets"] == ["[fd00::1]:1"]


def test_scrape_jobs_keep_engines_routers_and_the_operator_and_nothing_else(default: Rendered) -> None:
    operator = default.one("Deployment", "pdpool-operator")["spec"]["template"]["metadata"]["labels"]
    cases = [
        (operator, "http", ["pdpool-operator"]),
        (names.instance_labels("chat", names.Role.PREFILL, 0), "http", ["pdpool-engines"]),
        (names.instance_labels("chat", names.Role.DECODE, 0), "admin", ["pdpool-engines"]),
        (names.instance_labels("chat", names.Role.PREFILL, 0), "bootstrap", []),
        (names.router_labels("chat"), "metrics", ["pdpool-engines"]),
        (names.router_labels("chat"), "http", []),
    ]
    for labels, port, jobs in cases:
        (target,) = targets([pod(labels, {port: 1})])
        assert jobs_that_keep(target["labels"]) == jobs, (labels, port)


def test_operator_s_own_labels_win_where_its_series_name_pools_and_the_others_say_where_it_is() -> None:
    jobs = {job["job_name"]: job for job in configuration()["scrape_configs"]}
    assert jobs["pdpool-operator"]["honor_labels"] is True
    for job in jobs.values():
        assert {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"} in job["relabel_configs"]


class Prometheus:
    """Counts POST requests by path, and answers with `status`."""

    def __init__(self) -> None:
        self.status = 200
        self.posted: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.posted.append(self.path)
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    one = Prometheus()
    thread = threading.Thread(target=one.server.serve_forever)
    thread.start()
    yield one
    one.server.shutdown()
    thread.join()
    one.server.server_close()


def test_prometheus_is_told_of_rule_files_once_for_each_content(tmp_path: Path, prometheus: Prometheus) -> None:
    reloader, file = Reloader(tmp_path, prometheus.url), tmp_path / "pdpool.rules.yaml"
    for text in ("a", "a", "b", "b", "a"):
        file.write_text(text)
        reloader.look()
    assert prometheus.posted == ["/-/reload"] * 3


def test_prometheus_is_told_again_of_rule_files_that_it_did_not_take(tmp_path: Path, prometheus: Prometheus) -> None:
    reloader = Reloader(tmp_path, prometheus.url)
    (tmp_path / "pdpool.rules.yaml").write_text("a")
    prometheus.status = 500
    for _ in range(2):
        with pytest.raises(OSError, match="500"):
            reloader.look()
    prometheus.status = 200
    reloader.look()
    reloader.look()
    assert len(prometheus.posted) == 3


def test_the_container_that_reloads_sees_the_rules_of_prometheus_and_reaches_it_on_loopback() -> None:
    (deployment,) = [m for m in manifests("i", "d", "") if m["kind"] == "Deployment"]
    containers = {c["name"]: c for c in deployment["spec"]["template"]["spec"]["containers"]}
    mounts = {
        name: {m["mountPath"] for m in container["volumeMounts"] if m["name"] == "rules"}
        for name, container in containers.items()
    }
    assert mounts["prometheus"] == mounts["discover"] == {"/etc/prometheus/rules"}
    assert containers["discover"]["command"][-2:] == ["/etc/prometheus/rules", "http://127.0.0.1:9090"]
    assert "--web.enable-lifecycle" in containers["prometheus"]["args"]


SHOWN = {"name": "A", "duration": 75, "query": "min_over_time(x[1m]) > 0 and x[1h30m]"}


@pytest.mark.parametrize(
    ("wait", "expression", "loaded"),
    [
        ("75s", "min_over_time(x[60s]) > 0 and x[90m]", True),
        ("1m15s", "min_over_time(x[1m]) > 0 and x[1h30m]", True),
        ("15s", "min_over_time(x[60s]) > 0 and x[90m]", False),
        ("75s", "min_over_time(x[12s]) > 0 and x[90m]", False),
    ],
)
def test_rules_count_as_loaded_when_prometheus_shows_their_windows(wait: str, expression: str, loaded: bool) -> None:
    rules = yaml.safe_dump({"groups": [{"rules": [{"alert": "A", "for": wait, "expr": expression}]}]})
    assert (not_loaded([{"rules": [SHOWN]}], rules) is None) is loaded
    assert not_loaded([], rules) == "Prometheus has not loaded A yet"


def test_prometheus_restarts_when_the_rules_change() -> None:
    def checksum(rules: str) -> str:
        (deployment,) = [m for m in manifests("i", "d", rules) if m["kind"] == "Deployment"]
        return str(deployment["spec"]["template"]["metadata"]["annotations"]["pdpool.dev/checksum"])

    assert checksum("a") == checksum("a") != checksum("b")


def test_a_real_prometheus_takes_changed_windows_when_it_is_told(
    tmp_path: Path, promtool: Path, render: Render
) -> None:
    rules, port = tmp_path / "rules", free_port()
    rules.mkdir()
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"rule_files": [f"{rules}/*.yaml"]}))
    url = f"http://127.0.0.1:{port}"
    command = [promtool.with_name("prometheus"), f"--config.file={tmp_path / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    reloader = Reloader(rules, url)

    def loaded(windows: dict[str, str]) -> str | None:
        text = render({"rules": {"windows": windows}}).one("ConfigMap", "pdpool-rules")["data"]["pdpool.rules.yaml"]
        (rules / "pdpool.rules.yaml").write_text(text)
        wait_for("Prometheus to be reloaded", lambda: told(reloader), deadline_s=60)
        with urllib.request.urlopen(f"{url}/api/v1/rules", timeout=60) as answer:
            return not_loaded(json.load(answer)["data"]["groups"], text)

    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--web.enable-lifecycle"], stdout=log, stderr=log)
    try:
        assert loaded({}) is None
        assert loaded({"noProgress": "90s", "bootstrapQueueStuck": "15s", "instanceStuck": "120s"}) is None
    finally:
        process.terminate()
        process.wait(timeout=120)


def told(reloader: Reloader) -> str | None:
    try:
        reloader.look()
    except OSError as error:
        return str(error)
    return None
