"""The operator's HTTP endpoints, events and logs. How workers handle failures. Settings that prevent a start."""

import asyncio
import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from pdpool_operator.observe.keys import Key
from pdpool_operator.runtime import health, logs, manager
from pdpool_operator.runtime.api_errors import ConflictError, ForbiddenError, NotFoundError, UnavailableError
from pdpool_operator.runtime.config import ConfigInvalidError, load
from pdpool_operator.runtime.health import BLIND_LIMIT_S, BLIND_SHOWN_S
from pdpool_operator.runtime.live_metrics import HoldReading, LiveMetrics, QueueReading
from pdpool_operator.runtime.manager import Result, work
from pdpool_operator.runtime.metrics import Metrics
from pdpool_operator.runtime.queue import BACKOFF_FIRST_S, WorkQueue
from pdpool_operator.runtime.recorder import NOTE_LIMIT, Recorder
from pdpool_operator.runtime.resources import PODS

READING = QueueReading(("llm", "chat", "prefill", "0", "0", "prefill_bootstrap"), 3, None, 17)
HELD = HoldReading(("llm", "chat", "prefill", "0", "1"), 4096, 7.5)


@pytest.fixture
def world() -> SimpleNamespace:
    return SimpleNamespace(
        queues=[READING],
        holds=[HELD],
        verdicts={("llm", "chat", "prefill", "0"): "Stuck"},
        stalled=0.0,
        state=None,
        blind=(0.0, ""),
    )


@pytest.fixture
def metrics(world) -> Metrics:
    return Metrics(
        LiveMetrics(
            queues=lambda: world.queues,
            holds=lambda: world.holds,
            verdicts=lambda: world.verdicts,
            rotation=dict,
            demands=tuple,
            leading=lambda: True,
            waiting_keys=lambda: 2,
        )
    )


@pytest.fixture
async def client(world, metrics):
    app = health.application(
        metrics.registry, stalled_s=lambda: world.stalled, state=lambda: world.state, blind=lambda: world.blind
    )
    async with TestClient(TestServer(app)) as one:
        yield one


async def get(client: TestClient, path: str) -> tuple[int, str]:
    answer = await client.get(path)
    return answer.status, await answer.text()


async def test_it_is_ready_as_leader_or_standby_and_healthy_while_work_goes_on(world, client):
    assert (await get(client, "/readyz"))[0] == 503
    for state in ("standby", "leader"):
        world.state = state
        assert await get(client, "/readyz") == (200, f"{state}\n")
    assert (await get(client, "/healthz"))[0] == 200
    world.stalled = 1000.0
    assert await get(client, "/healthz") == (503, "no reconcile has ended for 1000 s\n")


async def test_blind_leader_is_not_ready_and_later_unhealthy(world, client):
    world.state = "leader"
    world.blind = BLIND_SHOWN_S - 1, "pods"
    assert (await get(client, "/readyz"))[0] == (await get(client, "/healthz"))[0] == 200
    world.blind = BLIND_SHOWN_S + 1, "pods in llm"
    assert await get(client, "/readyz") == (503, "leader, but no pods in llm seen for 16 s\n")
    assert await get(client, "/healthz") == (200, "ok, but no pods in llm seen for 16 s\n")
    world.blind = BLIND_LIMIT_S + 1, "pods"
    assert await get(client, "/healthz") == (503, "no pods seen for 301 s\n")


async def test_blind_process_that_does_not_lead_is_not_restarted(world, client):
    world.blind = BLIND_LIMIT_S + 1, "pods"
    assert await get(client, "/healthz") == (200, "ok, but no pods seen for 301 s\n")


async def test_series_of_what_vanished_or_is_unknown_are_absent_and_not_zero(world, client):
    labels = '{instance="0",namespace="llm",pool="chat",queue="prefill_bootstrap",rank="0",role="prefill"}'
    status, text = await get(client, "/metrics")
    assert status == 200
    assert f"pdpool_queue_reqs{labels} 3.0" in text
    assert f"pdpool_queue_moved_total{labels} 17.0" in text
    assert "# TYPE pdpool_queue_moved_total counter" in text
    assert "pdpool_queue_oldest_seconds{" not in text
    rank = '{instance="0",namespace="llm",pool="chat",rank="1",role="prefill"}'
    assert f"pdpool_held_bytes{rank} 4096.0" in text
    assert f"pdpool_held_oldest_seconds{rank} 7.5" in text
    assert 'verdict="Stuck"} 1.0' in text
    assert "pdpool_leader 1.0" in text
    world.queues, world.holds, world.verdicts = [], [], {}
    _, text = await get(client, "/metrics")
    assert "pdpool_queue_reqs{" not in text
    assert "pdpool_held_oldest_seconds{" not in text
    assert "pdpool_instance_verdict{" not in text


class Events:
    """An API that keeps events."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self.error: Exception | None = None

    async def create(self, _, body):
        if self.error:
            raise self.error
        name = body["metadata"]["name"]
        if name in self.kept:
            raise ConflictError(409, "AlreadyExists", "", "")
        self.kept[name] = body

    async def merge(self, _, namespace, name, patch):
        assert namespace == "llm"
        if name not in self.kept:
            raise NotFoundError(404, "NotFound", "", "")
        self.kept[name] |= patch


OBJECT = {"metadata": {"name": "chat", "namespace": "llm", "uid": "u1"}}


def recorder(events: Events) -> Recorder:
    return Recorder(events, "me", lambda: datetime(2026, 1, 2, tzinfo=UTC))


async def test_an_event_that_happens_again_is_counted_also_by_the_next_operator():
    events = Events()
    one = recorder(events)
    for _ in range(3):
        await one.emit(PODS, OBJECT, "Normal", "Ready", "is ready")
    ((name, event),) = events.kept.items()
    assert event["series"]["count"] == 3
    assert event["eventTime"] == "2026-01-02T00:00:00.000000Z"
    assert event["regarding"]["uid"] == "u1"
    await recorder(events).emit(PODS, OBJECT, "Normal", "Ready", "is ready")
    assert list(events.kept) == [name]
    await one.emit(PODS, OBJECT, "Normal", "Ready", "is ready again")
    assert len(events.kept) == 2


async def test_an_event_that_the_server_forgot_is_told_anew_and_long_ones_are_cut():
    events = Events()
    one = recorder(events)
    await one.emit(PODS, OBJECT, "Normal", "Ready", "ä" * 2000)
    events.kept.clear()
    await one.emit(PODS, OBJECT, "Normal", "Ready", "ä" * 2000)
    ((_, event),) = events.kept.items()
    assert "series" not in event
    assert len(event["note"].encode()) <= NOTE_LIMIT


async def test_the_log_tells_what_events_do(caplog):
    caplog.set_level("INFO")
    await recorder(Events()).emit(PODS, OBJECT, "Warning", "QueuesStuck", "decode chat-decode-1 is silent")
    (record,) = caplog.records
    assert record.getMessage() == "QueuesStuck: decode chat-decode-1 is silent"
    assert (record.namespace, record.object) == ("llm", "chat")


async def test_an_event_that_cannot_be_written_costs_nothing_else(caplog):
    events = Events()
    events.error = ForbiddenError(403, "Forbidden", "no", "")
    await recorder(events).emit(PODS, OBJECT, "Normal", "Ready", "x")
    assert "event not recorded" in caplog.text


KEY = Key("PrefillPool", "llm", "chat")


async def run_worker(metrics: Metrics, *outcomes: Result | Exception) -> tuple[WorkQueue[Key], int]:
    """Run a worker with these outcomes in order. Return the queue afterwards, and the number of calls."""
    queue: WorkQueue[Key] = WorkQueue(asyncio.get_running_loop().time)
    left = list(outcomes)
    done = asyncio.Event()

    async def reconcile(key: Key) -> Result:
        assert key == KEY
        outcome = left.pop(0)
        if not left:
            done.set()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    worker = asyncio.create_task(work(queue, reconcile, metrics))
    queue.add(KEY)
    await asyncio.wait_for(done.wait(), 10)
    await asyncio.sleep(0)
    worker.cancel()
    await asyncio.wait([worker])
    return queue, len(outcomes) - len(left)


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (UnavailableError(503, "", "busy", ""), "error"),
        (ConflictError(409, "", "other", ""), "conflict"),
        (NotFoundError(404, "", "gone", ""), "conflict"),
        (ZeroDivisionError("a fault of ours"), "error"),
        (Result(failed=True), "refused"),
    ],
)
async def test_after_any_failure_the_object_is_looked_at_again(metrics, failure, outcome):
    _, calls = await run_worker(metrics, failure, Result())
    assert calls == 2
    assert metrics.registry.get_sample_value("pdpool_reconcile_total", {"kind": "PrefillPool", "outcome": outcome}) == 1


@pytest.mark.parametrize("failure", [ConflictError(409, "", "other", ""), NotFoundError(404, "", "no status", "")])
async def test_conflicts_that_last_are_met_less_and_less_often_as_other_failures_are(metrics, failure):
    begun = asyncio.get_running_loop().time()
    queue, _ = await run_worker(metrics, *([failure] * 4))
    due = queue.next_due()
    assert due is not None
    assert due - begun > BACKOFF_FIRST_S * (1 + 2 + 4 + 8)


async def test_a_reconcile_that_wants_to_look_again_is_delayed_and_one_that_is_done_is_not(metrics):
    queue, _ = await run_worker(metrics, Result(again_s=60.0))
    assert (len(queue), queue.delayed) == (0, 1)
    queue, _ = await run_worker(metrics, Result())
    assert (len(queue), queue.delayed) == (0, 0)


async def test_what_is_refused_again_and_again_is_looked_at_when_that_was_asked_for_if_the_back_off_is_longer():
    now = 0.0
    queue: WorkQueue[Key] = WorkQueue(lambda: now)
    queue.add(KEY)

    async def reconcile(_: Key) -> Result:
        return Result(again_s=10.0, failed=True)

    pauses = []
    for _ in range(12):
        assert queue.take() == KEY
        await manager._once(queue, KEY, reconcile)
        queue.done(KEY)
        due = queue.next_due()
        assert due is not None
        pauses.append(due - now)
        now = due
    assert pauses[0] < 0.1
    assert pauses[-1] == pytest.approx(10.0)


def test_a_log_line_is_json_with_the_object_and_no_more():
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "no %s", ("luck",), None)
    record.namespace, record.object, record.secret = "llm", "chat", "hush"
    line = json.loads(logs.JsonFormatter().format(record))
    assert line["message"] == "no luck"
    assert (line["level"], line["namespace"], line["object"]) == ("warning", "llm", "chat")
    assert "secret" not in line


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "seed").write_text("s" * 32)
    return {
        "PDPOOL_NAMESPACE": "pdpool-system",
        "PDPOOL_LEASE": "pdpool-operator",
        "PDPOOL_ENGINE_IMAGE": "e",
        "PDPOOL_ROUTER_IMAGE": "r",
        "PDPOOL_ROUTER_SEED_FILE": str(tmp_path / "seed"),
        "PDPOOL_WATCH_NAMESPACES": "a, b,",
    }


def test_the_environment_is_read(env):
    config = load(env)
    assert config.watch_namespaces == ("a", "b")
    assert (config.namespace, config.port, config.log_level) == ("pdpool-system", 8080, "INFO")
    assert load(env).identity != config.identity
    assert load(env | {"PDPOOL_WATCH_NAMESPACES": ""}).watch_namespaces == ()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PDPOOL_NAMESPACE", "", "PDPOOL_NAMESPACE is not set"),
        ("PDPOOL_LEASE", "", "PDPOOL_LEASE is not set"),
        ("PDPOOL_ENGINE_IMAGE", " ", "PDPOOL_ENGINE_IMAGE is not set"),
        ("PDPOOL_LOG_LEVEL", "LOUD", "PDPOOL_LOG_LEVEL is 'LOUD'; it must be one of DEBUG"),
        ("PDPOOL_LISTEN", "8080x", "PDPOOL_LISTEN is '8080x'"),
        ("PDPOOL_ROUTER_SEED_FILE", "/nowhere", "PDPOOL_ROUTER_SEED_FILE /nowhere cannot be read"),
    ],
)
def test_a_wrong_environment_is_refused_with_its_name(env, name, value, words):
    with pytest.raises(ConfigInvalidError, match=words):
        load(env | {name: value})
