"""Series about objects follow their newest state, and every series of the operator is documented."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pdpool_operator.api.base import Condition, ConditionStatus
from pdpool_operator.observe.keys import Key
from pdpool_operator.runtime.live_metrics import DemandReading, HoldReading, LiveMetrics, QueueReading
from pdpool_operator.runtime.metrics import Metrics
from pdpool_operator.runtime.state_metrics import ObjectStates, PoolCounts, Serving
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

PAGE = Path(__file__).resolve().parents[4] / "docs" / "monitoring.md"
POOL, SERVICE = Key("DecodePool", "llm", "chat"), Key("DisaggregatedService", "llm", "chat")
RANK = ("llm", "chat", "decode", "0", "0")
TRUE, FALSE = ConditionStatus.TRUE, ConditionStatus.FALSE


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def states(clock: Clock) -> ObjectStates:
    return ObjectStates(clock)


def condition(type_: str, status: ConditionStatus, reason: str) -> Condition:
    return Condition(
        type=type_,
        status=status,
        reason=reason,
        message="words",
        last_transition_time=datetime(2026, 11, 25, tzinfo=UTC),
        observed_generation=1,
    )


def series(states: ObjectStates, name: str) -> dict[tuple[str, ...], float]:
    """Values of a metric by the values of its labels, in the order of their names."""
    registry = CollectorRegistry()
    registry.register(states)
    return {
        tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_condition_that_changes_leaves_no_old_series(states: ObjectStates) -> None:
    states.show_conditions(POOL, [condition("Ready", FALSE, "Starting"), condition("Available", FALSE, "NoPods")])
    states.show_conditions(POOL, [condition("Ready", TRUE, "Ready"), condition("Available", FALSE, "NoPods")])
    assert series(states, "pdpool_condition") == {
        ("DecodePool", "chat", "llm", "Ready", "True", "Ready"): 1,
        ("DecodePool", "chat", "llm", "NoPods", "False", "Available"): 1,
    }


def test_deleted_object_has_no_series(states: ObjectStates) -> None:
    states.show_conditions(POOL, [condition("Ready", TRUE, "Ready")])
    states.show_pool(POOL, PoolCounts("decode", 2, 1, 1, 2))
    states.show_service(SERVICE, {"decode": Serving(2, 1)})
    states.reconciled(POOL, "error")
    states.drop(POOL)
    states.drop(SERVICE)
    assert [sample for family in states.collect() for sample in family.samples] == []


def test_pools_of_one_name_are_told_apart_by_role(states: ObjectStates) -> None:
    states.show_pool(POOL, PoolCounts("decode", wanted=4, ready=3, available=2, updated=1))
    states.show_pool(Key("PrefillPool", "llm", "chat"), PoolCounts("prefill", 8, 7, 6, 5))
    values = {n: series(states, f"pdpool_pool_{n}") for n in ("wanted", "ready", "available", "updated")}
    assert {n: v["llm", "chat", "decode"] for n, v in values.items()} == {
        "wanted": 4,
        "ready": 3,
        "available": 2,
        "updated": 1,
    }
    assert values["wanted"]["llm", "chat", "prefill"] == 8


def test_part_that_a_service_no_longer_has_ends(states: ObjectStates) -> None:
    states.show_service(SERVICE, {"decode": Serving(2, 1), "router": Serving(1, 1)})
    states.show_service(SERVICE, {"decode": Serving(2, 2)})
    assert series(states, "pdpool_service_serving") == {("llm", "decode", "chat"): 2}


class TestFailingReconciles:
    NAME = "pdpool_reconcile_failing_seconds"
    LABELS = ("DecodePool", "chat", "llm")

    def test_time_counts_from_the_first_failure_in_a_row(self, states: ObjectStates, clock: Clock) -> None:
        for _ in range(3):
            states.reconciled(POOL, "error")
            clock.now += 10
        assert series(states, self.NAME) == {self.LABELS: 30}

    @pytest.mark.parametrize("outcome", ["ok", "refused"])
    def test_answer_of_the_api_server_ends_it(self, states: ObjectStates, outcome: str) -> None:
        states.reconciled(POOL, "error")
        states.reconciled(POOL, outcome)
        assert series(states, self.NAME) == {}

    def test_faster_writer_neither_begins_nor_ends_it(self, states: ObjectStates) -> None:
        states.reconciled(POOL, "conflict")
        assert series(states, self.NAME) == {}
        states.reconciled(POOL, "error")
        states.reconciled(POOL, "conflict")
        assert self.LABELS in series(states, self.NAME)


def exported() -> dict[str, tuple[str, frozenset[str]]]:
    """Kind and labels of everything that the operator exports, by the name that a person would query."""
    metrics = Metrics(
        LiveMetrics(
            queues=lambda: [QueueReading((*RANK, "decode_transfer"), 1, 1.0, 1, 0)],
            holds=lambda: [HoldReading(RANK, 1, 1.0)],
            verdicts=lambda: {RANK[:4]: "Idle"},
            rotation=lambda: {RANK[:4]: True},
            demands=lambda: [DemandReading((*RANK[:3], "decode_transfer"), 1, 1.0)],
            leading=lambda: True,
            waiting_keys=lambda: 0,
        )
    )
    metrics.states.show_conditions(POOL, [condition("Ready", TRUE, "Ready")])
    metrics.states.show_pool(POOL, PoolCounts("decode", 1, 1, 1, 1, repair_budget=1))
    metrics.states.show_service(SERVICE, {"decode": Serving(1, 1)})
    metrics.states.reconciled(POOL, "error")
    metrics.report_missing_fields(["decodepools.pdpool.dev: spec.rdma"])
    metrics.reconciles.labels("DecodePool", "ok").inc()
    metrics.reconcile_seconds.labels("DecodePool").observe(1)
    metrics.status_writes.labels("DecodePool", "ok").inc()
    metrics.samples.labels("decode", "engine", "ok").inc()
    metrics.fences.labels("given").inc()
    metrics.repairs.labels("llm", "chat", "decode", "restart", "done").inc()
    metrics.operations.labels("llm", "chat", "decode", "drain", "failed").inc()
    metrics.on_call("get", "pods", 200)
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        if not name.endswith("_created"):
            found[name] = (family.type, frozenset(labels))
    return found


def documented(lines: Iterable[str]) -> dict[str, tuple[str, frozenset[str]]]:
    rows = (re.fullmatch(r"\| `(pdpool_(?!connector_)\w+)` \| (\w+) \|([^|]*)\| [^|]+ \|", line) for line in lines)
    return {row[1]: (row[2], frozenset(re.findall(r"`(\w+)`", row[3]))) for row in rows if row}


def test_every_series_is_documented_and_nothing_else() -> None:
    assert documented(PAGE.read_text().splitlines()) == exported()
