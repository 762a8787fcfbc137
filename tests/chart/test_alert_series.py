"""The series that the rules and their scenarios speak of are those that the operator exports, labels included."""

import re

import yaml
from pdpool_operator.diagnose.model import Verdict
from pdpool_operator.runtime.metrics import Metrics, QueueReading
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from .test_alerts import SCENARIOS

QUEUE = ("llm", "chat", "prefill", "0", "0", "prefill_bootstrap")


def exported() -> dict[str, set[str]]:
    """Label names by series name, as scraped from the operator's own registry."""
    metrics = Metrics(
        queues=lambda: [QueueReading(labels=QUEUE, reqs=1, oldest_s=1.0, moved_total=1)],
        verdicts=lambda: {QUEUE[:4]: str(Verdict.UNKNOWN)},
        leading=lambda: True,
        waiting_keys=lambda: 0,
    )
    text = generate_latest(metrics.registry).decode()
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("pdpool_")
    }


def test_rules_use_exported_series_and_labels_only(rules: str) -> None:
    known = exported()
    for group in yaml.safe_load(rules)["groups"]:
        for rule in group["rules"]:
            names = re.findall(r"pdpool_[a-z_]+", rule["expr"])
            assert names
            assert set(names) <= set(known), rule["alert"]
            used = set(re.findall(r"(\w+)\s*=~?\s*\"", rule["expr"]))
            for labels in re.findall(r"by \(([^)]*)\)", rule["expr"]):
                used |= set(re.split(r",\s*", labels))
            for name in names:
                assert not known[name] or used <= known[name], (rule["alert"], name)


def test_scenarios_feed_series_that_the_operator_exports() -> None:
    known = exported()
    for path in SCENARIOS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for series in test["input_series"]:
                name, _, labels = series["series"].partition("{")
                # Prometheus adds `pod`; the rest is the operator's.
                assert set(re.findall(r"(\w+)=", labels)) - {"pod"} == known[name], series


def test_unknown_instances_are_called_by_the_operator_s_word(rules: str) -> None:
    assert f'verdict="{Verdict.UNKNOWN}"' in rules
