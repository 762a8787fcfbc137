"""Outputs in docs/kubectl.md are those of `status`, `explain`, `queues` and `replay` for one frozen decode engine."""

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pdpool_kubectl.access import Access
from pdpool_kubectl.explain import explain_lines
from pdpool_kubectl.fleet import Fleet, PoolView, ServiceView
from pdpool_kubectl.queues import Queue, Reading, queue_lines
from pdpool_kubectl.recording import load
from pdpool_kubectl.replay import replay, replay_lines
from pdpool_kubectl.status import status_lines
from pdpool_operator.diagnose.model import Diagnosis
from pdpool_operator.diagnose.pools import diagnose
from pdpool_operator.observe.model import ObservedPool, ObservedService
from pdpool_operator.plan.pool import plan_pool
from pdpool_operator.plan.service import plan_service
from pdpool_operator.status.pool import PoolFacts, pool_status
from pdpool_operator.status.service import ServiceFacts, service_status

from dev.paths import CHECKOUT
from tests.unit.operator.diagnose.test_verdicts import BOOTSTRAP, INFLIGHT, PREALLOC, TRANSFER, decode, prefill
from tests.unit.operator.plan.makers import SETTINGS, T0, seconds
from tests.unit.operator.plan.test_service import observe

from .conftest import lasting

FOUND_S, SHOWN_S = 30, 92
"""When the operator finds the engine, and when the commands are run, in seconds after T0."""

Sides = tuple[tuple[Diagnosis, ...], tuple[Diagnosis, ...]]


def with_status(one: Any, status: object) -> Any:
    return one.model_copy(update={"status": status})


def diagnoses(moment: float, *, frozen: bool) -> Sides:
    """Return the diagnoses of both sides. The loop of chat-decode-1 stopped at T0, and 14 requests wait since then."""
    waiting = (14, moment, 7) if frozen else (0, None, 7)
    own = [prefill(at=moment, queues={BOOTSTRAP: waiting, INFLIGHT: (0, None, 7)})]
    beat_age_s = moment if frozen else 0.1
    others = [decode(0, at=moment, running=1), decode(1, at=moment, beat_age_s=beat_age_s)]
    now = T0 + seconds(moment)
    return diagnose(own, others, stuck_after_s=30, now=now), diagnose(others, own, stuck_after_s=30, now=now)


def pool_view(observed: ObservedPool, found: tuple[Diagnosis, ...], now: datetime) -> PoolView:
    status = pool_status(PoolFacts(observed, plan_pool(observed, SETTINGS, now), found, now))
    pool = with_status(observed.pool, status)
    return PoolView(pool.kind, pool.role, "llm", "chat", 1, pool.spec.replicas, status)


def look(observed: ObservedService, moment: datetime, sides: Sides) -> Fleet:
    """Return what the API server has after the operator has reconciled."""
    pools = tuple(
        pool_view(pool, side, moment)
        for pool, side in zip((observed.prefill, observed.decode), sides, strict=True)
        if pool is not None
    )
    facts = ServiceFacts(observed, plan_service(observed, SETTINGS), (*sides[0], *sides[1]))
    return Fleet((ServiceView("llm", "chat", 1, pools, service_status(facts, moment)),), ())


def with_statuses(observed: ObservedService, fleet: Fleet) -> ObservedService:
    """Return the service and its pools with the statuses that were written."""
    (service,) = fleet.services
    pools = [
        replace(pool, pool=with_status(pool.pool, view.status))
        for pool, view in zip((observed.prefill, observed.decode), service.pools, strict=True)
        if pool is not None
    ]
    return replace(observed, service=with_status(observed.service, service.status), prefill=pools[0], decode=pools[1])


def frozen_fleet() -> Fleet:
    """Return what the API server has once the operator has found the frozen engine. All was well for three days."""
    well = look(observe(), T0 - timedelta(days=3), diagnoses(0, frozen=False))
    return look(with_statuses(observe(), well), T0 + seconds(FOUND_S), diagnoses(FOUND_S, frozen=True))


def reading() -> Reading:
    """Return the queues of the operator's metrics."""
    queues = {
        ("llm", "chat", role, instance, "0", queue): Queue(0, None, 7)
        for role, instance, names in (
            ("prefill", "0", (BOOTSTRAP, INFLIGHT)),
            ("decode", "0", (PREALLOC, TRANSFER)),
            ("decode", "1", (PREALLOC, TRANSFER)),
        )
        for queue in names
    }
    return Reading(queues | {("llm", "chat", "prefill", "0", "0", BOOTSTRAP): Queue(14, float(SHOWN_S), 7)})


def documented(command: str) -> list[str]:
    """Return the lines that docs/kubectl.md shows below a command."""
    page = (CHECKOUT / "docs/kubectl.md").read_text("utf-8")
    _, _, after = page.partition(f"\n$ kubectl pdpool {command}\n")
    shown, _, _ = after.partition("\n```")
    return shown.splitlines()


@pytest.mark.parametrize("command", ["status chat -n llm", "explain -n llm chat", "queues -n llm"])
def test_documented_output_is_what_the_command_prints(command: str) -> None:
    fleet, now = frozen_fleet(), T0 + seconds(SHOWN_S)
    lines = {
        "status": lambda: status_lines(fleet, Access(), now),
        "explain": lambda: explain_lines(fleet, Access(), now),
        "queues": lambda: queue_lines(fleet, reading()),
    }[command.split()[0]]()
    assert "\n".join(documented(command)) == "\n".join(lines).rstrip()


def test_documented_replay_is_that_of_a_loop_that_stops(recorded: Path) -> None:
    lasting(recorded, 0.1, 20.0, 40.0)
    assert list(replay_lines(replay(load(recorded)))) == documented("replay calm.json")
