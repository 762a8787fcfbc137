"""Windows with which the alert on a stuck bootstrap queue could not fire, or would fire on a queue that moves."""

from typing import Any

import pytest
from pdpool_connector import ConnectorConfig
from pdpool_reference.request import DEFAULT_DEADLINE_S

from .conftest import Render

DEADLINE_S = ConnectorConfig("127.0.0.1").request_deadline_s


def windows(no_progress: str, stuck: str, interval: str | None = None) -> dict[str, Any]:
    values: dict[str, Any] = {"rules": {"windows": {"noProgress": no_progress, "bootstrapQueueStuck": stuck}}}
    if interval is not None:
        values["metrics"] = {"podMonitor": {"enabled": True, "interval": interval}}
    return values


def test_engines_agree_on_the_deadline_that_the_chart_knows() -> None:
    assert DEADLINE_S == DEFAULT_DEADLINE_S == 300


@pytest.mark.parametrize(
    ("no_progress", "stuck"),
    [
        ("10m", "3m"),
        ("1m", "5m"),
        ("1m", f"{DEADLINE_S - 60:.0f}s"),
        ("1m30s", "3m30s"),
        ("1m", "239s1000ms"),
        ("1h", "1s"),
        ("1s", "1d"),
        ("08m", "1m"),
        ("010s", "4m50s"),
    ],
)
def test_windows_that_reach_the_deadline_are_refused(render: Render, no_progress: str, stuck: str) -> None:
    refused = render(windows(no_progress, stuck))
    assert refused.failed
    assert (
        f"rules.windows: noProgress ({no_progress}) and bootstrapQueueStuck ({stuck}) must together be" in refused.error
    )
    assert f"shorter than the engines' request deadline ({DEADLINE_S:.0f} s), such as 1m and 3m" in refused.error


@pytest.mark.parametrize(
    ("no_progress", "stuck"),
    [
        ("1m", f"{DEADLINE_S - 61:.0f}s"),
        ("1m30s", "3m29s"),
        ("1m", "239s999ms"),
        ("500ms", "4m59s"),
        ("010s", "4m49s"),
        ("12s", "15s"),
    ],
)
def test_windows_below_the_deadline_pass(render: Render, no_progress: str, stuck: str) -> None:
    rendered = render(windows(no_progress, stuck))
    assert f"[{no_progress}]" in rendered.one("ConfigMap", "pdpool-rules")["data"]["pdpool.rules.yaml"]


def test_windows_of_rules_that_are_not_installed_are_not_judged(render: Render) -> None:
    values = windows("10m", "10m")
    values["rules"]["configMap"] = {"enabled": False}
    assert not render(values).failed


@pytest.mark.parametrize(("interval", "no_progress"), [("30s", "1m"), ("15s", "59s"), ("1m", "1m30s")])
def test_a_window_of_less_than_four_scrapes_is_refused(render: Render, interval: str, no_progress: str) -> None:
    refused = render(windows(no_progress, "2m", interval), api_versions="monitoring.coreos.com/v1")
    assert refused.failed
    assert f"rules.windows.noProgress: {no_progress} is shorter than four scrape intervals" in refused.error
    assert f"metrics.podMonitor.interval: {interval}" in refused.error


def test_a_window_of_four_scrapes_passes(render: Render) -> None:
    rendered = render(windows("2m", "2m", "30s"), api_versions="monitoring.coreos.com/v1")
    assert rendered.all("PodMonitor"), rendered.error
