"""Pools, services and their pods on an API server in memory."""

from collections.abc import Iterator
from functools import partial
from itertools import repeat

from pdpool_operator.runtime.resources import DECODE_POOLS, PODS, PREFILL_POOLS, SERVICES_PD, STATEFUL_SETS, Resource

from tests.fake_api import FakeApi, Object

NAMESPACE = "llm"


def running_pods(addresses: Iterator[str] | None = None) -> FakeApi:
    """Return an API server that runs a Ready pod for each StatefulSet, each with the next of the addresses."""
    return FakeApi(bookmark_s=20.0, on_put=partial(_run_pod, addresses or repeat("127.0.0.1")))


def fleet(services: int, instances: int, addresses: Iterator[str] | None = None) -> FakeApi:
    """Return such a server with services of two pools each, and the wanted instances of each pool."""
    api = running_pods(addresses)
    pool = {"model": {"path": "/models/tiny"}, "replicas": instances}
    for number in range(services):
        name = f"chat-{number}"
        for kind in (PREFILL_POOLS, DECODE_POOLS):
            api.put(kind, NAMESPACE, name, {"spec": pool})
        side = {"poolRef": {"name": name}}
        api.put(SERVICES_PD, NAMESPACE, name, {"spec": {"prefill": side, "decode": side}})
    return api


def _run_pod(addresses: Iterator[str], api: FakeApi, resource: Resource, obj: Object) -> None:
    meta = obj["metadata"]
    name = f"{meta['name']}-0"
    if resource != STATEFUL_SETS or (NAMESPACE, name) in api.objects.get(PODS, {}):
        return
    template = obj["spec"]["template"]
    owner = {"kind": "StatefulSet", "name": meta["name"], "uid": meta["uid"], "controller": True}
    body = {
        "metadata": {**template["metadata"], "ownerReferences": [owner]},
        "spec": template["spec"],
        "status": {
            "phase": "Running",
            "podIP": next(addresses),
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "engine", "ready": True, "restartCount": 0, "state": {"running": {}}}],
        },
    }
    api.put(PODS, NAMESPACE, name, body)
