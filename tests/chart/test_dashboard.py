"""The dashboard in the chart: its queries are valid, and name only series and labels that are exported."""

import json
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from pdpool_operator.api.base import Condition, ConditionStatus
from pdpool_operator.observe.keys import Key
from pdpool_operator.runtime.state_metrics import Serving

from dev.dashboard import ROWS, queries, text
from tests.unit.operator.app.metrics import idle_metrics

from .conftest import Render
from .test_alert_series import exported

QUERIES = queries()
NOT_EXPORTED_BEFORE_USE = {
    "pdpool_repair_actions_total": {"namespace", "pool", "role", "action", "outcome"},
    "pdpool_connector_failures_total": {"cause", "namespace", "pod", "rank"},
}
"""Counters without a series until a pool is reconciled, or until their first event."""


def test_chart_ships_the_dashboard_on_demand(render: Render) -> None:
    assert not [one for one in render().all("ConfigMap") if one["metadata"]["name"] == "pdpool-dashboard"]
    values = {"dashboard": {"enabled": True, "namespace": "grafana", "labels": {"team": "llm"}}}
    made = render(values).one("ConfigMap", "pdpool-dashboard", "grafana")
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert made["metadata"]["labels"]["team"] == "llm"
    assert json.loads(made["data"]["pdpool.json"]) == json.loads(text())


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"dashboard": {"enabled": True, "labels": {"grafana_dashboard": "2"}}}, "2"),
        ({"dashboard": {"enabled": True}, "commonLabels": {"grafana_dashboard": "2"}}, "1"),
    ],
    ids=["own labels", "common labels"],
)
def test_label_of_the_sidecar_stands_once(render: Render, values: dict[str, Any], shown: str) -> None:
    assert render(values).one("ConfigMap", "pdpool-dashboard")["metadata"]["labels"]["grafana_dashboard"] == shown


def test_every_query_is_in_the_dashboard() -> None:
    panels = [panel for panel in json.loads(text())["panels"] if panel["type"] != "row"]
    assert len(panels) == sum(len(panels) for panels in ROWS.values())
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(shown) == len(QUERIES)
    assert all(panel["description"] for panel in panels)


def test_namespaces_include_those_of_watched_fleets() -> None:
    """A service with selectors has conditions and parts, and no pools."""
    metrics = idle_metrics()
    fleet = Key("DisaggregatedService", "llm", "watched")
    condition = Condition(
        type="QueuesHealthy",
        status=ConditionStatus.TRUE,
        reason="QueuesFlowing",
        message="",
        last_transition_time=datetime(2026, 11, 25, tzinfo=UTC),
        observed_generation=1,
    )
    metrics.states.show_conditions(fleet, [condition])
    metrics.states.show_service(fleet, {"decode": Serving(1, 1)})
    (variable,) = (one for one in json.loads(text())["templating"]["list"] if one["name"] == "namespace")
    asked = re.fullmatch(r"label_values\((\w+), namespace\)", variable["query"])
    assert asked is not None
    shown = [sample for family in metrics.registry.collect() for sample in family.samples if sample.name == asked[1]]
    assert [sample.labels["namespace"] for sample in shown] == ["llm"]


def test_prometheus_parses_every_query(promtool: Path, tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(QUERIES.values())]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    found: dict[str, set[str]] = exported()
    return found | NOT_EXPORTED_BEFORE_USE


@pytest.mark.parametrize("name", QUERIES)
def test_queries_name_exported_series_and_labels(name: str, known: dict[str, set[str]]) -> None:
    expr = QUERIES[name]
    series = re.findall(r"pdpool_[a-z_]+", expr)
    assert series
    assert set(series) <= set(known), name
    used = set(re.findall(r"(\w+)\s*!?=~?\s*\"", expr))
    for labels in re.findall(r"by \(([^)]*)\)", expr):
        used |= set(re.split(r",\s*", labels))
    for one in series:
        assert used <= known[one], (name, one, used - known[one])
