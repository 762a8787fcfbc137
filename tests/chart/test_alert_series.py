"""The series that rules and scenarios name are exported by operator and connectors, with these labels."""

import re
from datetime import UTC, datetime

import pytest
import yaml
from pdpool_connector import ConnectorConfig, DecodeConnector, HostArena, KVMemory
from pdpool_operator.api.base import Condition
from pdpool_operator.diagnose.model import Verdict
from pdpool_operator.observe.keys import Key
from pdpool_operator.observe.router_outcomes import parse_outcomes
from pdpool_operator.observe.samples import Tally
from pdpool_operator.runtime.live_metrics import DemandReading, HoldReading, LiveMetrics, QueueReading
from pdpool_operator.runtime.metrics import Metrics
from pdpool_operator.runtime.state_metrics import PoolCounts, Serving
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from .test_alerts import SCENARIOS

KEY = Key("DecodePool", "llm", "chat")
NOW = datetime(2026, 11, 25, tzinfo=UTC)
QUEUE = ("llm", "chat", "prefill", "0", "0", "prefill_bootstrap")


OF_A_ROUTER = {"smg_worker_cb_outcomes_total": {"worker", "outcome"}}
"""As the operator reads it."""


def exported() -> dict[str, set[str]]:
    """Label names by series name, as scraped from the operator's own registry."""
    metrics = Metrics(
        LiveMetrics(
            queues=lambda: [QueueReading(labels=QUEUE, reqs=1, oldest_s=1.0, moved_total=1, leaked=0)],
            holds=lambda: [HoldReading(labels=QUEUE[:5], held_bytes=1, oldest_s=1.0)],
            verdicts=lambda: {QUEUE[:4]: str(Verdict.UNKNOWN)},
            rotation=lambda: {QUEUE[:4]: True},
            demands=lambda: [DemandReading((*QUEUE[:3], QUEUE[5]), 1, 1.0)],
            leading=lambda: True,
            waiting_keys=lambda: 0,
        )
    )
    condition = Condition(
        type="Ready", status="True", reason="Ready", message="", last_transition_time=NOW, observed_generation=1
    )
    metrics.states.show_conditions(KEY, [condition])
    metrics.states.show_pool(KEY, PoolCounts("decode", 1, 1, 1, 1, repair_budget=1))
    metrics.states.show_service(KEY, {"decode": Serving(1, 1)})
    metrics.states.reconciled(KEY, "error")
    operator = _series(metrics.registry)
    # Prometheus' discovery adds the pod of a connector and the namespace of the operator, unless the series names a
    # pool.
    found = _of_a_connector() | {name: operator[name] for name in ("pdpool_leader", "pdpool_crd_fields_missing")}
    return operator | {name: labels | {"namespace", "pod"} for name, labels in (found | OF_A_ROUTER).items()}


def _series(registry: CollectorRegistry) -> dict[str, set[str]]:
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name.startswith("pdpool_")
    }


def _of_a_connector() -> dict[str, set[str]]:
    arena = HostArena(3 * 64)
    memory = KVMemory(
        kv=tuple(arena.region(64 * index, 64, 1) for index in range(2)),
        aux=(arena.region(128, 64, 1),),
        page_tokens=1,
        layers=1,
        kv_heads=1,
        head_dim=16,
        dtype="float32",
        model="m",
    )
    registry = CollectorRegistry()
    connector = DecodeConnector(ConnectorConfig("127.0.0.1"), memory, lambda: None, registry)
    connector.start()
    try:
        return _series(registry)
    finally:
        connector.close()
        arena.close()


def test_rules_use_exported_series_and_labels_only(rules: str) -> None:
    known = exported()
    for group in yaml.safe_load(rules)["groups"]:
        for rule in group["rules"]:
            series = re.findall(r"((?:pdpool|smg)_[a-z_]+)(?:\{([^}]*)\})?", rule["expr"])
            assert series
            assert {name for name, _ in series} <= set(known), rule["alert"]
            kept = {one for by in re.findall(r"by \(([^)]*)\)", rule["expr"]) for one in re.split(r",\s*", by)}
            for name, matchers in series:
                used = kept | set(re.findall(r"(\w+)\s*[=!]=?~?\s*\"", matchers))
                assert not known[name] or used <= known[name], (rule["alert"], name)


def test_scenarios_feed_series_that_the_operator_exports() -> None:
    known = exported()
    for path in SCENARIOS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for series in test["input_series"]:
                name, _, labels = series["series"].partition("{")
                # Prometheus adds `pod`. The exporter adds the rest.
                assert set(re.findall(r"(\w+)=", labels)) - {"pod"} == known[name] - {"pod"}, series


def test_series_of_the_router_is_the_one_that_the_operator_reads() -> None:
    (name,) = OF_A_ROUTER
    lines = [f'{name}{{worker="http://10.0.0.1:30000",outcome="{word}"}} 3\n' for word in ("success", "failure")]
    assert parse_outcomes("".join(lines).encode()) == {"http://10.0.0.1:30000": Tally(3, 3)}


@pytest.mark.parametrize("verdict", [Verdict.STUCK, Verdict.UNKNOWN, Verdict.FAILING, Verdict.NOTHING_FINISHES])
def test_verdicts_are_called_by_the_operator_s_words(verdict: Verdict, rules: str) -> None:
    assert f'verdict="{verdict}"' in rules
