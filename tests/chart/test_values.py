"""Values to objects."""

import base64
import json
import subprocess
import sys
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from dev import sync_chart

from .conftest import CHART, Render, Rendered

RESTRICTED_CONTAINER = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


POD_DEFAULTS = (
    '{"containerSecurityContext":{"allowPrivilegeEscalation":false,"capabilities":{"drop":["ALL"]},'
    '"readOnlyRootFilesystem":true},"imagePullPolicy":"IfNotPresent","imagePullSecrets":[],"podSecurityContext":'
    '{"fsGroup":65532,"runAsGroup":65532,"runAsNonRoot":true,"runAsUser":65532,'
    '"seccompProfile":{"type":"RuntimeDefault"}}}'
)


NETWORK_PEERS = (
    '{"clients":[],"watchers":[{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"pdpool-system"}},'
    '"podSelector":{"matchLabels":{"app.kubernetes.io/component":"operator","app.kubernetes.io/instance":"pdpool",'
    '"app.kubernetes.io/name":"pdpool"}}},{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":'
    '"monitoring"}},"podSelector":{}}]}'
)


def environment(deployment: dict[str, Any]) -> dict[str, Any]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {entry["name"]: entry.get("value") for entry in container["env"]}


def test_crds_in_the_chart_are_those_of_the_models() -> None:
    source = sync_chart.read_folder(sync_chart.SOURCE)
    assert source
    assert sync_chart.differences(source, sync_chart.read_folder(sync_chart.COPIES)) == []


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ({"a.yaml": "1"}, []),
        ({"a.yaml": "2"}, ["a.yaml differs"]),
        ({}, ["a.yaml is missing"]),
        ({"a.yaml": "1", "b.yaml": "1"}, ["b.yaml is left over"]),
    ],
)
def test_each_kind_of_drift_is_named(copies: dict[str, str], expected: list[str]) -> None:
    assert sync_chart.differences({"a.yaml": "1"}, copies) == expected


def test_crds_are_rendered_unchanged_but_for_labels_and_the_keep_policy(default: Rendered) -> None:
    sources = [yaml.safe_load(text) for text in sync_chart.read_folder(sync_chart.SOURCE).values()]
    assert {crd["metadata"]["name"] for crd in sources} == {
        crd["metadata"]["name"] for crd in default.all("CustomResourceDefinition")
    }
    for crd in sources:
        rendered = default.one("CustomResourceDefinition", crd["metadata"]["name"])
        assert rendered["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert rendered["metadata"].pop("labels")["app.kubernetes.io/managed-by"] == "Helm"
        assert rendered == crd


def test_crds_can_go_with_the_release_or_stay_out_of_it(render: Render) -> None:
    for crd in render({"crds": {"keep": False}}).all("CustomResourceDefinition"):
        assert "annotations" not in crd["metadata"]
    assert render({"crds": {"enabled": False}}).all("CustomResourceDefinition") == []


def test_every_pod_runs_under_the_restricted_profile(render: Render) -> None:
    rendered = render({"test": {"router": {"service": "chat-router"}}})
    pods = [rendered.one("Deployment", "pdpool-operator")["spec"]["template"], rendered.one("Pod", "pdpool-test")]
    for pod in pods:
        security = pod["spec"]["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 65532)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["spec"]["containers"]:
            assert container["securityContext"] == RESTRICTED_CONTAINER
            assert container["resources"]["limits"]["memory"]
        assert not any(pod["spec"].get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))


def test_operator_gets_its_environment_from_values(render: Render) -> None:
    values = {
        "image": {"registry": "registry.example:5000/team", "tag": "dev", "engine": "my/engine"},
        "watchNamespaces": ["a", "b"],
    }
    deployment = render(values).one("Deployment", "pdpool-operator")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example:5000/team/pdpool-operator:dev"
    assert environment(deployment) == {
        "POD_ID": None,
        "PDPOOL_NAMESPACE": None,
        "PDPOOL_LEASE": "pdpool-operator",
        "PDPOOL_WATCH_NAMESPACES": "a,b",
        "PDPOOL_ENGINE_IMAGE": "registry.example:5000/team/my/engine:dev",
        "PDPOOL_ROUTER_IMAGE": "registry.example:5000/team/pdpool-router:dev",
        "PDPOOL_ROUTER_SEED_FILE": "/etc/pdpool/seed/seed",
        "PDPOOL_KEY_EPOCH": "1",
        "PDPOOL_POD_DEFAULTS": POD_DEFAULTS,
        "PDPOOL_NETWORK_PEERS": NETWORK_PEERS,
        "PDPOOL_LOG_LEVEL": "info",
    }


def test_image_tag_defaults_to_the_version_of_the_application(default: Rendered) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert (
        environment(default.one("Deployment", "pdpool-operator"))["PDPOOL_ENGINE_IMAGE"]
        == f"localhost/pdpool-engine:{version}"
    )


def test_operator_is_probed_and_given_time_to_stop(render: Render) -> None:
    deployment = render({"operator": {"terminationGracePeriodSeconds": 77, "replicas": 2}}).one(
        "Deployment", "pdpool-operator"
    )
    assert deployment["spec"]["replicas"] == 2
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 77
    (container,) = pod["containers"]
    startup = container["startupProbe"]
    assert startup["httpGet"] == container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 300, "a slow start is no reason to kill"
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


def test_seed_is_made_once_and_outlives_the_release(default: Rendered) -> None:
    secret = default.one("Secret", "pdpool-seed")
    assert len(base64.b64decode(secret["data"]["seed"])) >= 32
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_pods_carry_the_checksum_of_the_very_seed_that_is_installed(default: Rendered) -> None:
    template = default.one("Deployment", "pdpool-operator")["spec"]["template"]
    seed = default.one("Secret", "pdpool-seed")["data"]["seed"]
    assert template["metadata"]["annotations"]["checksum/seed"] == sha256(seed.encode()).hexdigest()


def test_a_seed_of_ones_own_is_mounted_and_none_is_made(render: Render) -> None:
    rendered = render({"seed": {"existingSecret": "mine"}})
    assert rendered.all("Secret") == []
    volumes = rendered.one("Deployment", "pdpool-operator")["spec"]["template"]["spec"]["volumes"]
    assert {"secretName": "mine", "defaultMode": 0o440} in [volume.get("secret") for volume in volumes]


def test_operator_is_reached_by_prometheus_only(render: Render) -> None:
    values = {"networkPolicy": {"prometheus": {"podSelector": {"matchLabels": {"app": "prometheus"}}}}}
    (rule,) = render(values).one("NetworkPolicy", "pdpool-operator")["spec"]["ingress"]
    (source,) = rule["from"]
    assert source["podSelector"] == {"matchLabels": {"app": "prometheus"}}
    assert [port["port"] for port in rule["ports"]] == [8080]


def test_further_watchers_reach_the_operator_and_engines(render: Render) -> None:
    watcher = {"ipBlock": {"cidr": "10.0.0.10/32"}}
    rendered = render({"networkPolicy": {"watchers": [watcher]}})
    (rule,) = rendered.one("NetworkPolicy", "pdpool-operator")["spec"]["ingress"]
    peers = json.loads(environment(rendered.one("Deployment", "pdpool-operator"))["PDPOOL_NETWORK_PEERS"])
    assert rule["from"][1:] == [watcher]
    assert peers["watchers"][2:] == [watcher]
    assert peers["clients"] == []


def test_prometheus_operator_objects_need_its_api(render: Render) -> None:
    for values, key in (
        ({"rules": {"prometheusRule": {"enabled": True}}}, "rules.prometheusRule.enabled"),
        ({"metrics": {"podMonitor": {"enabled": True}}}, "metrics.podMonitor.enabled"),
    ):
        refused = render(values)
        assert refused.failed
        assert f"{key}: the cluster has no monitoring.coreos.com/v1" in refused.error
        assert "`helm template` needs --api-versions monitoring.coreos.com/v1" in refused.error


def test_prometheus_operator_gets_the_same_rules_and_both_kinds_of_pods(render: Render) -> None:
    values = {
        "rules": {"prometheusRule": {"enabled": True, "labels": {"release": "p"}}},
        "metrics": {"podMonitor": {"enabled": True, "interval": "7s"}},
    }
    rendered = render(values, api_versions="monitoring.coreos.com/v1")
    rule = rendered.one("PrometheusRule", "pdpool")
    assert rule["metadata"]["labels"]["release"] == "p"
    plain = rendered.one("ConfigMap", "pdpool-rules")["data"]["pdpool.rules.yaml"]
    assert rule["spec"] == yaml.safe_load(plain)
    (routers,) = rendered.one("PodMonitor", "pdpool-routers")["spec"]["podMetricsEndpoints"]
    assert routers["port"] == "metrics"
    (operator,) = rendered.one("PodMonitor", "pdpool-operator")["spec"]["podMetricsEndpoints"]
    assert operator == {"port": "http", "path": "/metrics", "interval": "7s", "honorLabels": True}
    engines = rendered.one("PodMonitor", "pdpool-engines")["spec"]
    assert [endpoint["port"] for endpoint in engines["podMetricsEndpoints"]] == ["http", "admin"]


def test_rules_can_lie_where_prometheus_can_mount_them(render: Render) -> None:
    values = {"rules": {"configMap": {"namespace": "monitoring", "labels": {"role": "alert-rules"}}}}
    config_map = render(values).one("ConfigMap", "pdpool-rules", "monitoring")
    assert config_map["metadata"]["labels"]["role"] == "alert-rules"
    assert render({"rules": {"configMap": {"enabled": False}}}).all("ConfigMap") == []


def test_labels_of_one_object_win_over_those_of_all(render: Render) -> None:
    values = {
        "commonLabels": {"team": "all", "release": "all"},
        "rules": {"configMap": {"labels": {"release": "one"}}, "prometheusRule": {"enabled": True, "labels": {}}},
        "metrics": {"podMonitor": {"enabled": True, "labels": {"release": "one"}}},
    }
    rendered = render(values, api_versions="monitoring.coreos.com/v1")
    expected = {
        ("ConfigMap", "pdpool-rules"): "one",
        ("PodMonitor", "pdpool-operator"): "one",
        ("PodMonitor", "pdpool-engines"): "one",
        ("PodMonitor", "pdpool-routers"): "one",
        ("PrometheusRule", "pdpool"): "all",
        ("Service", "pdpool-operator-metrics"): "all",
    }
    for (kind, name), release in expected.items():
        labels = rendered.one(kind, name)["metadata"]["labels"]
        assert (labels["team"], labels["release"]) == ("all", release), (kind, name)
        assert labels["app.kubernetes.io/name"] == "pdpool"


def test_pods_carry_annotations_of_ones_own_and_need_not_ask_to_be_scraped(render: Render) -> None:
    values = {"operator": {"podAnnotations": {"prometheus.io/scrape": "false", "example.com/owner": "us"}}}
    annotations = render(values).one("Deployment", "pdpool-operator")["spec"]["template"]["metadata"]["annotations"]
    assert annotations.pop("checksum/seed")
    assert annotations == {
        "prometheus.io/scrape": "false",
        "prometheus.io/port": "8080",
        "example.com/owner": "us",
    }


def test_view_and_edit_roles_grow_by_the_kinds(render: Render, default: Rendered) -> None:
    view, edit = default.one("ClusterRole", "pdpool-view"), default.one("ClusterRole", "pdpool-edit")
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert not any("status" in resource for rule in edit["rules"] for resource in rule["resources"])
    roles = {role["metadata"]["name"] for role in render({"rbac": {"aggregate": False}}).all("ClusterRole")}
    assert roles.isdisjoint({"pdpool-view", "pdpool-edit"})


def test_there_is_a_helm_test_only_for_a_named_router(render: Render, default: Rendered) -> None:
    assert default.all("Pod") == []
    values = {"test": {"router": {"service": "chat-router", "namespace": "llm", "port": 8001}, "timeoutSeconds": 33}}
    pod = render(values).one("Pod", "pdpool-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["activeDeadlineSeconds"] == 33
    (container,) = pod["spec"]["containers"]
    assert container["args"][1:] == ["http://chat-router.llm:8001", "33"]


class StandInRouter(BaseHTTPRequestHandler):
    """Answers like a router: a list of one model, and `completion` for it."""

    completion: tuple[int, dict[str, Any]]

    def answer(self, code: int, body: dict[str, Any]) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "smollm2"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["model"] == "smollm2"
        self.answer(*self.completion)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("completion", "code", "words"),
    [
        ((200, {"choices": [{"text": " Paris."}]}), 0, "answered ' Paris.'"),
        ((200, {"choices": [{"text": " "}]}), 1, "answered an empty text"),
        ((503, {"error": "no_available_workers"}), 1, 'HTTP 503: {"error": "no_available_workers"}'),
        ((200, {"choices": []}), 1, "IndexError"),
    ],
)
def test_helm_test_passes_only_with_a_completion(
    render: Render, completion: tuple[int, dict[str, Any]], code: int, words: str
) -> None:
    handler = type("Handler", (StandInRouter,), {"completion": completion})
    pod = render({"test": {"router": {"service": "chat-router"}}}).one("Pod", "pdpool-test")
    script = pod["spec"]["containers"][0]["args"][0]
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        command = [sys.executable, "-c", script, f"http://127.0.0.1:{server.server_port}", "200"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        server.shutdown()
    assert result.returncode == code
    assert words in result.stdout + result.stderr


def test_the_readme_documents_every_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    readme = (CHART / "README.md").read_text()

    def leaves(node: dict[str, Any], path: str = "") -> list[str]:
        found = []
        for key, value in node.items():
            nested = isinstance(value, dict) and value and f"{path}{key}" not in WHOLE
            found += leaves(value, f"{path}{key}.") if nested else [f"{path}{key}"]
        return found

    assert [leaf for leaf in leaves(values) if f"`{leaf}`" not in readme] == []


WHOLE = {"operator.resources", "networkPolicy.prometheus.namespaceSelector"}
WHOLE |= {f"{who}.{what}" for who in ("operator", "workloads") for what in ("podSecurityContext", "securityContext")}


def test_helm_lint_is_clean(helm: Path) -> None:
    result = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
