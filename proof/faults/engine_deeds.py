"""Faults of an engine that still answers its health check. What must be undone goes to `stage.undo`."""

import urllib.request
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from dev.shell import wait_for
from proof.cluster.watch import ANSWER_S
from proof.faults.scene import CHOSEN, Deed, Scene
from tests.cluster.stack import HTTP_PORT, Object

FROZEN_WITHIN_S: Final = 60.0
QUEUE_GAUGES: Final = {"sglang:num_decode_prealloc_queue_reqs", "sglang:num_decode_transfer_queue_reqs"}


def frozen(side: str) -> Deed:
    """Return the deed that hangs an engine's scheduler loop. Its connector and its health check answer."""

    def deed(scene: Scene) -> str:
        scene.stage.break_engine(scene.pod(side), "freeze_scheduler")
        scene.watch.fault_now()
        return f"{side}/{CHOSEN}"

    return deed


def fails(side: str) -> Deed:
    """Return the deed that lets an engine answer 500 to every POST. Its health check succeeds."""

    def deed(scene: Scene) -> str:
        pod = scene.pod(side)["metadata"]["name"]
        scene.stage.undo.callback(scene.stage.fail_posts, pod, failing=False)
        scene.stage.fail_posts(pod, failing=True)
        scene.watch.fault_now()
        return f"{side}/{CHOSEN}"

    return deed


def leaks(side: str) -> Deed:
    """Return the deed that lets the next request of an engine stay in its queue with its memory."""

    def deed(scene: Scene) -> str:
        scene.stage.break_engine(scene.pod(side), "leak_request")
        scene.watch.fault_now()
        return ""

    return deed


def loads_hang(scene: Scene) -> str:
    """Let the reports of a decode engine on its queues never answer. It serves, and its connector answers."""
    pod = scene.pod("decode")["metadata"]["name"]
    scene.stage.undo.callback(scene.stage.hang_reports, pod, hanging=False)
    scene.stage.hang_reports(pod, hanging=True)
    scene.watch.fault_now()
    return ""


def gauge_frozen(scene: Scene) -> str:
    """Freeze the gauges of a decode engine at a moment when a request is in one of its queues."""
    pod = scene.pod("decode")
    scene.stage.break_engine(pod, "freeze_gauges")

    def at_zero() -> str | None:
        if any(_queue_gauges(pod)):
            return None
        for on in (False, True):
            scene.stage.set_fault(pod, "freeze_gauges", on=on)
        return "all are 0"

    wait_for("a queue gauge above zero", at_zero, deadline_s=FROZEN_WITHIN_S, interval_s=0.0)
    scene.watch.fault_now()
    return ""


def _queue_gauges(pod: Object) -> list[float]:
    """Return the lengths of an engine's hand-off queues, as its `/metrics` show them."""
    url = f"http://{pod['status']['podIP']}:{HTTP_PORT}/metrics"
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return [sample.value for one in families for sample in one.samples if sample.name in QUEUE_GAUGES]
