"""The rules on stock SGLang metrics under promtool. Each clause of them is also broken in turn."""

import subprocess
from pathlib import Path

import pytest
import yaml

from dev.paths import CHECKOUT

from .conftest import CHART, Render

FILE = CHART / "files" / "rules" / "sglang-stock.rules.yaml"
SCENARIO = Path(__file__).parent / "stock_alerts" / "sglang.yaml"
RULES = FILE.read_text()

MUTATIONS = {
    "progress of prefill is ignored": ("changes(sglang:kv_transfer_latency_ms_count[2m])) > 0", "vector(0)) > 0"),
    "transfers of the past count as progress": (
        "kv_transfer_latency_ms_count[2m]",
        "kv_transfer_latency_ms_count[30m]",
    ),
    "absent progress is no stall": (
        "unless\n          sum by (namespace, pod) (changes(sglang:kv",
        "and sum by (namespace, pod) (changes(sglang:kv",
    ),
    "an empty bootstrap queue counts": ("bootstrap_queue_reqs[2m])) > 0", "bootstrap_queue_reqs[2m])) >= 0"),
    "a bootstrap queue that was empty counts": (
        "min_over_time(sglang:num_prefill_bootstrap_queue_reqs",
        "max_over_time(sglang:num_prefill_bootstrap_queue_reqs",
    ),
    "the wrong queue counts": ("num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs"),
    "an empty transfer counts": ("inflight_queue_reqs[2m])) > 0", "inflight_queue_reqs[2m])) >= 0"),
    "a transfer queue that was empty counts": (
        "min_over_time(sglang:num_prefill_inflight",
        "max_over_time(sglang:num_prefill_inflight",
    ),
    "pods are mixed": ("by (namespace, pod)", "by (namespace)"),
    "progress of decode is ignored": ("changes(sglang:generation_tokens_total[2m])) > 0", "vector(0)) > 0"),
    "an empty memory queue counts": ("prealloc_queue_reqs[2m])) > 0", "prealloc_queue_reqs[2m])) >= 0"),
    "waiting for memory does not count": ("num_decode_prealloc_queue_reqs", "num_decode_host_receive_queue_reqs"),
    "waiting for cache does not count": ("num_decode_transfer_queue_reqs", "num_decode_host_receive_queue_reqs"),
    "a decode queue that was empty counts": (
        "min_over_time(sglang:num_decode_transfer",
        "max_over_time(sglang:num_decode_transfer",
    ),
    "a queue fires at once": ("for: 2m", "for: 0s"),
    "a queue fires late": ("for: 2m", "for: 4m"),
    "a few failed handshakes fire": ("[5m])) > 5", "[5m])) > 2"),
    "failed handshakes never fire": ("[5m])) > 5", "[5m])) > 50"),
    "clients that left count": ("num_bootstrap_failed_reqs_total", "num_transfer_failed_reqs_total"),
    "failed handshakes fire at once": ("for: 1m", "for: 0s"),
    "drained memory counts": ('{outcome="timeout"}', ""),
    "no release counts": ('outcome="timeout"}) > 0', 'outcome="timeout"}) >= 0'),
    "the first release fires for ever": ("offset 15m", "offset 2h"),
    "the first release fires for a moment": ("offset 15m", "offset 1m"),
    "a later release fires for ever": ('"timeout"}[15m]', '"timeout"}[2h]'),
    "only the first release fires": ('"timeout"}[15m])) > 0', '"timeout"}[15m])) > 50'),
    "one idle rank of several is progress": (
        "max by (namespace, pod) (min_over_time",
        "min by (namespace, pod) (min_over_time",
    ),
    "a warning for what is critical": ("severity: critical", "severity: warning"),
    "failed handshakes are critical": ("severity: warning", "severity: critical"),
}


def promtool_test(promtool: Path, folder: Path, rules: str) -> subprocess.CompletedProcess[str]:
    (folder / FILE.name).write_text(rules)
    (folder / SCENARIO.name).write_text(SCENARIO.read_text())
    command = [str(promtool), "test", "rules", SCENARIO.name]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_stock_alerts_fire_when_they_should_and_only_then(promtool: Path, tmp_path: Path) -> None:
    result = promtool_test(promtool, tmp_path, RULES)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", MUTATIONS)
def test_stock_scenarios_notice_when(name: str, promtool: Path, tmp_path: Path) -> None:
    old, new = MUTATIONS[name]
    assert old in RULES, f"the rules hold no {old!r} any more"
    result = promtool_test(promtool, tmp_path, RULES.replace(old, new))
    assert result.returncode == 1
    assert "FAILED" in result.stdout + result.stderr
    assert "parse error" not in result.stdout + result.stderr


def test_chart_ships_the_stock_rules_on_demand(render: Render) -> None:
    assert not [one for one in render().all("ConfigMap") if one["metadata"]["name"] == "pdpool-stock-rules"]
    values = {"stockRules": {"enabled": True}, "rules": {"configMap": {"namespace": "monitoring"}}}
    made = render(values).one("ConfigMap", "pdpool-stock-rules", "monitoring")
    assert yaml.safe_load(made["data"]["sglang-stock.rules.yaml"]) == yaml.safe_load(RULES)


def test_every_stock_alert_has_a_section() -> None:
    document = (CHECKOUT / "docs" / "stock-rules.md").read_text()
    for group in yaml.safe_load(RULES)["groups"]:
        for rule in group["rules"]:
            assert f"\n### {rule['alert']}\n" in document
            assert rule["annotations"]["runbook_url"] == f"docs/stock-rules.md#{rule['alert'].lower()}"
