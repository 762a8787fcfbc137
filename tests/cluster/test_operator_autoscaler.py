"""The HorizontalPodAutoscalers of docs/autoscale.md: the real controller scales pools by the operator's metrics."""

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pdpool_operator.runtime.resources import SERVICES_PD, Resource

from dev.cluster.layout import state_at
from dev.paths import CHECKOUT
from tests.cluster.external_metrics import external_metrics
from tests.cluster.hands import POOLS, Object, eventually
from tests.cluster.operator_harness import ON_CLUSTER, Bench

pytestmark = [*ON_CLUSTER, pytest.mark.timeout(240, func_only=True)]

AUTOSCALERS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
PAGE = (CHECKOUT / "docs" / "autoscale.md").read_text(encoding="utf-8")
DECODE = "chat-decode-0-0"
REQS = "pdpool_scaling_queue_reqs"
STUCK_AFTER_S = 5


def autoscalers(namespace: str) -> Iterator[Object]:
    """Yield the page's objects for another namespace, with one instance as the least."""
    for block in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for body in yaml.safe_load_all(block.replace("namespace: llm", f"namespace: {namespace}")):
            if body.get("kind") == AUTOSCALERS.kind:
                yield body | {"spec": body["spec"] | {"minReplicas": 1}}


async def serve(here: Bench) -> None:
    """Start an operator, a pool of one instance on each side, and the service that connects them."""
    await here.operator().start()
    refs: dict[str, Any] = {side: {"poolRef": {"name": "chat"}} for side in ("prefill", "decode")}
    spec = refs | {"router": {"enabled": False}, "stuckAfterSeconds": STUCK_AFTER_S}
    await here.admin.make(SERVICES_PD, {"metadata": {"name": "chat", "namespace": here.namespace}, "spec": spec})
    for kind in ("PrefillPool", "DecodePool"):
        await here.pool(kind)
    for kind in ("PrefillPool", "DecodePool"):
        await here.until(kind, "Ready", status="True")


async def replicas(here: Bench, kind: str) -> int:
    pool = await here.see(POOLS[kind], "chat")
    return int(pool["spec"]["replicas"])


async def scaled_to(here: Bench, **wanted: int) -> None:
    async def check() -> bool:
        found = {kind: await replicas(here, kind) for kind in wanted}
        assert found == wanted, found
        return True

    await eventually(check)


async def active(here: Bench, name: str, status: str) -> Object:
    """Return the condition ScalingActive of an autoscaler once it has this status."""

    async def check() -> Object:
        body = await here.see(AUTOSCALERS, name)
        conditions = body["status"].get("conditions", [])
        (found,) = [one for one in conditions if one["type"] == "ScalingActive"]
        assert found["status"] == status, conditions
        return dict(found)

    result: Object = await eventually(check)
    return result


@pytest.fixture
def metrics_are_reachable() -> None:
    """The API server sends requests to a loopback address, so it must run on this machine."""
    if Path(os.environ["KUBECONFIG"]).resolve() != state_at(None).kubeconfig.resolve():
        pytest.skip("not the local cluster: its API server could not reach the metrics, which are served here")


@pytest.mark.usefixtures("metrics_are_reachable")
async def test_autoscalers_follow_queues_and_hold_while_stuck(here: Bench):
    async with here.kubelet():
        await serve(here)
        decode = here.engines[DECODE]
        decode.queues = {"decode_prealloc": 12, "decode_transfer": 1}
        decode.oldest_s = 4.0  # twice the target of prefill's autoscaler: one instance more
        async with external_metrics(here, lambda: here.operators[0].get("/metrics")) as metrics:
            for body in autoscalers(here.namespace):
                await here.admin.make(AUTOSCALERS, body)
            await scaled_to(here, DecodePool=3, PrefillPool=2)
            assert (await active(here, "chat-decode", "True"))["reason"] == "ValidMetricFound"

            decode.oldest_s = 60.0
            await here.until("DecodePool", "QueuesHealthy", status="False", reason="QueuesStuck")
            labels = {"pool": "chat", "queue": "decode_prealloc"}

            async def absent() -> bool:
                return await metrics.value(REQS, labels) is None

            await eventually(absent)
            decode.queues["decode_prealloc"] = 30  # looks like load for eight instances
            seen = metrics.empty.get(REQS, 0)

            async def asked_again() -> bool:
                await asyncio.sleep(0)
                return metrics.empty.get(REQS, 0) > seen

            await eventually(asked_again)
            found = await active(here, "chat-decode", "False")
            assert found["reason"] == "FailedGetExternalMetric", found
            assert await replicas(here, "DecodePool") == 3
