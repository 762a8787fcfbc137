from typing import Any, cast

import pytest
from pdpool_operator.api.base import SpecInvalid, format_time
from pdpool_operator.api.names import ANNOTATION_DRAIN_STARTED, ANNOTATION_KEY_EPOCH, Role
from pdpool_operator.api.services import DisaggregatedService
from pdpool_operator.observe.cluster import Cluster
from pdpool_operator.observe.http import Unanswered
from pdpool_operator.observe.lives import Lives
from pdpool_operator.observe.model import ObservedInstance, RouterWorker

from tests.unit.operator.plan.makers import POOL_UID, T0, make_pool, seconds

SERVICE = DisaggregatedService.parse(
    {
        "metadata": {"name": "chat", "namespace": "llm", "uid": "u"},
        "spec": {"prefill": {"poolRef": {"name": "chat"}}, "decode": {"poolRef": {"name": "chat"}}},
    }
)


ENGINE_IP = "10.0.0.9"


def owned_by(owner_uid: str, name: str, uid: str) -> dict[str, Any]:
    owner = {"uid": owner_uid, "kind": "Owner", "name": "owner", "controller": True}
    return {"metadata": {"name": name, "uid": uid, "ownerReferences": [owner]}}


class OneBadService:
    """An API server with a prefill instance, and with a service of another API version that has a router."""

    def __init__(self, *, ending: bool = False, drains: str = "") -> None:
        self.ending = {"deletionTimestamp": "2026-11-21T12:03:10Z"} if ending else {}
        self.drains = {"annotations": {ANNOTATION_DRAIN_STARTED: drains}}

    async def get(self, resource: Any, *_: object) -> dict[str, Any] | None:
        return owned_by("s", "odd-router", "d") if resource.kind == "Deployment" else None

    async def list(self, resource: Any, _namespace: str, labels: str = "", *_: str, **_options: bool):
        owned = {"ownerReferences": [{"uid": POOL_UID, "kind": "PrefillPool", "name": "chat", "controller": True}]}
        pod = {"creationTimestamp": "2026-11-21T12:00:00Z", "namespace": "llm"}
        running = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        if resource.kind == "DisaggregatedService":
            yield {"metadata": {"name": "odd", "namespace": "llm", "uid": "s"}, "spec": {"router": {"replicas": -1}}}
        elif resource.kind == "StatefulSet":
            meta = {"name": "chat-prefill-0", "uid": "sts", **pod, **owned, **self.drains}
            yield {"metadata": meta, "spec": {"replicas": 1}}
        elif resource.kind == "ReplicaSet":
            yield owned_by("d", "odd-router-1", "rs")
        elif resource.kind == "Pod" and "role=router" in labels:
            assert "pdpool.dev/service=odd" in labels
            epoch = {"annotations": {ANNOTATION_KEY_EPOCH: "2"}}
            meta = {**owned_by("rs", "odd-router-x", "r")["metadata"], **pod, **self.ending, **epoch}
            yield {"metadata": meta, "status": running | {"podIP": "10.0.0.1"}}
        elif resource.kind == "Pod" and "role=prefill" in labels:
            owner = {"ownerReferences": [{"uid": "sts", "kind": "StatefulSet", "name": "x", "controller": True}]}
            meta = {"name": "chat-prefill-0-0", "uid": "p", **pod, **owner}
            yield {"metadata": meta, "status": running | {"podIP": ENGINE_IP}}


class OneList:
    async def workers(self, ip: str, key: str) -> tuple[RouterWorker, ...]:
        assert (ip, key) == ("10.0.0.1", "key 2 of llm")
        return (RouterWorker("w", f"http://{ENGINE_IP}:30000", Role.PREFILL, 8998),)


class Silent:
    async def workers(self, *_: str) -> tuple[RouterWorker, ...]:
        raise Unanswered("refused")


class NoLooks:
    async def watch(self, *_: object) -> None:
        pass

    def newest(self, _: str) -> dict[int, Any]:
        return {}


class OneLook:
    def newest(self, uid: str) -> dict[int, Any]:
        return {0: f"sample of {uid}"}


async def seen(api: object, routers: object) -> ObservedInstance:
    looks, key = cast("Any", NoLooks()), lambda namespace, epoch: f"key {epoch} of {namespace}"
    cluster = Cluster(cast("Any", api), cast("Any", api), looks, cast("Any", routers), key, 1, Lives(), lambda: T0)
    (instance,) = (await cluster.pool(make_pool())).instances
    return instance


async def listed_by(api: object, routers: object) -> tuple[str, ...] | None:
    return (await seen(api, routers)).listed_by


@pytest.mark.parametrize("ahead_s", [-60, 0, 1])
async def test_a_drain_begins_anew_that_a_clock_ahead_of_ours_has_begun_for_it_would_not_end(ahead_s: float):
    begun = T0 + seconds(ahead_s)
    instance = await seen(OneBadService(drains=format_time(begun)), OneList())
    assert instance.drain_started == (begun if ahead_s <= 0 else None)


async def test_the_routers_of_a_service_that_cannot_be_read_count_for_whom_they_list():
    assert await listed_by(OneBadService(), OneList()) == ("odd-router-x",), "drained while requests still come"


async def test_a_router_that_ends_counts_while_it_answers_and_is_not_waited_for_when_it_does_not():
    assert await listed_by(OneBadService(ending=True), OneList()) == ("odd-router-x",)
    assert await listed_by(OneBadService(ending=True), Silent()) == ()
    assert await listed_by(OneBadService(), Silent()) is None, "a router that stays may list it"


class OneBadPool:
    """An API server with a PrefillPool of another API version."""

    async def get(self, resource: Any, namespace: str, name: str) -> dict[str, Any] | None:
        bad = {"metadata": {"name": name, "namespace": namespace, "uid": "p"}, "spec": {"replicas": -1}}
        return bad if resource.kind == "PrefillPool" else None

    async def list(self, *_: object, **_options: bool):
        for nothing in ():
            yield nothing


async def test_a_pool_that_does_not_fit_its_model_is_not_taken_for_no_pool():
    cluster = Cluster(
        cast("Any", OneBadPool()),
        cast("Any", None),
        cast("Any", None),
        cast("Any", None),
        lambda *_: "key",
        1,
        Lives(),
        lambda: T0,
    )
    with pytest.raises(SpecInvalid, match=r"PrefillPool chat: spec\.replicas"):
        await cluster.service(SERVICE)


class OnePool(OneBadService):
    """An API server with a prefill pool of one instance, and the service that binds it."""

    async def get(self, resource: Any, namespace: str, name: str) -> dict[str, Any] | None:
        body = {
            "metadata": {"name": name, "namespace": namespace, "uid": POOL_UID},
            "spec": {"model": {"path": "tiny"}},
        }
        return body if resource.kind == "PrefillPool" else None

    async def list(self, resource: Any, namespace: str, labels: str = "", *more: str, **options: bool):
        if "role=router" not in labels:
            async for found in super().list(resource, namespace, labels, *more, **options):
                yield found


async def test_pools_of_a_service_have_the_newest_samples():
    api, nothing = cast("Any", OnePool()), cast("Any", None)
    cluster = Cluster(api, api, cast("Any", OneLook()), nothing, lambda *_: "key", 1, Lives(), lambda: T0)
    prefill = (await cluster.service(SERVICE)).prefill
    assert prefill is not None
    assert [instance.ranks for instance in prefill.instances] == [{0: "sample of p"}]


class OnlyARouterPolicy(OneBadPool):
    """An API server whose only object is the NetworkPolicy of the service's router."""

    async def get(self, resource: Any, namespace: str, name: str) -> dict[str, Any] | None:
        found = (resource.kind, namespace, name) == ("NetworkPolicy", "llm", "chat-router")
        return {"kind": "NetworkPolicy", **owned_by("u", name, "np")} if found else None


async def test_service_lists_the_network_policy_of_its_router():
    api, nothing = cast("Any", OnlyARouterPolicy()), cast("Any", None)
    cluster = Cluster(api, api, nothing, nothing, lambda *_: "key", 1, Lives(), lambda: T0)
    observed = await cluster.service(SERVICE)
    assert [(one.kind, one.name, one.uid) for one in observed.objects] == [("NetworkPolicy", "chat-router", "np")]
