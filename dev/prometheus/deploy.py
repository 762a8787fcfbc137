"""Deploys Prometheus into the cluster, with the chart's rules, and queries it."""

import hashlib
import json
import re
import string
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

NAMESPACE = "monitoring"
RULES = "pdpool-rules"
HERE = Path(__file__).parent
UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}
"""Seconds of each unit of a Prometheus duration."""
# Runs kubectl with the given arguments and standard input, and returns its standard output.
Kubectl = Callable[..., str]


def manifests(image: str, discover_image: str, rules: str) -> list[dict[str, Any]]:
    """Return the objects to apply.

    Args:
        image: image with the `prometheus` program.
        discover_image: image with Python, for discover.py.
        rules: text of the rule file in the ConfigMap `pdpool-rules`. Only its checksum is used: a change restarts
            Prometheus.
    """
    script, template = (HERE / "discover.py").read_text(), (HERE / "prometheus.yaml").read_text()
    checksum = hashlib.sha256((script + template + rules).encode()).hexdigest()[:16]
    filled = string.Template(template).substitute(IMAGE=image, DISCOVER_IMAGE=discover_image, CHECKSUM=checksum)
    discover = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "discover", "namespace": NAMESPACE},
        "data": {"discover.py": script},
    }
    documents: list[dict[str, Any]] = list(yaml.safe_load_all(filled))
    # The namespace comes first, and pods mount the ConfigMap.
    return [documents[0], discover, *documents[1:]]


def deploy(kubectl: Kubectl, image: str, discover_image: str, deadline_s: float = 120.0) -> None:
    """Apply Prometheus with the present rules of the ConfigMap `pdpool-rules`, and wait until it serves.

    Raises:
        CommandError: kubectl failed, for example because Prometheus did not become ready in time.
    """
    found = kubectl("get", "configmap", RULES, "-n", NAMESPACE, "--ignore-not-found", "-o", "json")
    rules = json.dumps(json.loads(found)["data"]) if found.strip() else ""
    kubectl(
        "apply",
        "--server-side",
        "--field-manager=pdpool-dev",
        "-f",
        "-",
        stdin=yaml.safe_dump_all(manifests(image, discover_image, rules)),
    )
    kubectl(
        *("rollout", "status", "deployment/prometheus", "-n", NAMESPACE, f"--timeout={deadline_s:.0f}s"),
        timeout_s=deadline_s + 10,
    )


def not_loaded(groups: list[dict[str, Any]], rules: str) -> str | None:
    """Return what the answer of /api/v1/rules lacks of a rule file.

    That is an alert, its `for`, or a range of its expression.

    Args:
        groups: field `groups` of the answer.
        rules: text of the rule file.
    """
    shown = {
        rule["name"]: (float(rule["duration"]), _ranges(rule["query"])) for group in groups for rule in group["rules"]
    }
    for group in yaml.safe_load(rules)["groups"]:
        for rule in group["rules"]:
            wanted = (_seconds(rule.get("for", "0s")), _ranges(rule["expr"]))
            found = shown.get(rule["alert"])
            if found != wanted:
                if found is None:
                    return f"Prometheus has not loaded {rule['alert']} yet"
                is_to, still = _when(*wanted), _when(*found)
                return (
                    f"Prometheus still has an earlier {rule['alert']}, which fires {still}; the new one fires {is_to}"
                )
    return None


def _when(held_s: float, ranges_s: list[float]) -> str:
    """Return as text when an alert fires: how long it must hold, and the ranges of its expression."""
    spans = f", seen over {' and '.join(f'{span:g} s' for span in ranges_s)}" if ranges_s else ""
    return f"after {held_s:g} s{spans}"


def _ranges(expression: str) -> list[float]:
    return [_seconds(duration) for duration in re.findall(r"\[(\w+)\]", expression)]


def _seconds(duration: str) -> float:
    return sum(int(count) * UNITS[unit] for count, unit in re.findall(r"(\d+)(ms|[smhdwy])", duration))


def ask(kubectl: Kubectl, path: str, **parameters: str) -> Any:  # noqa: ANN401 -- the shape depends on the path
    """Query Prometheus' HTTP API through the API server. Return the field `data` of the answer.

    Raises:
        CommandError: kubectl failed or Prometheus answered with an error.
    """
    query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
    service = f"/api/v1/namespaces/{NAMESPACE}/services/prometheus:9090/proxy/api/v1/{path}{query}"
    return json.loads(kubectl("get", "--raw", service))["data"]
