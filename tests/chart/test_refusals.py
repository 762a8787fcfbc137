"""Values that the schema or the templates refuse, with the messages that a user sees."""

import json
from typing import Any

import pytest
import yaml

from .conftest import CHART, Render


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"operatr": {}}, ["operatr", "not allowed"]),
        ({"operator": {"replica": 1}}, ["/operator", "replica", "not allowed"]),
        ({"operator": {"replicas": 3}}, ["/operator/replicas", "maximum", "2"]),
        ({"operator": {"replicas": "1"}}, ["/operator/replicas", "got string, want integer"]),
        ({"operator": {"logLevel": "loud"}}, ["/operator/logLevel", "'debug', 'info', 'warning', 'error'"]),
        ({"operator": {"terminationGracePeriodSeconds": 0}}, ["/operator/terminationGracePeriodSeconds", "minimum"]),
        ({"image": {"pullPolicy": "Sometimes"}}, ["/image/pullPolicy", "IfNotPresent"]),
        ({"watchNamespaces": "llm"}, ["/watchNamespaces", "got string, want array"]),
        ({"watchNamespaces": ["LLM"]}, ["/watchNamespaces/0", "pattern"]),
        ({"watchNamespaces": ["llm", "llm"]}, ["/watchNamespaces", "equal"]),
        ({"crds": {"keep": "yes"}}, ["/crds/keep", "got string, want boolean"]),
        ({"rules": {"windows": {"noProgres": "1m"}}}, ["/rules/windows", "noProgres", "not allowed"]),
        ({"test": {"router": {"port": 0}}}, ["/test/router/port", "minimum"]),
        ({"networkPolicy": {"prometheus": {"podSelector": {"app": "x"}}}}, ["podSelector", "app", "not allowed"]),
        (
            {
                "networkPolicy": {
                    "prometheus": {"podSelector": {"matchExpressions": [{"key": "app", "operator": "in"}]}}
                }
            },
            ["/podSelector/matchExpressions/0/operator", "'In'"],
        ),
        *(
            (
                {"networkPolicy": {"prometheus": {"podSelector": {"matchExpressions": [{"key": "app"} | expression]}}}},
                ["/podSelector/matchExpressions/0", words],
            )
            for expression, words in (
                ({"operator": "In"}, "missing property 'values'"),
                ({"operator": "NotIn", "values": []}, "minItems"),
                ({"operator": "Exists", "values": ["x"]}, "maxItems"),
            )
        ),
        ({"fullnameOverride": "1st"}, ["/fullnameOverride", "'1st'"]),
        ({"operator": {"resources": {"limits": {"cpu": -1}}}}, ["/operator/resources/limits/cpu", "minimum"]),
        ({"commonLabels": {"a b": "x"}}, ["/commonLabels", "'a b' not allowed"]),
        ({"operator": {"podLabels": {"team": "a b"}}}, ["/operator/podLabels/team", "'a b'"]),
        ({"operator": {"podAnnotations": {"a b": "x"}}}, ["/operator/podAnnotations", "'a b' not allowed"]),
        ({"operator": {"podAnnotations": {"on": True}}}, ["/operator/podAnnotations/on", "got boolean, want string"]),
        ({"operator": {"tolerations": [{"efect": "NoSchedule"}]}}, ["/operator/tolerations/0", "efect", "not allowed"]),
        ({"operator": {"tolerations": [{"operator": "Equals"}]}}, ["/operator/tolerations/0/operator", "'Equal'"]),
        ({"operator": {"affinity": {"nodeAfinity": {}}}}, ["/operator/affinity", "nodeAfinity", "not allowed"]),
        (
            {"operator": {"affinity": {"nodeAffinity": {"required": {}}}}},
            ["/operator/affinity/nodeAffinity", "required", "not allowed"],
        ),
        ({"operator": {"priorityClassName": "High!"}}, ["/operator/priorityClassName", "'High!'"]),
    ],
)
def test_bad_values_are_refused_with_the_field_s_name(render: Render, values: dict[str, Any], words: list[str]) -> None:
    refused = render(values)
    assert refused.failed
    for word in words:
        assert word in refused.error


REGISTRY = "a registry with an optional path, without scheme and without / at the end"
DIGEST = "sha256:, then 64 hexadecimal digits"
DURATION = "a Prometheus duration above 0, such as 90s or 1m30s"
QUANTITY = "a quantity of Kubernetes, such as 500m or 512Mi"
NETWORK = "a network, such as 10.0.0.0/8 or fd00::/64"


@pytest.mark.parametrize(
    ("path", "value", "right"),
    [
        ("image.registry", "", REGISTRY),
        ("image.registry", "https://registry.example", REGISTRY),
        ("image.registry", "registry.example/team/", REGISTRY),
        ("image.tag", "a b", "a tag of at most 128 letters, digits and ._-"),
        ("image.router", "router:1.0", "a repository below image.registry, without tag"),
        ("image.engine", "", "a repository below image.registry"),
        ("image.digests.operator", "sha256:abc", DIGEST),
        ("image.digests.router", "r/x@sha256:" + 64 * "a", DIGEST),
        ("rules.runbookUrl", "https://wiki.example/x#y", "an address without spaces, quotes, $ and #"),
        ("rules.windows.noProgress", "1 minute", DURATION),
        ("rules.windows.noProgress", "30s1m", DURATION),
        ("rules.windows.operatorDown", "0s", DURATION),
        ("rules.windows.memoryHeld", "0m0s", DURATION),
        ("rules.windows.instanceUnknown", "", DURATION),
        ("metrics.podMonitor.interval", "0s", DURATION),
        ("operator.resources.limits.memory", "512MB", QUANTITY),
        ("operator.resources.limits.cpu", "lots", QUANTITY),
        ("operator.resources.requests.memory", "1mi", QUANTITY),
    ],
)
def test_wrong_form_is_refused_with_what_is_right(render: Render, path: str, value: str, right: str) -> None:
    values: dict[str, Any] = {}
    node = values
    *folders, name = path.split(".")
    for folder in folders:
        node = node.setdefault(folder, {})
    node[name] = value
    refused = render(values)
    assert refused.failed
    assert f'{path} is "{value}"; it must be {right}' in refused.error


@pytest.mark.parametrize("name", ["clients", "watchers"])
@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ({"ipBlock": {"cidr": "10.0.0.0"}}, f'[1].ipBlock has "10.0.0.0"; it must be {NETWORK}'),
        ({"ipBlock": {"cidr": "10.0.0.0/33"}}, NETWORK),
        ({"ipBlock": {"cidr": "fd00::/129"}}, NETWORK),
        ({"ipBlock": {"cidr": "10.0.0.0/8", "except": ["gateway"]}}, f'"gateway"; it must be {NETWORK}'),
        ({"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}, "[1] has ipBlock and a selector"),
    ],
)
def test_peer_that_breaks_all_policies_is_refused(render: Render, name: str, peer: dict[str, Any], words: str) -> None:
    refused = render({"networkPolicy": {name: [{"podSelector": {}}, peer]}})
    assert refused.failed
    assert f"networkPolicy.{name}[1]" in refused.error
    assert words in refused.error


@pytest.mark.parametrize(
    "cidr", ["10.0.0.0/8", "192.168.1.7/32", "0.0.0.0/0", "fd00::/64", "::/0", "::ffff:10.0.0.0/104"]
)
def test_network_is_a_client(render: Render, cidr: str) -> None:
    assert not render({"networkPolicy": {"clients": [{"ipBlock": {"cidr": cidr, "except": [cidr]}}]}}).failed


NAME_OF_NAMESPACE = "kubernetes.io/metadata.name"


@pytest.mark.parametrize(
    "selector",
    [{"matchLabels": {"team": "obs"}}, {"matchExpressions": [{"key": "team", "operator": "Exists"}]}],
    ids=["labels", "expressions"],
)
def test_default_namespace_beside_other_labels_is_refused(render: Render, selector: dict[str, Any]) -> None:
    refused = render({"networkPolicy": {"prometheus": {"namespaceSelector": selector}}})
    assert refused.failed
    assert "selects only the namespace monitoring, and only if your other labels match" in refused.error
    assert f"Set its label {NAME_OF_NAMESPACE} to null" in refused.error


@pytest.mark.parametrize(
    ("labels", "selected"),
    [
        ({"team": "obs", NAME_OF_NAMESPACE: None}, {"team": "obs"}),
        ({NAME_OF_NAMESPACE: "obs"}, {NAME_OF_NAMESPACE: "obs"}),
    ],
    ids=["by label", "by name"],
)
def test_other_namespace_of_prometheus_is_selected(
    render: Render, labels: dict[str, Any], selected: dict[str, str]
) -> None:
    rendered = render({"networkPolicy": {"prometheus": {"namespaceSelector": {"matchLabels": labels}}}})
    (rule,) = rendered.one("NetworkPolicy", "pdpool-operator")["spec"]["ingress"]
    assert rule["from"][0]["namespaceSelector"] == {"matchLabels": selected}


def test_variable_that_stands_twice_is_refused(render: Render) -> None:
    twice = [{"name": "NO_PROXY", "value": "a"}, {"name": "A", "value": "a"}, {"name": "NO_PROXY", "value": "b"}]
    refused = render({"operator": {"extraEnv": twice}})
    assert refused.failed
    assert "operator.extraEnv: NO_PROXY stands twice; remove one" in refused.error


OWN_LABELS = [
    "helm.sh/chart",
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "app.kubernetes.io/component",
    "app.kubernetes.io/managed-by",
    "rbac.authorization.k8s.io/aggregate-to-admin",
    "pdpool.dev/role",
]


@pytest.mark.parametrize("label", OWN_LABELS)
def test_labels_of_the_chart_s_own_are_refused(render: Render, label: str) -> None:
    refused = render({"commonLabels": {"team": "a", label: "evil"}})
    assert refused.failed
    assert f"commonLabels: {label} belongs to the chart; leave it out" in refused.error


@pytest.mark.parametrize(
    "path",
    ["operator.podLabels", "rules.configMap.labels", "rules.prometheusRule.labels", "metrics.podMonitor.labels"],
)
def test_labels_of_the_chart_s_own_are_refused_everywhere(render: Render, path: str) -> None:
    values: dict[str, Any] = {
        "rules": {"prometheusRule": {"enabled": True}},
        "metrics": {"podMonitor": {"enabled": True}},
    }
    node = values
    for name in path.split("."):
        node = node.setdefault(name, {})
    node["app.kubernetes.io/name"] = "evil"
    refused = render(values, api_versions="monitoring.coreos.com/v1")
    assert refused.failed
    assert f"{path}: app.kubernetes.io/name belongs to the chart; leave it out" in refused.error


@pytest.mark.parametrize("annotation", ["checksum/seed", "prometheus.io/port"])
def test_annotations_that_tell_of_the_pod_are_refused(render: Render, annotation: str) -> None:
    refused = render({"operator": {"podAnnotations": {annotation: "evil"}}})
    assert refused.failed
    assert f"operator.podAnnotations: {annotation} belongs to the chart; leave it out" in refused.error


def test_a_foreign_service_account_must_be_named(render: Render) -> None:
    refused = render({"serviceAccount": {"create": False}})
    assert refused.failed
    assert "serviceAccount.name: must name an existing ServiceAccount" in refused.error


def test_values_of_a_parent_chart_pass(render: Render) -> None:
    assert not render({"global": {"anything": 1}}).failed


def keys(node: dict[str, Any], path: str = "") -> set[str]:
    """Yield the paths of all keys of a schema's objects with fixed properties."""
    found = set()
    for name, child in node.get("properties", {}).items():
        found |= {f"{path}{name}"} | keys(child, f"{path}{name}.")
    return found


def paths(values: dict[str, Any], known: set[str], path: str = "") -> set[str]:
    """Yield the paths of all keys of the values, as deep as the schema fixes them."""
    found = set()
    for name, value in values.items():
        here = f"{path}{name}"
        found.add(here)
        if isinstance(value, dict) and any(key.startswith(f"{here}.") for key in known):
            found |= paths(value, known, f"{here}.")
    return found


# Optional parts of Kubernetes' own types.
PARTS = {"operator.resources.requests", "operator.resources.limits"}
PARTS |= {"networkPolicy.prometheus.namespaceSelector.matchLabels"}
# Null removes a part of a security context.
CONTEXTS = ("operator.podSecurityContext", "operator.securityContext")
CONTEXTS += ("workloads.podSecurityContext", "workloads.securityContext")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert isinstance(schema, dict)
    return schema


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert isinstance(values, dict)
    return values


def requirements(node: dict[str, Any], path: str = "") -> set[str]:
    """Yield the paths of all keys that a schema requires."""
    found = {f"{path}{name}" for name in node.get("required", [])}
    for name, child in node.get("properties", {}).items():
        found |= requirements(child, f"{path}{name}.")
    return found


def at(values: dict[str, Any], path: str) -> Any:
    node: Any = values
    for name in path.split("."):
        node = node[name]
    return node


def test_null_is_refused_where_the_default_is_not_empty(schema: dict[str, Any], values: dict[str, Any]) -> None:
    filled = {path for path in paths(values, keys(schema)) if at(values, path) not in ("", [], {})}
    assert requirements(schema) == {
        path for path in filled - PARTS if not path.startswith(tuple(f"{c}." for c in CONTEXTS))
    }


@pytest.mark.parametrize(
    ("unset", "words"),
    [
        ({"operator": None}, "at '': missing property 'operator'"),
        ({"networkPolicy": {"prometheus": None}}, "at '/networkPolicy': missing property 'prometheus'"),
        ({"rules": {"windows": {"noProgress": None}}}, "at '/rules/windows': missing property 'noProgress'"),
        ({"image": {"registry": None}}, "at '/image': missing property 'registry'"),
    ],
)
def test_null_is_refused_with_the_key_s_name(render: Render, unset: dict[str, Any], words: str) -> None:
    refused = render(unset)
    assert refused.failed
    assert words in refused.error


def test_null_where_the_default_is_empty_is_the_default(
    render: Render, schema: dict[str, Any], values: dict[str, Any]
) -> None:
    # A fixed seed, because the chart generates a new one at each rendering.
    seed = {"seed": {"existingSecret": "mine"}}
    unset: dict[str, Any] = {}
    for path in keys(schema) - requirements(schema) - PARTS - {"seed.existingSecret", "global"}:
        if path in paths(values, keys(schema)):
            *folders, name = path.split(".")
            node = unset
            for folder in folders:
                node = node.setdefault(folder, {})
            node[name] = None
    assert len(unset) > 5
    rendered = render(unset | seed)
    assert not rendered.failed, rendered.error
    assert rendered.objects == render(seed).objects


def test_schema_and_values_have_the_same_keys(schema: dict[str, Any], values: dict[str, Any]) -> None:
    known = keys(schema)
    written = paths(values, known)
    # Free-form parts that Kubernetes defines, and Helm's own key.
    optional = {"global", "operator.resources.claims", "networkPolicy.prometheus.podSelector.matchLabels"}
    optional |= {key for key in known if key.endswith((".matchExpressions", "Affinity"))}
    assert written <= known
    assert known - written <= optional
