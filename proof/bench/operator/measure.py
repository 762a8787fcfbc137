"""Measures one size of fleet: pools are made, stay idle, grow, and are deleted."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dev.cluster.layout import State
from dev.shell import wait_for

from .fleet import Fleet, Size
from .operator_process import OperatorProcess, Window

SETTLED_S = 6.0
"""Without a write for so long, the operator has nothing left to do: two periods of sampling."""
READ_EVERY_S = 3.0
"""Seconds between two reads of the operator's metrics, while the fleet is made. Of 1000 instances, each read takes the
operator's loop for a part of a second, and would be measured as well.
"""
GROW_EVERY_S = 1.0


@dataclass(frozen=True)
class Plan:
    """Lengths of the parts of a measurement, in seconds."""

    idle_s: float = 60.0
    change_s: float = 30.0
    within_s: float = 600.0
    """Deadline of each wait for the fleet."""


@dataclass(frozen=True)
class Figures:
    """Figures of one size. Times are in seconds."""

    size: Size
    applied_s: float
    pods_s: float
    """From the beginning of the apply until the last pod was made."""
    ready_s: float
    """Until the operator's metrics show all instances as ready."""
    making_ms: tuple[float, float]
    """p50 and p99 of the reconciles until then."""
    idle_ms: tuple[float, float]
    change_ms: tuple[float, float]
    all_ms: tuple[float, float]
    reconciles: int
    making: Window
    idle: Window
    change: Window
    peak_mb: float


def measure(state: State, size: Size, plan: Plan, say: Callable[[str], None]) -> Figures:
    """Measure one size. The namespace is gone afterwards.

    Raises:
        TimeoutError: the fleet did not become ready, or does not end.
        CommandError: the API server refused something.
    """
    with tempfile.TemporaryDirectory(prefix="pdpool-bench-") as folder:
        fleet = Fleet(state, size, Path(folder))
        operator = OperatorProcess(fleet.namespace, Path(folder))
        try:
            fleet.set_up()
            operator.start()
            return _phases(fleet, operator, plan, say)
        finally:
            operator.stop()
            say(f"{size}: removing namespace {fleet.namespace}")
            fleet.tear_down()


def _phases(fleet: Fleet, operator: OperatorProcess, plan: Plan, say: Callable[[str], None]) -> Figures:
    size = fleet.size
    start, begun = operator.read(), time.monotonic()
    applied_s = fleet.apply()
    say(f"{size}: applied in {applied_s:.1f} s")
    _await_ready(fleet, operator, plan.within_s, say)
    ready_s, made = time.monotonic() - begun, operator.read()
    pods_s = sorted(fleet.pods.values())[size.pods - 1] - begun
    say(f"{size}: all pods made after {pods_s:.1f} s, ready after {ready_s:.1f} s; waiting for the last write")
    await_rest(operator, plan.within_s)
    before_idle = operator.read()
    say(f"{size}: idle for {plan.idle_s:.0f} s")
    time.sleep(plan.idle_s)  # the length of the window, not a wait for a condition
    after_idle = operator.read()
    changed = min(int(plan.change_s / GROW_EVERY_S), size.pools // 2)
    say(f"{size}: {changed} pools get one instance more, one each {GROW_EVERY_S:.0f} s")
    for number in range(changed):
        due = after_idle.at + number * GROW_EVERY_S
        time.sleep(max(0.0, due - time.monotonic()))
        fleet.grow(number)
    grown = partial(unready, operator, size.pods + changed)
    wait_for("the new instances are ready", grown, deadline_s=plan.within_s, interval_s=READ_EVERY_S)
    after_change, took = operator.read(), operator.reconcile_s()
    say(f"{size}: deleting the pools")
    fleet.remove_pools(plan.within_s)
    return Figures(
        size=size,
        applied_s=applied_s,
        pods_s=pods_s,
        ready_s=ready_s,
        making_ms=_p50_p99(took[: made.reconciles]),
        idle_ms=_p50_p99(took[before_idle.reconciles : after_idle.reconciles]),
        change_ms=_p50_p99(took[after_idle.reconciles :]),
        all_ms=_p50_p99(took),
        reconciles=len(took),
        making=made.between(start),
        idle=after_idle.between(before_idle),
        change=after_change.between(after_idle),
        peak_mb=after_change.peak_mb,
    )


def _await_ready(fleet: Fleet, operator: OperatorProcess, within_s: float, say: Callable[[str], None]) -> None:
    said = time.monotonic()

    def unmet() -> str | None:
        nonlocal said
        reason = unready(operator, fleet.size.pods)
        if reason is None and len(fleet.pods) < fleet.size.pods:
            reason = f"{len(fleet.pods)} of {fleet.size.pods} pods were seen"
        if reason is not None and time.monotonic() - said > 10:
            said = time.monotonic()
            say(f"{fleet.size}: {len(fleet.pods)} pods made, {reason}")
        return reason

    wait_for("all instances are ready", unmet, deadline_s=within_s, interval_s=READ_EVERY_S)


def unready(operator: OperatorProcess, wanted: int) -> str | None:
    """Say how many instances are Ready; None once enough are."""
    ready = operator.read().ready
    return None if ready >= wanted else f"{ready:.0f} of {wanted} instances ready"


def await_rest(operator: OperatorProcess, within_s: float) -> None:
    """Wait until nothing has been written for SETTLED_S.

    Raises:
        TimeoutError: writes go on.
    """
    last = operator.read()

    def busy() -> str | None:
        nonlocal last
        now = operator.read()
        writes = now.between(last).writes if now.at > last.at else {}
        if writes:
            last = now
            return f"writes go on: {writes}"
        return None if now.at - last.at >= SETTLED_S else "the last write is too recent"

    wait_for("the operator has nothing left to do", busy, deadline_s=within_s, interval_s=1.0)


def _p50_p99(seconds: list[float]) -> tuple[float, float]:
    """Return both percentiles in milliseconds; nan without values."""
    if not seconds:
        return float("nan"), float("nan")
    p50, p99 = np.percentile(seconds, (50, 99))
    return float(p50) * 1000, float(p99) * 1000
