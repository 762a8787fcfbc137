"""The table of metrics is complete, and nothing in it is made up."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from pdpool_connector.runtime.metrics import PREFIX, ConnectorCollector, state_json
from pdpool_connector.runtime.stats import ConnectorStats, Distribution, PeerStats, QueueStats
from pdpool_operator.observe.connector_state import parse_state
from pdpool_operator.observe.samples import Tally
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

TABLE = Path(__file__).resolve().parents[3] / "docs" / "monitoring.md"


@pytest.fixture
def stats() -> ConnectorStats:
    return ConnectorStats(
        role="prefill",
        rank=0,
        ranks=1,
        incarnation="a" * 32,
        engine="engine 1",
        connector_version="0",
        backend="nixl",
        pod_uid="",
        container="",
        uptime_s=1.0,
        loop_lag_s=0.25,
        engine_beat_age_s=None,
        engine_paused=False,
        draining=False,
        queues={},
        engine_queues={},
        attempts={"waiting": QueueStats(2, 1.5, 7)},
        outcomes={"done": 3},
        causes={"aborted": 1},
        releases=Distribution((0.1, 1.0), (2, 0, 1), 5.5),
        checksums={"mismatched": 0},
        flights_lost={"skipped": 4},
        drops={"stale": 5},
        holds=1,
        held_bytes=4096,
        held_oldest_s=9.0,
        held_for=(),
        bytes_moved_total=10,
        tombstones=6,
        faults=0,
        peers=(PeerStats("b" * 32, "h:1", 0.1, 1, 0, "nixl", "rc"),),
        links=(),
    )


def families(stats: ConnectorStats) -> dict[str, tuple[str, set[str]]]:
    """Kind and labels by the name that a person would query."""
    registry = CollectorRegistry()
    registry.register(ConnectorCollector(lambda: [stats]))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, labels)
    return found


def test_table_of_the_docs_names_each_metric(stats) -> None:
    _, _, text = TABLE.read_text().partition("\n### Table of the connector's metrics\n")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", text, re.MULTILINE)
    documented = {name: (kind, {"rank", *re.findall(r"`(\w+)`", labels)}) for name, kind, labels in rows}
    assert documented == families(stats)
    assert all(name.startswith(PREFIX) for name in documented)


def test_release_times_are_cumulative(stats) -> None:
    registry = CollectorRegistry()
    registry.register(ConnectorCollector(lambda: [stats]))

    def value(suffix: str, labels: dict[str, str] | None = None) -> float | None:
        return registry.get_sample_value(f"{PREFIX}release_seconds_{suffix}", {"rank": "0", **(labels or {})})

    assert [value("bucket", {"le": bound}) for bound in ("0.1", "1.0", "+Inf")] == [2, 2, 3]
    assert value("count") == 3
    assert value("sum") == 5.5


def test_ranks_share_families_and_have_own_series(stats) -> None:
    other = replace(stats, rank=1, checksums={"mismatched": 3}, tombstones=7)
    registry = CollectorRegistry()
    registry.register(ConnectorCollector(lambda: [stats, other]))
    for rank, (mismatched, tombstones) in {"0": (0, 6), "1": (3, 7)}.items():
        labels = {"rank": rank, "outcome": "mismatched"}
        assert registry.get_sample_value(f"{PREFIX}checksums_total", labels) == mismatched
        assert registry.get_sample_value(f"{PREFIX}tombstones", {"rank": rank}) == tombstones
    types = re.findall(r"^# TYPE (\w+)", generate_latest(registry).decode(), re.MULTILINE)
    assert len(types) == len(set(types)) == len(families(stats))


def test_transports_in_use_have_one_series_each(stats) -> None:
    peer = PeerStats("c" * 32, "h:2", 0.1, 1, 0, "nixl", "tcp")
    registry = CollectorRegistry()
    registry.register(ConnectorCollector(lambda: [replace(stats, peers=(*stats.peers, peer, peer))]))
    for transport in ("rc", "tcp"):
        labels = {"rank": "0", "backend": "nixl", "transport": transport}
        assert registry.get_sample_value(f"{PREFIX}transport_info", labels) == 1


def test_operator_reads_outcomes_and_causes_of_the_state(stats) -> None:
    stats = replace(stats, outcomes={"done": 9, "failed": 5, "aborted": 1}, causes={"internal": 3, "too_long": 2})
    assert parse_state(state_json(stats)).ended == Tally(9, 3)
