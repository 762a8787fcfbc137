from typing import Any, cast

import pytest
from pdpool_operator.api.base import SpecInvalid
from pdpool_operator.api.models import DisaggregatedService
from pdpool_operator.api.names import Role
from pdpool_operator.observe.cluster import Cluster
from pdpool_operator.observe.lives import Lives
from pdpool_operator.observe.model import RouterWorker

from tests.unit.operator.plan.makers import POOL_UID, T0, make_pool

SERVICE = DisaggregatedService.parse(
    {
        "metadata": {"name": "chat", "namespace": "llm", "uid": "u"},
        "spec": {"prefill": {"poolRef": {"name": "chat"}}, "decode": {"poolRef": {"name": "chat"}}},
    }
)


ENGINE_IP = "10.0.0.9"


class OneBadService:
    """An API server with a prefill instance, and a service from some other version of the API, whose router runs."""

    async def get(self, *_: object) -> None:
        return None

    async def list(self, resource: Any, _namespace: str, labels: str = "", *_: str, **_options: bool):
        owned = {"ownerReferences": [{"uid": POOL_UID, "kind": "PrefillPool", "name": "chat", "controller": True}]}
        pod = {"creationTimestamp": "2026-11-21T12:00:00Z", "namespace": "llm"}
        running = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        if resource.kind == "DisaggregatedService":
            yield {"metadata": {"name": "odd", "namespace": "llm", "uid": "s"}, "spec": {"router": {"replicas": -1}}}
        elif resource.kind == "StatefulSet":
            yield {"metadata": {"name": "chat-prefill-0", "uid": "sts", **pod, **owned}, "spec": {"replicas": 1}}
        elif resource.kind == "Pod" and "role=router" in labels:
            assert "pdpool.dev/service=odd" in labels
            yield {"metadata": {"name": "odd-router-x", "uid": "r", **pod}, "status": running | {"podIP": "10.0.0.1"}}
        elif resource.kind == "Pod" and "role=prefill" in labels:
            owner = {"ownerReferences": [{"uid": "sts", "kind": "StatefulSet", "name": "x", "controller": True}]}
            meta = {"name": "chat-prefill-0-0", "uid": "p", **pod, **owner}
            yield {"metadata": meta, "status": running | {"podIP": ENGINE_IP}}


class OneList:
    async def workers(self, ip: str, key: str) -> tuple[RouterWorker, ...]:
        assert (ip, key) == ("10.0.0.1", "key of odd")
        return (RouterWorker("w", f"http://{ENGINE_IP}:30000", Role.PREFILL, 8998),)


class NoLooks:
    async def watch(self, *_: object) -> None:
        pass

    def newest(self, _: str) -> dict[int, Any]:
        return {}


async def test_the_routers_of_a_service_that_cannot_be_read_count_for_whom_they_list():
    cluster = Cluster(
        cast("Any", OneBadService()),
        cast("Any", NoLooks()),
        cast("Any", OneList()),
        lambda meta: f"key of {meta.name}",
        Lives(),
        lambda: T0,
    )
    (instance,) = (await cluster.pool(make_pool())).instances
    assert instance.listed_by == ("odd-router-x",), "drained while requests still come"


class OneBadPool:
    """An API server of which only a PrefillPool from some other version of the API is asked."""

    async def get(self, resource: Any, namespace: str, name: str) -> dict[str, Any] | None:
        bad = {"metadata": {"name": name, "namespace": namespace, "uid": "p"}, "spec": {"replicas": -1}}
        return bad if resource.kind == "PrefillPool" else None

    async def list(self, *_: object, **_options: bool):
        for nothing in ():
            yield nothing


async def test_a_pool_that_does_not_fit_its_model_is_not_taken_for_no_pool():
    cluster = Cluster(
        cast("Any", OneBadPool()), cast("Any", None), cast("Any", None), lambda _: "key", Lives(), lambda: T0
    )
    with pytest.raises(SpecInvalid, match=r"PrefillPool chat: spec\.replicas"):
        await cluster.service(SERVICE)
