"""A decode engine's scheduler freezes, requests wait, and the alert fires. It resumes, and the alert resolves."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dev.demo import questions
from dev.demo.engine import DemoEngine
from dev.demo.install import POOLS, SERVICE
from dev.demo.screen import DemoError, Screen
from dev.demo.target import Target
from dev.prometheus import deploy

REQUESTS = 12
# Longer than the engines' request deadline (300 s), so each request has ended by then in any case.
REQUESTS_S = 320.0
FIRE_S = 150.0
RESOLVE_S = 120.0
LOOK_S = 1.0


@dataclass(frozen=True)
class Seen:
    """State of the cluster at one time."""

    waiting: int | None
    """Requests in all prefill bootstrap queues, from Prometheus. None without a sample."""
    alert: str
    """inactive, pending or firing."""
    queues: str
    """Printer column of the service."""
    healthy: str
    """Status of its condition QueuesHealthy."""
    message: str


@dataclass
class Outcome:
    """Figures of this part in seconds, and the results of the waiting requests."""

    fire_s: float = 0.0
    resolve_s: float = 0.0
    completed: int = 0
    failed: list[str] = field(default_factory=list)


def play(screen: Screen, target: Target, engine: DemoEngine, router: str, model: str) -> Outcome:
    """Freeze one decode engine, show what pdpool reports about it, and unfreeze it. Return the figures.

    Raises:
        TimeoutError: an expected change did not show.
        DemoError: a request hangs, or the status did not name the frozen engine.
    """
    pod = _decode_pod(target)
    outcome = Outcome()
    with ThreadPoolExecutor(1) as pool:
        try:
            began = _freeze(screen, target, engine, pod, frozen=True)
            screen.say(f"{REQUESTS} more requests; those that meet the frozen engine wait")
            waiting = pool.submit(questions.ask_all, router, model, _asked(), REQUESTS_S)
            _await_firing(screen, target, engine, pod, began)
            outcome.fire_s = time.monotonic() - began
            _show(screen, target, engine)
        finally:
            # Runs also after a failure: no engine stays frozen, and the requests end.
            thawed = _freeze(screen, target, engine, pod, frozen=False)
        _await_resolved(screen, target, engine, thawed)
        outcome.resolve_s = time.monotonic() - thawed
        _settle(screen, outcome, waiting)
    return outcome


def look(target: Target, alert_name: str) -> Seen:
    """Read the state of the queues and of one alert from Prometheus and the API server."""
    sample = deploy.ask(target.kubectl, "query", query='sum(pdpool_queue_reqs{queue="prefill_bootstrap"})')["result"]
    alerts = deploy.ask(target.kubectl, "alerts")["alerts"]
    states = [alert["state"] for alert in alerts if alert["labels"]["alertname"] == alert_name]
    status = target.get("pdsvc", SERVICE, "-n", POOLS).get("status", {})
    condition: dict[str, str] = next((c for c in status.get("conditions", []) if c["type"] == "QueuesHealthy"), {})
    return Seen(
        waiting=int(float(sample[0]["value"][1])) if sample else None,
        alert="firing" if "firing" in states else states[0] if states else "inactive",
        queues=status.get("queues", ""),
        healthy=condition.get("status", "Unknown"),
        message=condition.get("message", ""),
    )


def _asked() -> list[str]:
    return [f"Name {count} things that are made of wood." for count in range(2, REQUESTS + 2)]


def _decode_pod(target: Target) -> str:
    pods = target.get("pods", "-n", POOLS, "-l", f"pdpool.dev/pool={SERVICE},pdpool.dev/role=decode")["items"]
    if not pods:
        raise DemoError(f"no decode pods of pool {SERVICE} in namespace {POOLS}")
    return min(str(pod["metadata"]["name"]) for pod in pods)


def _freeze(screen: Screen, target: Target, engine: DemoEngine, pod: str, *, frozen: bool) -> float:
    """Set the fault. Return the time at which it took effect."""
    state = engine.freeze(screen, target, POOLS, pod, frozen=frozen)
    screen.say(f"{pod}: its scheduler {state}")
    return time.monotonic()


def _await_firing(screen: Screen, target: Target, engine: DemoEngine, pod: str, began: float) -> None:
    instance = _instance(target, pod)

    def reason(seen: Seen) -> str | None:
        if seen.alert != "firing":
            return f"{engine.alert} is {seen.alert}, {seen.waiting} requests wait"
        if seen.healthy != engine.unhealthy or not names_instance(seen.message, instance):
            return f"QueuesHealthy is {seen.healthy} ({seen.message!r}) and does not name decode instance {instance}"
        return None

    _follow(screen, target, engine, began, f"{engine.alert} to fire, and the status to name {pod}", reason, FIRE_S)


def _await_resolved(screen: Screen, target: Target, engine: DemoEngine, thawed: float) -> None:
    def reason(seen: Seen) -> str | None:
        if seen.alert != "inactive" or seen.waiting != 0:
            return f"{engine.alert} is {seen.alert}, {seen.waiting} requests wait"
        return None

    _follow(screen, target, engine, thawed, "the queue to drain and the alert to resolve", reason, RESOLVE_S)


def _follow(
    screen: Screen,
    target: Target,
    engine: DemoEngine,
    since: float,
    what: str,
    reason: Callable[[Seen], str | None],
    deadline_s: float,
) -> None:
    """Wait, and print each change of the observed state."""
    last: list[Seen] = []

    def unmet() -> str | None:
        seen = look(target, engine.alert)
        if not last or seen != last[-1]:
            last.append(seen)
            waiting = "unknown" if seen.waiting is None else seen.waiting
            screen.event(since, f"bootstrap queue {waiting}, alert {seen.alert}, service: {seen.queues or '-'}")
        return reason(seen)

    screen.wait(what, unmet, deadline_s, LOOK_S)


def _show(screen: Screen, target: Target, engine: DemoEngine) -> None:
    screen.command(f"kubectl get pd -n {POOLS}")
    screen.block(target.kubectl("get", "pd", "-n", POOLS))
    screen.command(f"kubectl get pdsvc {SERVICE} -n {POOLS} -o jsonpath='{{…QueuesHealthy…message}}'")
    screen.block(look(target, engine.alert).message)
    alert: dict[str, Any] = next(
        alert
        for alert in deploy.ask(target.kubectl, "alerts")["alerts"]
        if alert["labels"]["alertname"] == engine.alert
    )
    screen.say(f"Prometheus, /api/v1/alerts: {alert['state']}, active since {alert['activeAt']}")
    screen.block(alert["annotations"]["description"])


def _settle(screen: Screen, outcome: Outcome, waiting: Future[list[questions.Answer]]) -> None:
    answers = waiting.result(timeout=REQUESTS_S + 10)
    hung = [answer.error for answer in answers if answer.error.startswith(questions.HUNG)]
    if hung:
        raise DemoError(f"{len(hung)} of {len(answers)} requests hang: {hung[0]}")
    outcome.completed = sum(not answer.error for answer in answers)
    outcome.failed = [answer.error for answer in answers if answer.error]
    screen.say(f"requests that met the freeze: {outcome.completed} completed, {len(outcome.failed)} failed, none hangs")
    for error in sorted(set(outcome.failed)):
        screen.block(error)


def _instance(target: Target, pod: str) -> str:
    labels = target.get("pod", pod, "-n", POOLS)["metadata"]["labels"]
    return str(labels["pdpool.dev/instance"])


def names_instance(message: str, instance: str) -> bool:
    """Return whether a message names that decode instance as `decode-1` or `decode … instance 1`."""
    return "decode" in message and (f"decode-{instance}" in message or f"instance {instance}" in message)
