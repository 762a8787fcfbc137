"""The alert rules as the chart renders them, under promtool. Each clause of them is also broken in turn."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from pdpool_operator.api.condition_docs import NEEDS_PERSON
from pdpool_operator.api.reasons import Reason

from .alert_mutations import MUTATIONS
from .conftest import Render

FOLDER = Path(__file__).parent / "alerts"
SCENARIOS = sorted(FOLDER.glob("*.yaml"))


def run_scenario(promtool: Path, folder: Path, rules: str, scenario: Path) -> subprocess.CompletedProcess[str]:
    """Run a scenario with the rules that it names. The others would take most of the time."""
    text, found = scenario.read_text(), yaml.safe_load(rules)
    for group in found["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule["alert"] in text]
    (folder / "pdpool.rules.yaml").write_text(yaml.safe_dump(found))
    (folder / scenario.name).write_text(text)
    command = [promtool, "test", "rules", scenario.name]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


def test_rules_are_valid(promtool: Path, tmp_path: Path, rules: str) -> None:
    path = tmp_path / "pdpool.rules.yaml"
    path.write_text(rules)
    command = [promtool, "check", "rules", "--lint-fatal", path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_only_then(promtool: Path, tmp_path: Path, rules: str, scenario: Path) -> None:
    result = run_scenario(promtool, tmp_path, rules, scenario)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", MUTATIONS)
def test_scenarios_notice_when(name: str, promtool: Path, tmp_path: Path, rules: str) -> None:
    scenario, *replacements = MUTATIONS[name]
    broken = rules
    for old, new in zip(replacements[::2], replacements[1::2], strict=True):
        assert old in broken, f"the rules hold no {old!r} any more"
        broken = broken.replace(old, new)
    result = run_scenario(promtool, tmp_path, broken, FOLDER / scenario)
    assert result.returncode == 1
    assert "FAILED" in result.stdout + result.stderr
    assert "parse error" not in result.stdout + result.stderr


def test_windows_are_values(render: Render) -> None:
    windows = {
        "noProgress": "11s",
        "bootstrapQueueStuck": "12s",
        "instanceStuck": "16s",
        "instanceFailing": "17s",
        "cannotServe": "18s",
        "operatorDown": "13s",
        "instanceUnknown": "14s",
        "memoryHeld": "15s",
    }
    text = render({"rules": {"windows": windows}}).one("ConfigMap", "pdpool-rules")["data"]["pdpool.rules.yaml"]
    rules = {rule["alert"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}
    set_by_values = {alert: rule["for"] for alert, rule in rules.items() if rule.get("for", "").endswith("s")}
    assert set_by_values == {
        "PdpoolPrefillBootstrapQueueStuck": "12s",
        "PdpoolRankDivergence": "12s",
        "PdpoolInstanceStuck": "16s",
        "PdpoolInstanceFailing": "17s",
        "PdpoolServiceCannotServe": "18s",
        "PdpoolOperatorDown": "13s",
        "PdpoolInstanceUnknown": "14s",
    }
    assert rules["PdpoolMemoryHeld"]["expr"].endswith("> 15")
    assert "[11s]" in rules["PdpoolPrefillBootstrapQueueStuck"]["expr"]
    assert "${" not in text


def test_the_alert_on_the_operator_is_about_the_one_of_the_release(render: Render) -> None:
    values = {"rules": {"configMap": {"namespace": "monitoring"}, "prometheusRule": {"enabled": True}}}
    rendered = render(values, namespace="team", api_versions="monitoring.coreos.com/v1")
    texts = [
        rendered.one("ConfigMap", "pdpool-rules", "monitoring")["data"]["pdpool.rules.yaml"],
        yaml.safe_dump(rendered.one("PrometheusRule", "pdpool")["spec"]),
    ]
    for text in texts:
        rules = {rule["alert"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}
        assert 'absent(pdpool_leader{namespace="team"} == 1)' in rules["PdpoolOperatorDown"]["expr"]
        assert rules["PdpoolOperatorDown"]["expr"].count('{namespace="team"}') == 3


@pytest.mark.parametrize("window", ["instanceStuck", "memoryHeld", "instanceFailing", "cannotServe"])
def test_reused_values_without_a_window_are_refused(render: Render, window: str) -> None:
    rendered = render({"rules": {"windows": {window: None}}})
    assert rendered.failed
    assert f"'{window}'" in rendered.error


def test_every_alert_has_a_section_in_the_documentation(rules: str) -> None:
    document = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    for group in yaml.safe_load(rules)["groups"]:
        for rule in group["rules"]:
            assert f"\n### {rule['alert']}\n" in document
            assert rule["annotations"]["runbook_url"] == f"docs/monitoring.md#{rule['alert'].lower()}"


def test_runbooks_are_linked_where_the_value_says(render: Render) -> None:
    rendered = render({"rules": {"runbookUrl": "https://wiki.example/pdpool"}})
    text = rendered.one("ConfigMap", "pdpool-rules")["data"]["pdpool.rules.yaml"]
    links = {rule["annotations"]["runbook_url"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}
    assert "https://wiki.example/pdpool#pdpooloperatordown" in links
    assert all(link.startswith("https://wiki.example/pdpool#pdpool") for link in links)


WORDS = re.compile(r'reason=~"([A-Za-z|]+)"')


def test_every_reason_that_needs_a_person_has_one_alert(rules: str) -> None:
    alerted = [reason for group in set(WORDS.findall(rules)) for reason in group.split("|")]
    by_other_series = {
        Reason.API_FAILING: "PdpoolReconcileFailing",
        Reason.ENGINES_NOT_READY: "PdpoolInstancesMissing",
        Reason.POOLS_CONTRADICT: "PdpoolPoolsContradict",
    }
    assert all(alert in rules for alert in by_other_series.values())
    assert sorted(alerted) == sorted(str(reason) for reason in NEEDS_PERSON - by_other_series.keys())
