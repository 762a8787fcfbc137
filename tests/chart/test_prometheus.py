"""The local cluster's Prometheus: its discovery, and that its scrape jobs keep what they should."""

import re
from typing import Any

import yaml
from pdpool_operator.api import names

from dev.prometheus.deploy import manifests
from dev.prometheus.discover import targets

from .conftest import Rendered


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


def test_operator_s_own_labels_win_where_its_series_name_pools() -> None:
    jobs = {job["job_name"]: job for job in configuration()["scrape_configs"]}
    assert jobs["pdpool-operator"]["honor_labels"] is True


def test_prometheus_restarts_when_the_rules_change() -> None:
    def checksum(rules: str) -> str:
        (deployment,) = [m for m in manifests("i", "d", rules) if m["kind"] == "Deployment"]
        return str(deployment["spec"]["template"]["metadata"]["annotations"]["pdpool.dev/checksum"])

    assert checksum("a") == checksum("a") != checksum("b")
