"""The alert rules as the chart renders them, under promtool. Each clause of them is also broken in turn."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from pdpool_operator.api.condition_docs import NEEDS_PERSON
from pdpool_operator.api.reasons import Reason

from .conftest import Render

FOLDER = Path(__file__).parent / "alerts"
SCENARIOS = sorted(FOLDER.glob("*.yaml"))
STUCK = "bootstrap_queue_stuck.yaml"
INSTANCE = "instance_stuck.yaml"
BLIND = "blind.yaml"
MEMORY = "memory.yaml"
SERVING = "serving.yaml"
FAILING = "failing.yaml"
OBJECTS = "objects.yaml"
REACH = "reach.yaml"
CUT = '(pdpool_condition{type="PeersUnreachable"})'
REPAIR = "repair.yaml"
LEAKED = "leaked.yaml"
RANKS = "ranks.yaml"
MISSING = "missing.yaml"
FEW = "few_requests.yaml"
OF_RANK = "instance, rank) ("


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


MUTATIONS = {
    "progress is ignored": (STUCK, ") == 0", ") >= 0"),
    "unknown progress counts as none": (STUCK, "and\n", "unless\n", ") == 0", ") > 0"),
    "an empty queue counts": (STUCK, ") > 0", ") >= 0"),
    "requests that have just come count": (STUCK, "min_over_time", "max_over_time"),
    "any queue counts": (STUCK, ', queue="prefill_bootstrap"', ""),
    "ranks are mixed": (STUCK, "instance, rank)", "instance)"),
    "instances are mixed": (STUCK, "pool, instance, rank)", "pool, rank)"),
    "it fires at once": (STUCK, "for: 3m", "for: 0s"),
    "it fires late": (STUCK, "for: 3m", "for: 5m"),
    "it is not critical": (STUCK, "severity: critical", "severity: info"),
    "a rank that moves diverges": (
        RANKS,
        "changes(pdpool_queue_moved_total[1m])) == 0",
        "changes(pdpool_queue_moved_total[1m])) >= 0",
    ),
    "a rank that had a request at times diverges": (
        RANKS,
        f"role, {OF_RANK}min_over_time",
        f"role, {OF_RANK}max_over_time",
    ),
    "a rank without requests diverges": (RANKS, "(pdpool_queue_reqs[1m])) > 0", "(pdpool_queue_reqs[1m])) >= 0"),
    "a rank diverges from one of another instance": (
        RANKS,
        "and on (namespace, pool, role, instance)\n          sum by (namespace, pool, role, instance)",
        "and on (namespace, pool, role)\n          sum by (namespace, pool, role)",
    ),
    "a rank diverges from ranks that stand still": (
        RANKS,
        "(changes(pdpool_queue_moved_total[1m])) > 0",
        "(changes(pdpool_queue_moved_total[1m])) >= 0",
    ),
    "queues without a leak count": (LEAKED, "(pdpool_queue_leaked_reqs) > 0", "(pdpool_queue_leaked_reqs) >= 0"),
    "leaks of ranks are separate alerts": (
        LEAKED,
        "instance) (pdpool_queue_leaked_reqs)",
        "instance, rank) (pdpool_queue_leaked_reqs)",
    ),
    "a leak fires at once": (LEAKED, "for: 5m", "for: 0s"),
    "a leak fires late": (LEAKED, "for: 5m", "for: 8m"),
    "it does not say where": (STUCK, "Prefill pool {{ $labels.namespace }}/{{ $labels.pool }}", "A pool"),
    "any verdict counts as stuck": (INSTANCE, '{verdict="Stuck"}', "", 'verdict!="Stuck"', 'verdict="None"'),
    "stuck instances of a pool are one": (INSTANCE, "role, instance) (last_over_time", "role) (last_over_time"),
    "a new leader's pod is a new alert": (
        INSTANCE,
        "role, instance) (last_over_time",
        "role, instance, pod) (last_over_time",
    ),
    "a verdict of the past counts": (INSTANCE, '"Stuck"}[1m]', '"Stuck"}[5m]'),
    "a missing sample ends it": (INSTANCE, '"Stuck"}[1m]', '"Stuck"}[15s]'),
    "a stuck instance fires at once": (INSTANCE, "for: 1m", "for: 0s"),
    "a stuck instance fires late": (INSTANCE, "for: 1m", "for: 2m"),
    "a stuck instance is not critical": (INSTANCE, "severity: critical", "severity: info"),
    "a standby counts as a leader": (BLIND, '"} == 1)', '"})'),
    "another release's leader counts": (BLIND, 'pdpool_leader{namespace="pdpool-system"}', "pdpool_leader"),
    "a hand-over is an outage": (BLIND, "for: 5m", "for: 1m"),
    "an outage never fires": (BLIND, "for: 5m", "for: 30m"),
    "any verdict counts as unknown": (BLIND, '{verdict="Unknown"}', ""),
    "unknown fires too early": (BLIND, "for: 10m", "for: 5m"),
    "corruption never fires": (MEMORY, "[1h])) > 0", "[1h])) > 5"),
    "corruption ends with its process": (MEMORY, '"mismatched"}[1h]', '"mismatched"}[15s]'),
    "corruption of two ranks is told as that of one": (
        MEMORY,
        "sum by (namespace, pod) (max_over",
        "max by (namespace, pod) (max_over",
    ),
    "a hold fires too early": (MEMORY, "> 600", "> 300"),
    "a hold never fires": (MEMORY, "> 600", "> 6000"),
    "ranks with holds are mixed": (MEMORY, "instance, rank) (pdpool_held", "instance) (pdpool_held"),
    "scaling to zero is an outage": (
        SERVING,
        "(pdpool_service_wanted[15m])) > 0",
        "(pdpool_service_wanted[15m])) >= 0",
    ),
    "starting again from zero is an outage": (
        SERVING,
        "(min_over_time(pdpool_service_wanted[15m])) > 0\n        for",
        "(pdpool_service_wanted) > 0\n        for",
    ),
    "an end of zero is never forgotten": (
        SERVING,
        "min_over_time(pdpool_service_wanted[15m]",
        "min_over_time(pdpool_service_wanted[2h]",
    ),
    "a short gap is an outage": (SERVING, "for: 1m", "for: 0s"),
    "an outage of a service fires late": (SERVING, "for: 1m", "for: 2m"),
    "a first start is an outage": (
        SERVING,
        "(max_over_time(pdpool_service_serving[1h])) > 0",
        "(max_over_time(pdpool_service_serving[1h])) >= 0",
    ),
    "an outage outlasts its cause": (SERVING, "[5m:15s])) > 2", "[5m:15s])) >= 0"),
    "a part that comes back for moments serves": (SERVING, "[5m:15s])) < 0.5", "[5m:15s])) < 0.1"),
    "parts of a service are mixed": (SERVING, "(namespace, service, part)", "(namespace, service)"),
    "one instance of several is an outage": (SERVING, "(pdpool_service_serving) == 0", "(pdpool_service_serving) <= 1"),
    "a new leader ends an outage of a service": (
        SERVING,
        "by (namespace, service, part)",
        "by (namespace, service, part, pod)",
    ),
    "an outage at the start never fires": (SERVING, "[15m:15s])) < 0.05", "[15m:15s])) < 0"),
    "a start that took most of the time fires": (SERVING, "[15m:15s])) < 0.05", "[15m:15s])) < 0.9"),
    "a first start has no time": (SERVING, "offset 15m)", "offset 10m)"),
    "an outage of a service is not critical": (SERVING, "severity: critical", "severity: info"),
    "pools that fit contradict each other": (SERVING, 'type="Available", reason="PoolsContradict"', 'type="Available"'),
    "each condition of a contradiction is an alert": (
        SERVING,
        '(namespace, name) (pdpool_condition{type="Available", reason="Pools',
        '(namespace, name, type) (pdpool_condition{reason="Pools',
    ),
    "a change of the operator is another contradiction": (
        SERVING,
        '(namespace, name) (pdpool_condition{type="Available", reason="Pools',
        '(namespace, name, pod) (pdpool_condition{type="Available", reason="Pools',
    ),
    "a roll-out counts as a hang": (
        MISSING,
        "unless\n          max by (namespace, pool, role) (changes",
        "and on ()\n          max by (namespace, pool, role) (changes",
    ),
    "an instance that comes and goes is missing": (
        MISSING,
        "max_over_time(pdpool_pool_available",
        "min_over_time(pdpool_pool_available",
    ),
    "a larger spec counts at once": (
        MISSING,
        "min_over_time(pdpool_pool_wanted[30m])",
        "max_over_time(pdpool_pool_wanted[30m])",
    ),
    "a young pool misses instances": (MISSING, "(pdpool_pool_wanted offset 30m)", "(pdpool_pool_wanted)"),
    "instances are missing too early": (MISSING, "[30m]", "[10m]"),
    "missing instances fire late": (MISSING, "[30m]", "[2h]"),
    "pools with missing instances are mixed": (MISSING, "by (namespace, pool, role) (m", "by (namespace, role) (m"),
    "missing instances are critical": (MISSING, "severity: warning", "severity: critical"),
    "a success of the past does not count": (FEW, 'outcome="success"}[10m]', 'outcome="success"}[15s]'),
    "a single failure fires": (
        FEW,
        "and\n          sum by (namespace, pod) (increase(smg",
        "or\n          sum by (namespace, pod) (increase(smg",
    ),
    "routers are mixed": (FEW, "sum by (namespace, pod) (increase(smg", "sum by (namespace) (increase(smg"),
    "engines are alerts of their own": (
        FEW,
        "sum by (namespace, pod) (increase(smg",
        "sum by (namespace, pod, worker) (increase(smg",
    ),
    "failures of a router are no page": (FEW, "severity: critical", "severity: warning"),
    "an operator that crashes again and again is up": (BLIND, "[10m:15s]) < 0.5", "[10m:15s]) < 0.1"),
    "an operator that was just installed is down": (BLIND, "[10m:15s]) > 2", "[10m:15s]) >= 0"),
    "an instance that is healed stays stuck": (
        INSTANCE,
        'unless\n          max by (namespace, pool, role, instance) (pdpool_instance_verdict{verdict!="Stuck"})',
        "",
    ),
    "a pod that starts in between can run": (OBJECTS, "[15m:15s]\n          ) > 20", "[15m:15s]\n          ) > 40"),
    "a pod that was healed cannot run": (OBJECTS, "[5m:15s]", "[15m:15s]"),
    "a pod that cannot run fires at once": (OBJECTS, "[15m:15s]\n          ) > 20", "[15m:15s]\n          ) > 0"),
    "sums that agree count as corruption": (MEMORY, '{outcome="mismatched"}', ""),
    "corruption fires for the first rank only": (MEMORY, '{outcome="mismatched"}', '{outcome="mismatched", rank="0"}'),
    "corruption is not critical": (MEMORY, "severity: critical", "severity: info"),
    "any verdict counts as failing": (FAILING, '{verdict="Failing"}', ""),
    "stuck instances count as failing": (FAILING, 'verdict="Failing"', 'verdict=~"Failing|Stuck"'),
    "failing instances of a pool are one": (
        FAILING,
        'role, instance) (pdpool_instance_verdict{verdict="Failing"}',
        'role) (pdpool_instance_verdict{verdict="Failing"}',
    ),
    "a failing instance fires late": (FAILING, "for: 1m", "for: 2m"),
    "a failing instance fires at once": (FAILING, "for: 1m", "for: 0s"),
    "a past failing instance counts": (
        FAILING,
        'pdpool_instance_verdict{verdict="Failing"}',
        'max_over_time(pdpool_instance_verdict{verdict="Failing"}[5m])',
    ),
    "a failing instance counts as nothing": (
        FAILING,
        'verdict="NothingFinishes"',
        'verdict=~"NothingFinishes|Failing"',
    ),
    "a burst of failures fires": (FAILING, "for: 2m", "for: 1m"),
    "each instance of a pair is an alert": (
        FAILING,
        'role) (pdpool_instance_verdict{verdict="NothingFinishes"}',
        'role, instance) (pdpool_instance_verdict{verdict="NothingFinishes"}',
    ),
    "a budget that is left counts as spent": (REPAIR, "budget_remaining) == 0", "budget_remaining) <= 1"),
    "a spent budget fires without a fault": (REPAIR, 'verdict=~"Stuck|Failing"', 'verdict=~".*"'),
    "repair ignores failing instances": (REPAIR, 'verdict=~"Stuck|Failing"', 'verdict="Stuck"'),
    "repair ignores stuck instances": (REPAIR, 'verdict=~"Stuck|Failing"', 'verdict="Failing"'),
    "a spent budget fires at once": (REPAIR, "for: 1m", "for: 0s"),
    "a spent budget fires late": (REPAIR, "for: 1m", "for: 5m"),
    "a spent budget is not critical": (REPAIR, "severity: critical", "severity: info"),
    "a fault of another pool counts": (REPAIR, "and on (namespace, pool, role)", "and on (namespace)"),
    "a spent budget has two alerts": (REPAIR, ', reason!="RepairBudgetSpent"', ""),
    "only a spent budget stops repair": (REPAIR, 'reason!="RepairBudgetSpent"', 'reason="RepairBudgetSpent"'),
    "any condition stops repair": (REPAIR, 'type="RepairStopped", ', ""),
    "stopped repair never fires": (
        REPAIR,
        'reason!="RepairBudgetSpent"}\n          ) == 1',
        'reason!="RepairBudgetSpent"}\n          ) > 1',
    ),
    "stopped repair fires at once": (
        REPAIR,
        'reason!="RepairBudgetSpent"}\n          ) == 1\n        for: 1m',
        'reason!="RepairBudgetSpent"}\n          ) == 1\n        for: 0s',
    ),
    "stopped repair fires late": (
        REPAIR,
        'reason!="RepairBudgetSpent"}\n          ) == 1\n        for: 1m',
        'reason!="RepairBudgetSpent"}\n          ) == 1\n        for: 5m',
    ),
    "a past stop counts": (
        REPAIR,
        'pdpool_condition{type="RepairStopped", reason!="RepairBudgetSpent"}',
        'max_over_time(pdpool_condition{type="RepairStopped", reason!="RepairBudgetSpent"}[5m])',
    ),
    "pools with stopped repair are mixed": (
        REPAIR,
        '(kind, namespace, name, reason) (\n            pdpool_condition{type="RepairStopped"',
        '(namespace, reason) (\n            pdpool_condition{type="RepairStopped"',
    ),
    "a new leader starts the minute again": (
        REPAIR,
        '(kind, namespace, name, reason) (\n            pdpool_condition{type="RepairStopped"',
        '(kind, namespace, name, reason, pod) (\n            pdpool_condition{type="RepairStopped"',
    ),
    "a cut fires at once": (REACH, f"{CUT} == 1\n        for: 1m", f"{CUT} == 1\n        for: 0s"),
    "a cut fires late": (REACH, f"{CUT} == 1\n        for: 1m", f"{CUT} == 1\n        for: 5m"),
    "a cut never fires": (REACH, f"{CUT} == 1", f"{CUT} > 1"),
    "any condition is a cut": (REACH, CUT, "(pdpool_condition)"),
    "a past cut counts": (REACH, CUT, f"(max_over_time{CUT.removesuffix(')')}[5m]))"),
    "pools with cuts are mixed": (REACH, f"name) {CUT}", f"reason) {CUT}"),
    "a new leader starts the minute of a cut again": (REACH, f"name) {CUT}", f"name, pod) {CUT}"),
    "a short failure of reconciles fires": (OBJECTS, "for: 5m", "for: 2m"),
    "failing reconciles never fire": (OBJECTS, "failing_seconds) > 0", "failing_seconds) > 6000"),
    "objects are mixed": (OBJECTS, "kind, namespace, name", "kind, namespace"),
    "each condition is an alert": (OBJECTS, "name, reason)", "name, reason, type)"),
    "any reason counts": (OBJECTS, 'reason=~"SpecInvalid|TemplateInvalid', 'reason=~".*|SpecInvalid|TemplateInvalid'),
    "crash loops do not count": (OBJECTS, "|CrashLoop", ""),
    "a start counts as a pod that cannot run": (OBJECTS, "|CrashLoop", "|CrashLoop|Starting"),
    "any status of the transport counts": (OBJECTS, '{type="TransferReady", status="False"}', '{type="TransferReady"}'),
    "an unknown transport counts": (OBJECTS, 'Ready", status="False"', 'Ready", status!="True"'),
    "any false condition is a transport": (OBJECTS, 'type="TransferReady", ', ""),
    "a transport without RDMA never fires": (OBJECTS, 'status="False"}) == 1', 'status="False"}) > 1'),
    "a transport without RDMA fires early": (
        OBJECTS,
        'status="False"}) == 1\n        for: 5m',
        'status="False"}) == 1\n        for: 2m',
    ),
    "a transport without RDMA fires late": (
        OBJECTS,
        'status="False"}) == 1\n        for: 5m',
        'status="False"}) == 1\n        for: 10m',
    ),
    "transports of pools are mixed": (
        OBJECTS,
        '(kind, namespace, name) (pdpool_condition{type="TransferReady"',
        '(kind, namespace) (pdpool_condition{type="TransferReady"',
    ),
    "a new leader ends a transport without RDMA": (
        OBJECTS,
        '(kind, namespace, name) (pdpool_condition{type="TransferReady"',
        '(kind, namespace, name, pod) (pdpool_condition{type="TransferReady"',
    ),
    "a past transport counts": (
        OBJECTS,
        'pdpool_condition{type="TransferReady", status="False"}',
        'max_over_time(pdpool_condition{type="TransferReady", status="False"}[5m])',
    ),
    "a complete CRD counts": (OBJECTS, "(pdpool_crd_fields_missing) > 0", "(pdpool_crd_fields_missing) >= 0"),
    "an old CRD never fires": (OBJECTS, "(pdpool_crd_fields_missing) > 0", "(pdpool_crd_fields_missing) > 9"),
}


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
