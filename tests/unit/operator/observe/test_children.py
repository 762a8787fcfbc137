"""What belongs to a pool that lost labels, what is sampled, and which routers a drain waits for."""

from typing import Any, cast

import pytest
from pdpool_operator.api import names
from pdpool_operator.api.base import format_time
from pdpool_operator.api.names import Role
from pdpool_operator.observe.cluster import Cluster
from pdpool_operator.observe.http import Unanswered
from pdpool_operator.observe.lives import Lives
from pdpool_operator.observe.model import ObservedPool, RouterWorker
from pdpool_operator.plan.pool import plan_pool

from tests.unit.operator.plan.makers import POOL_UID, SETTINGS, T0, make_pool, make_service, seconds

NOW = T0 + seconds(60)
LABELS = names.instance_labels("chat", Role.PREFILL, 0)


def owned(kind: str, name: str, uid: str) -> dict[str, Any]:
    return {"ownerReferences": [{"kind": kind, "name": name, "uid": uid, "controller": True}]}


def stateful_set(index: int = 0, labels: dict[str, str] | None = None, **meta: Any) -> dict[str, Any]:
    name = f"chat-prefill-{index}"
    born = {"creationTimestamp": format_time(T0), "namespace": "llm", "uid": f"sts-{index}", "name": name}
    labels = names.instance_labels("chat", Role.PREFILL, index) if labels is None else labels
    return {"metadata": {**born, "labels": labels, **owned("PrefillPool", "chat", POOL_UID), **meta}, "spec": {}}


def pod(name: str = "chat-prefill-0-0", labels: dict[str, str] | None = None, owner: str = "sts-0") -> dict[str, Any]:
    meta = {"name": name, "uid": f"uid-of-{name}", "namespace": "llm", "creationTimestamp": format_time(T0)}
    owners = owned("StatefulSet", "x", owner) if owner else {}
    status = {"phase": "Running", "podIP": "10.0.0.9", "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {**meta, "labels": LABELS if labels is None else labels, **owners}, "status": status}


class Server:
    """An API server with these objects, which selects by labels and by name as a real one does."""

    def __init__(self, *objects: tuple[str, dict[str, Any]]) -> None:
        self.objects = objects

    async def get(self, resource: Any, _namespace: str, name: str) -> dict[str, Any] | None:
        found = (body for kind, body in self.objects if kind == resource.kind and body["metadata"]["name"] == name)
        return next(found, None)

    async def list(self, resource: Any, _namespace: str, labels: str = "", fields: str = "", **_: bool):
        wanted = dict(part.split("=") for part in labels.split(",") if part)
        name = fields.removeprefix("metadata.name=") if fields.startswith("metadata.name=") else ""
        for kind, body in self.objects:
            has = body["metadata"].get("labels") or {}
            if kind == resource.kind and wanted.items() <= has.items() and name in ("", body["metadata"]["name"]):
                yield body


class Sampling:
    def __init__(self) -> None:
        self.watched: dict[str, list[str]] = {}

    async def watch(self, _namespace: str, pool: str, _role: Role, targets: Any) -> None:
        self.watched[pool] = [target.pod_uid for target in targets]

    def newest(self, _: str) -> dict[int, Any]:
        return {}


class Routers:
    def __init__(self, *silent: str) -> None:
        self.silent = silent

    async def workers(self, ip: str, _key: str) -> tuple[RouterWorker, ...]:
        if ip in self.silent:
            raise Unanswered("timeout")
        return ()


def cluster(
    server: Server, sampling: Sampling | None = None, routers: Routers | None = None, now: Any = None
) -> Cluster:
    api, asked = cast("Any", server), cast("Any", routers or Routers())
    looks = cast("Any", sampling or Sampling())
    return Cluster(api, api, looks, asked, lambda *_: "key", 1, Lives(), now or (lambda: NOW))


async def observed(*objects: tuple[str, dict[str, Any]], replicas: int = 1, **options: Any) -> ObservedPool:
    return await cluster(Server(*objects), **options).pool(make_pool(replicas=replicas))


def without(key: str) -> dict[str, str]:
    return {name: value for name, value in LABELS.items() if name != key}


@pytest.mark.parametrize(
    "labels",
    [*(without(key) for key in LABELS), {}, LABELS | {names.LABEL_POOL: "other"}],
    ids=[*LABELS, "all", "another pool's"],
)
async def test_stateful_set_without_labels_is_labelled_again(labels: dict[str, str]) -> None:
    pool = await observed(("StatefulSet", stateful_set(labels=labels)), ("Pod", pod()))
    (instance,) = pool.instances
    assert instance.pod is not None
    (patch,) = plan_pool(pool, SETTINGS, NOW).patch
    assert labels | patch.body["metadata"]["labels"] == LABELS
    assert patch.body["metadata"]["uid"] == "sts-0"


async def test_surplus_stateful_set_without_labels_is_removed() -> None:
    sets = (("StatefulSet", stateful_set(index, labels={})) for index in (0, 5))
    plan = plan_pool(await observed(*sets), SETTINGS, NOW)
    assert [deletion.name for deletion in plan.delete] == ["chat-prefill-5"]


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({"ownerReferences": []}, True),
        ({"ownerReferences": [], "labels": {}}, True),
        ({"ownerReferences": [], "labels": {}, "name": "chat-prefill-7"}, False),
        ({"labels": {}, "name": "chat-prefill-00"}, False),
        ({"labels": {}, "name": "another-prefill-0"}, False),
    ],
    ids=["no owner", "needed name", "name that is not needed", "no number of ours", "another pool's name"],
)
async def test_foreign_stateful_set_counts_only_under_needed_name(change: dict[str, Any], taken: bool) -> None:
    pool = await observed(("StatefulSet", stateful_set(**change)))
    plan = plan_pool(pool, SETTINGS, NOW)
    assert bool(plan.faults or plan.adopt) == taken
    assert len(pool.instances) == int(taken)


@pytest.mark.parametrize("key", [names.LABEL_ROLE, names.LABEL_POOL, names.LABEL_INSTANCE])
async def test_pod_released_for_its_labels_is_named(key: str) -> None:
    pool = await observed(("StatefulSet", stateful_set()), ("Pod", pod(labels=without(key), owner="")))
    (instance,) = pool.instances
    assert instance.pod is None
    assert instance.create_error == (
        f"pod chat-prefill-0-0 occupies the name, but its label {key} is missing (must be '{LABELS[key]}'); "
        "restore the label or delete the pod"
    )


async def test_foreign_pod_under_the_name_is_named() -> None:
    pool = await observed(("StatefulSet", stateful_set()), ("Pod", pod(owner="another")))
    assert "occupies the name and belongs to StatefulSet/x" in pool.instances[0].create_error


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget"])
async def test_other_child_without_its_labels_is_applied_again(kind: str) -> None:
    first = plan_pool(await observed(), SETTINGS, NOW)
    (built,) = (obj for obj in first.apply if obj["kind"] == kind)
    for labels, again in ((built["metadata"]["labels"], False), ({}, True)):
        body = {**built, "metadata": {**built["metadata"], "labels": labels, "uid": "u"}}
        plan = plan_pool(await observed((kind, body)), SETTINGS, NOW)
        assert (kind in [obj["kind"] for obj in plan.apply]) == again


async def test_only_a_pools_reconcile_changes_sampling() -> None:
    sampling = Sampling()
    metadata = {"name": "chat", "namespace": "llm", "uid": POOL_UID}
    spec = make_pool().spec.to_dict()
    bodies = ("PrefillPool", {"metadata": metadata, "spec": spec}), ("StatefulSet", stateful_set()), ("Pod", pod())
    one = cluster(Server(*bodies), sampling)
    await one.pool(make_pool())
    assert sampling.watched == {"chat": ["uid-of-chat-prefill-0-0"]}
    await one.forget_pool("llm", "chat", Role.PREFILL)
    await one.service(make_service())
    assert sampling.watched == {"chat": []}


SERVICE = make_service().to_dict()


def service(**router: Any) -> tuple[str, dict[str, Any]]:
    return "DisaggregatedService", {**SERVICE, "spec": {**SERVICE["spec"], "router": router}}


@pytest.mark.parametrize(
    ("services", "routed"),
    [
        ((), False),
        ((service(enabled=False),), False),
        ((service(enabled=True),), True),
        ((service(replicas=-1),), True),
    ],
    ids=["none", "no router", "a router", "unreadable"],
)
async def test_pool_is_routed_by_services_with_routers(services: tuple[Any, ...], routed: bool) -> None:
    assert (await observed(*services, ("StatefulSet", stateful_set()))).routed is routed


def router(ip: str, *, ready: bool) -> tuple[str, dict[str, Any]]:
    body = pod(f"chat-router-{ip}", names.router_labels("chat"), owner="rs")
    condition = {"type": "Ready", "status": str(ready)}
    return "Pod", {**body, "status": {**body["status"], "podIP": ip, "conditions": [condition]}}


def router_owners() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Deployment and ReplicaSet of the service's router pods."""
    labels, meta = names.router_labels("chat"), {"namespace": "llm", "creationTimestamp": format_time(T0)}
    by_service = owned("DisaggregatedService", "chat", SERVICE["metadata"]["uid"])
    deployment = {"name": "chat-router", "uid": "deployment", "labels": labels, **meta, **by_service}
    by_deployment = owned("Deployment", "chat-router", "deployment")
    replica_set = {"name": "chat-router-1", "uid": "rs", "labels": labels, **meta, **by_deployment}
    return ("Deployment", {"metadata": deployment}), ("ReplicaSet", {"metadata": replica_set})


@pytest.mark.parametrize(
    ("silent_is_ready", "listed_by"), [(True, None), (False, ())], ids=["may serve", "on a lost node"]
)
async def test_silent_router_counts_only_while_it_is_ready(silent_is_ready: bool, listed_by: Any) -> None:
    routers = router("10.9.0.1", ready=True), router("10.9.0.2", ready=silent_is_ready)
    pool = await observed(
        service(),
        *router_owners(),
        *routers,
        ("StatefulSet", stateful_set()),
        ("Pod", pod()),
        routers=Routers("10.9.0.2"),
    )
    assert pool.instances[0].listed_by == listed_by


async def test_avoided_node_is_read_from_the_stateful_set() -> None:
    for annotations, node in (({}, ""), ({names.ANNOTATION_AVOID_NODE: "node-b"}, "node-b")):
        server = Server(("StatefulSet", stateful_set(annotations=annotations)), ("Pod", pod()))
        (instance,) = (await cluster(server).pool(make_pool())).instances
        assert instance.avoids_node == node


async def test_drain_settles_by_the_clock_of_this_process() -> None:
    began = format_time(T0 - seconds(30))
    sts = stateful_set(annotations={names.ANNOTATION_DRAIN_STARTED: began, names.ANNOTATION_DRAIN_REASON: "Update"})
    moments = iter([T0, T0 + seconds(9)])
    clock = {"now": T0}
    one = cluster(Server(("StatefulSet", sts), ("Pod", pod())), now=lambda: clock["now"])
    for moment in moments:
        clock["now"] = moment
        (instance,) = (await one.pool(make_pool())).instances
        assert instance.drain_started == T0 - seconds(30)
        assert instance.drain_seen == T0, "seen first by this process, and not again at each look"
    sts["metadata"]["annotations"][names.ANNOTATION_DRAIN_STARTED] = format_time(T0)
    (instance,) = (await one.pool(make_pool())).instances
    assert instance.drain_seen == T0 + seconds(9), "another drain"
