"""The operator's pod, and what it hands on to the pods that it creates."""

import json
from typing import Any

import pytest
import yaml
from pdpool_operator.build.settings import PodDefaults
from pdpool_operator.runtime.config import load

from .conftest import CHART, Render, Rendered
from .test_values import environment

DIGEST = "sha256:" + "4e07" * 16
UNSET = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}


def deployment(rendered: Rendered) -> dict[str, Any]:
    return rendered.one("Deployment", "pdpool-operator")


def pod_spec(rendered: Rendered) -> dict[str, Any]:
    spec = deployment(rendered)["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def settings(rendered: Rendered, tmp_path: Any) -> Any:
    """Return what the operator reads from the environment that the chart gives it."""
    (tmp_path / "seed").write_text("s" * 32)
    env = {name: value for name, value in environment(deployment(rendered)).items() if value is not None}
    return load(env | {"PDPOOL_NAMESPACE": "x", "PDPOOL_ROUTER_SEED_FILE": str(tmp_path / "seed")})


def test_defaults_of_pods_are_those_of_the_builders(default: Rendered, tmp_path: Any) -> None:
    assert settings(default, tmp_path).pods == PodDefaults()


def test_workload_values_reach_the_operator(render: Render, tmp_path: Any) -> None:
    values = {
        "workloads": {
            "imagePullPolicy": "Always",
            "imagePullSecrets": ["registry"],
            "podSecurityContext": UNSET,
            "securityContext": {"readOnlyRootFilesystem": False},
        },
        "seed": {"epoch": 3},
    }
    config = settings(render(values), tmp_path)
    assert (config.pods.image_pull_policy, config.pods.image_pull_secrets) == ("Always", ("registry",))
    assert config.pods.pod_security_context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert config.pods.container_security_context["readOnlyRootFilesystem"] is False
    assert config.key_epoch == 3


def test_user_ids_can_be_left_to_openshift(render: Render) -> None:
    values = {"operator": {"podSecurityContext": UNSET}, "test": {"router": {"service": "chat-router"}}}
    rendered = render(values)
    for spec in (pod_spec(rendered), rendered.one("Pod", "pdpool-test")["spec"]):
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_digest_takes_precedence_over_tag(render: Render) -> None:
    rendered = render({"image": {"tag": "dev", "digests": {"operator": DIGEST, "router": DIGEST}}})
    assert pod_spec(rendered)["containers"][0]["image"] == f"localhost/pdpool-operator@{DIGEST}"
    env = environment(deployment(rendered))
    assert env["PDPOOL_ROUTER_IMAGE"] == f"localhost/pdpool-router@{DIGEST}"
    assert env["PDPOOL_ENGINE_IMAGE"] == "localhost/pdpool-engine:dev"


def test_disruption_budget_selects_the_operator_and_blocks_no_single_pod(render: Render, default: Rendered) -> None:
    budget = default.one("PodDisruptionBudget", "pdpool-operator")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == deployment(default)["spec"]["selector"]
    assert render({"operator": {"podDisruptionBudget": {"enabled": False}}}).all("PodDisruptionBudget") == []


def test_topology_spread_selects_the_operator_unless_told_otherwise(render: Render) -> None:
    zone = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    own = {"labelSelector": {"matchLabels": {"a": "b"}}}
    rendered = render({"operator": {"topologySpreadConstraints": [zone, zone | own]}})
    selector = deployment(rendered)["spec"]["selector"]
    assert pod_spec(rendered)["topologySpreadConstraints"] == [zone | {"labelSelector": selector}, zone | own]


def test_extra_environment_follows_the_chart_s(render: Render) -> None:
    extra = [
        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    (container,) = pod_spec(render({"operator": {"extraEnv": extra}}))["containers"]
    assert container["env"][-2:] == extra


@pytest.mark.parametrize("name", ["PDPOOL_LEASE", "PDPOOL_KEY_EPOCH", "POD_ID"])
def test_environment_of_the_chart_s_own_is_refused(render: Render, name: str) -> None:
    refused = render({"operator": {"extraEnv": [{"name": name, "value": "x"}]}})
    assert refused.failed
    assert f"operator.extraEnv: {name} belongs to the chart; leave it out" in refused.error


@pytest.mark.parametrize(
    ("release", "values", "lease"),
    [
        ("pdpool", {}, "pdpool-operator"),
        ("team", {}, "team-pdpool-operator"),
        ("pdpool", {"operator": {"leaseName": "mine"}}, "mine"),
    ],
)
def test_each_release_has_its_own_lease_and_may_write_only_that(
    render: Render, release: str, values: dict[str, Any], lease: str
) -> None:
    rendered = render(values, release=release)
    (operator,) = rendered.all("Deployment")
    assert environment(operator)["PDPOOL_LEASE"] == lease
    own = next(role for role in rendered.all("Role") if role["metadata"]["name"].endswith("-own"))
    assert [rule["resourceNames"] for rule in own["rules"] if "resourceNames" in rule] == [[lease]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"image": {"digests": {"operater": DIGEST}}}, "operater"),
        ({"seed": {"epoch": 0}}, "/seed/epoch"),
        ({"seed": {"epoch": 65}}, "/seed/epoch"),
        ({"seed": {"epoch": None}}, "missing property 'epoch'"),
        ({"operator": {"podSecurityContext": {"runAsuser": 1}}}, "runAsuser"),
        ({"operator": {"securityContext": {"capabilities": {"drop": ["all!"]}}}}, "/capabilities/drop/0"),
        ({"operator": {"topologySpreadConstraints": [{"maxSkew": 1}]}}, "missing properties"),
        ({"operator": {"extraEnv": [{"value": "x"}]}}, "missing property 'name'"),
        ({"networkPolicy": {"clients": [{"podSelectr": {}}]}}, "podSelectr"),
        ({"networkPolicy": {"clients": [{}]}}, "/networkPolicy/clients/0"),
        ({"workloads": {"imagePullPolicy": "Sometimes"}}, "/workloads/imagePullPolicy"),
        ({"workloads": {"imagePullSecrets": ["A b"]}}, "/workloads/imagePullSecrets/0"),
    ],
)
def test_wrong_values_are_refused_by_name(render: Render, values: dict[str, Any], words: str) -> None:
    refused = render(values)
    assert refused.failed
    assert words in refused.error


def test_pod_monitors_give_the_labels_of_the_documented_job(render: Render) -> None:
    documents = "".join(path.read_text() for path in sorted((CHART.parents[1] / "docs").glob("*.md")))
    (block,) = (text for text in documents.split("```yaml") if "job_name: pdpool-engines" in text)
    jobs = {job["job_name"]: job for job in yaml.safe_load(block.partition("```")[0])["scrape_configs"]}
    relabelings = jobs["pdpool-engines"]["relabel_configs"]
    documented = {rule["target_label"]: rule["source_labels"] for rule in relabelings if "target_label" in rule}
    rendered = render({"metrics": {"podMonitor": {"enabled": True}}}, api_versions="monitoring.coreos.com/v1")
    for name in ("pdpool-engines", "pdpool-routers"):
        for endpoint in rendered.one("PodMonitor", name)["spec"]["podMetricsEndpoints"]:
            given = {rule["targetLabel"]: rule["sourceLabels"] for rule in endpoint["relabelings"]}
            assert given == documented


def test_pod_defaults_are_one_line_of_json(default: Rendered) -> None:
    assert json.loads(environment(deployment(default))["PDPOOL_POD_DEFAULTS"]).keys() == {
        "imagePullPolicy",
        "imagePullSecrets",
        "podSecurityContext",
        "containerSecurityContext",
    }


def test_engines_get_policies_in_a_default_installation(default: Rendered, tmp_path: Any) -> None:
    (operator, prometheus) = settings(default, tmp_path).peers.watchers
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "pdpool-system"}
    assert operator["podSelector"] == deployment(default)["spec"]["selector"]
    assert prometheus["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}


def test_gateways_may_be_let_in_and_policies_left_out(render: Render, tmp_path: Any) -> None:
    gateway = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}
    assert settings(render({"networkPolicy": {"clients": [gateway]}}), tmp_path).peers.clients == (gateway,)
    without = render({"networkPolicy": {"enabled": False}})
    assert settings(without, tmp_path).peers is None
    assert without.all("NetworkPolicy") == []
