"""Rotation against real routers: which engines they list, and that an engine leaves the lists before it ends."""

import pytest
from aiohttp import web
from pdpool_operator.api.names import Role
from pdpool_operator.observe.http import Unanswered
from pdpool_operator.runtime.resources import (
    CONFIG_MAPS,
    DECODE_POOLS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    EVENTS,
    PODS,
    PREFILL_POOLS,
    SECRETS,
    SERVICES,
    SERVICES_PD,
    STATEFUL_SETS,
)

from tests.cluster.hands import eventually
from tests.cluster.operator_harness import NOBODY, ON_CLUSTER, Bench
from tests.serving import stop_serving

pytestmark = [*ON_CLUSTER, pytest.mark.timeout(240, func_only=True)]


ROUTERS = {"replicas": 2, "template": {"spec": {"schedulerName": NOBODY}}}
P0, P1, D0 = "chat-prefill-0-0", "chat-prefill-1-0", "chat-decode-0-0"


async def start(here: Bench) -> None:
    await here.operator().start()
    await here.pool("PrefillPool", replicas=2)
    await here.pool("DecodePool")
    await here.service(router=ROUTERS)
    for pod in (P0, P1, D0):
        await here.run_pod(pod)


async def test_every_router_gets_the_ready_engines_and_loses_them_before_anything_else_happens(here, routers):
    await start(here)
    for name in ("router-a", "router-b"):
        await routers.start(name)
    for name in routers.ips:
        await routers.until(name, P0, P1, D0)
    roles = {worker.url: worker for worker in await routers.listed("router-a")}
    prefill = roles[f"http://{here.engines[P0].ip}:30000"]
    assert (prefill.role, prefill.bootstrap_port) == (Role.PREFILL, 8998)
    assert roles[f"http://{here.engines[D0].ip}:30000"].role is Role.DECODE

    await here.set_ready(P1, False)
    took = [await routers.until(name, P0, D0) for name in routers.ips]
    assert max(took) < 15, took
    await here.set_ready(P1, True)
    for name in routers.ips:
        await routers.until(name, P0, P1, D0)

    # Terminating, and kept by a finalizer as by a long drain.
    await here.admin.edit(PODS, here.namespace, P1, {"metadata": {"finalizers": ["pdpool.dev/test"]}})
    await here.admin.drop(PODS, here.namespace, P1)
    for name in routers.ips:
        await routers.until(name, P0, D0)
    await here.admin.edit(PODS, here.namespace, P1, {"metadata": {"finalizers": None}})


async def test_an_instance_that_is_scaled_away_leaves_rotation_before_it_is_deleted(here, routers):
    await start(here)
    await routers.start("router-a")
    await routers.until("router-a", P0, P1, D0)
    here.engines[P1].running = 1
    await here.admin.edit(PREFILL_POOLS, here.namespace, "chat", {"spec": {"replicas": 1}})
    await routers.until("router-a", P0, D0)
    assert await here.see(STATEFUL_SETS, "chat-prefill-1")
    assert await here.see(PODS, P1)
    here.engines[P1].running = 0

    async def gone() -> bool:
        return await here.see(STATEFUL_SETS, "chat-prefill-1") is None

    await eventually(gone)


async def test_what_others_change_in_a_router_is_put_right(here, routers):
    await start(here)
    await routers.start("router-a")
    await routers.until("router-a", P0, P1, D0)
    key, ip = await routers.key(), routers.ips["router-a"]
    first = (await routers.listed("router-a"))[0]
    assert await routers.client.remove(ip, key, first.id)
    # The service is reconciled every minute. An event about any of its objects triggers a reconcile at once.
    await here.admin.edit(SERVICES_PD, here.namespace, "chat", {"metadata": {"labels": {"look": "again"}}})
    await routers.until("router-a", P0, P1, D0)


async def test_an_address_that_changes_sides_changes_its_role(here, routers):
    await start(here)
    ip = await routers.start("router-a")
    await routers.until("router-a", P0, P1, D0)
    key = await routers.key()
    url = f"http://{here.engines[D0].ip}:30000"

    async def made_a_prefill() -> bool:
        """Edit again if the operator, which reconciles after its own changes, was faster."""
        try:
            for worker in await routers.listed("router-a"):
                if worker.url == url:
                    assert await routers.client.remove(ip, key, worker.id)
            return await routers.client.add(ip, key, url, Role.PREFILL, 8998)
        except Unanswered as refusal:
            raise AssertionError(str(refusal)) from refusal

    await eventually(made_a_prefill)
    await here.admin.edit(SERVICES_PD, here.namespace, "chat", {"metadata": {"labels": {"look": "again"}}})

    async def decode_again() -> bool:
        return [worker.role for worker in await routers.listed("router-a") if worker.url == url] == [Role.DECODE]

    await eventually(decode_again)


async def test_a_router_that_starts_while_the_operator_is_away_knows_the_engines_at_once(here, routers):
    await start(here)
    await routers.start("router-a")
    await routers.until("router-a", P0, P1, D0)

    async def written() -> bool:
        config = await here.see(CONFIG_MAPS, "chat-router")
        return all(here.engines[pod].ip in config["data"]["workers.json"] for pod in (P0, P1, D0))

    await eventually(written)
    await here.operators[0].stop()
    await routers.start("router-b")
    await routers.until("router-b", P0, P1, D0)


async def test_a_router_that_hangs_holds_up_neither_the_others_nor_the_engines(here, routers):
    await start(here)
    await routers.start("router-a")
    await routers.start("router-b")
    for name in routers.ips:
        await routers.until(name, P0, P1, D0)
    hung = here.processes[0]
    hung.send_signal(19)  # SIGSTOP
    try:
        await here.set_ready(P1, False)
        took = await routers.until("router-b", P0, D0)
        assert took < 20
    finally:
        hung.send_signal(18)  # SIGCONT
    await routers.until("router-a", P0, D0)


async def test_a_router_that_cannot_be_reached_leaves_its_service_until_it_is_back(here, routers):
    await start(here)
    for name in ("router-a", "router-b"):
        await routers.start(name)
        await routers.until(name, P0, P1, D0)
        await here.set_ready(routers.pods[name], True)

    async def reachable(name):
        pod = await here.see(PODS, routers.pods[name])
        return pod["metadata"]["labels"]["pdpool.dev/reachable"]

    assert [await reachable(name) for name in routers.ips] == ["true", "true"]
    selector = (await here.see(SERVICES, "chat-router"))["spec"]["selector"]
    assert selector["pdpool.dev/reachable"] == "true"

    async def is_labelled(name, label):
        assert await reachable(name) == label
        return True

    lost = here.processes.pop()
    lost.kill()
    await lost.wait()
    await eventually(lambda: is_labelled("router-b", "false"), within_s=20)
    assert await reachable("router-a") == "true"
    await routers.launch("router-b")
    await eventually(lambda: is_labelled("router-b", "true"), within_s=60)


async def test_turning_the_router_off_removes_its_objects_and_turning_it_on_makes_them_anew(here, routers):
    await start(here)
    await eventually(lambda: here.see(DEPLOYMENTS, "chat-router"))
    await routers.key()
    await here.admin.edit(SERVICES_PD, here.namespace, "chat", {"spec": {"router": {"enabled": False}}})

    async def gone() -> bool:
        return not any([await here.see(kind, "chat-router") for kind in (DEPLOYMENTS, SERVICES, CONFIG_MAPS)])

    await eventually(gone)
    await here.until("DisaggregatedService", "Ready", status="True")
    await here.admin.edit(SERVICES_PD, here.namespace, "chat", {"spec": {"router": {"enabled": True}}})
    await eventually(lambda: here.see(DEPLOYMENTS, "chat-router"))
    await routers.key()


async def test_what_somebody_edits_in_an_object_that_was_made_is_put_right(here, routers):
    await start(here)
    await eventually(lambda: here.see(DEPLOYMENTS, "chat-router"))
    engine = {"spec": {"template": {"spec": {"containers": [{"name": "router", "image": "nope:1"}]}}}}
    edits = {
        (SERVICES, "chat-router"): {"spec": {"selector": {"pdpool.dev/service": "another"}}},
        (SERVICES, "chat-decode"): {"spec": {"selector": {"one-key": "more"}}},
        (DEPLOYMENTS, "chat-router"): engine,
        (CONFIG_MAPS, "chat-router"): {"data": {"workers.json": "{}"}},
        (DISRUPTION_BUDGETS, "chat-decode"): {"spec": {"maxUnavailable": 7}},
        (STATEFUL_SETS, "chat-prefill-0"): {"spec": {"updateStrategy": {"type": "RollingUpdate"}}},
        (STATEFUL_SETS, "chat-prefill-1"): {"spec": {"template": {"spec": {"schedulerName": "another"}}}},
    }
    before = {key: await eventually(lambda key=key: here.see(*key)) for key in edits}
    pods = await eventually(lambda: engines(here))
    for (kind, name), edit in edits.items():
        await here.admin.edit(kind, here.namespace, name, edit)

    async def as_before() -> bool:
        now = {key: await here.see(*key) for key in edits}
        same = [told(now[key]) == told(before[key]) for key in edits]
        assert all(same), [key[1] for key, one in zip(edits, same, strict=True) if not one]
        return True

    await eventually(as_before)
    assert await engines(here) == pods


async def test_a_rollout_restart_of_a_stateful_set_restarts_no_pod_and_stays(here):
    operator = await here.operator().start()
    await here.pool("PrefillPool", replicas=2)
    pods = await eventually(lambda: engines(here))
    restarted = {"kubectl.kubernetes.io/restartedAt": "2026-11-22T12:00:00Z"}
    edit = {"spec": {"template": {"metadata": {"annotations": restarted}}}}
    before = (await here.admin.edit(STATEFUL_SETS, here.namespace, "chat-prefill-0", edit))["metadata"]["generation"]
    await operator.quiet_reconciles()
    after = await here.see(STATEFUL_SETS, "chat-prefill-0")
    assert after["spec"]["template"]["metadata"]["annotations"].items() >= restarted.items()
    assert after["metadata"]["generation"] == before
    assert await engines(here) == pods


async def engines(here: Bench) -> dict[str, str]:
    """Return the UID of each of the two pods of the prefill pool, once both exist."""
    pods = await here.admin.all(PODS, here.namespace, "pdpool.dev/role=prefill")
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods} if len(pods) == 2 else {}


def told(obj: dict) -> tuple:
    """Return the parts that an edit may have changed. Of the worker list, which follows the engines, only the edit
    counts.
    """
    spec = obj.get("spec", {})
    containers = spec.get("template", {}).get("spec", {}).get("containers", [{}])
    return (
        obj.get("data") == {"workers.json": "{}"},
        spec.get("selector"),
        spec.get("maxUnavailable"),
        containers[0].get("image"),
        spec.get("updateStrategy"),
        spec.get("template", {}).get("spec", {}).get("schedulerName"),
    )


async def test_service_deleted_and_created_again_owns_new_router(here):
    await start(here)
    await eventually(lambda: here.see(DEPLOYMENTS, "chat-router"))
    await here.admin.drop(SERVICES_PD, here.namespace, "chat", propagationPolicy="Background")
    again = await here.service(router=ROUTERS)

    async def owned() -> bool:
        deployment = await here.see(DEPLOYMENTS, "chat-router")
        owners = [owner["uid"] for owner in deployment["metadata"]["ownerReferences"]] if deployment else []
        return owners == [again["metadata"]["uid"]]

    await eventually(owned)


async def test_pod_with_only_the_labels_gets_no_key(here, routers):
    await start(here)
    await routers.start("router-a")
    await routers.until("router-a", P0, P1, D0)
    labels = (await here.see(PODS, routers.pods["router-a"]))["metadata"]["labels"]
    spec = {"schedulerName": NOBODY, "containers": [{"name": "router", "image": "none"}]}
    meta = {"name": "impostor", "namespace": here.namespace, "labels": labels | {"pod-template-hash": "none"}}
    await here.admin.make(PODS, {"metadata": meta, "spec": spec})
    ip = await here.run_pod("impostor", engine=False)
    asked: list[str] = []

    async def note(request: web.Request) -> web.Response:
        asked.append(f"{request.method} {request.path}")
        return web.json_response({"workers": []})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", note)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, ip, 8000).start()
        # The change of the rotation shows that the operator has asked every router since the impostor runs.
        await here.set_ready(P1, False)
        await routers.until("router-a", P0, D0)
        assert asked == []
    finally:
        await stop_serving(runner)


async def test_raised_epoch_gives_every_engine_new_keys_and_never_parts_two(here):
    first = await here.operator().start()
    seen: set[tuple[str, str]] = set()

    async def epochs() -> dict[str, str]:
        pods = await here.admin.all(PODS, here.namespace, "pdpool.dev/instance")
        found = {p["metadata"]["labels"]["pdpool.dev/role"]: p["metadata"]["annotations"] for p in pods}
        return {role: notes["pdpool.dev/key-epoch"] for role, notes in found.items()}

    async def both(epoch: str) -> bool:
        now = await epochs()
        if len(now) == 2:
            seen.add((now["prefill"], now["decode"]))
        assert now == {"prefill": epoch, "decode": epoch}, now
        return True

    async with here.kubelet():
        await here.pool("PrefillPool", drainTimeoutSeconds=5)
        await here.pool("DecodePool", drainTimeoutSeconds=5)
        await eventually(lambda: both("1"))
        await first.stop()
        await here.operator(PDPOOL_KEY_EPOCH="2").start()
        await eventually(lambda: both("2"), within_s=150, every_s=0.2)
    assert seen <= {("1", "1"), ("1", "2-1"), ("2", "2-1"), ("2", "2")}
    files = (await here.see(SECRETS, "pdpool-keys"))["data"]
    assert {"curve-1.json", "curve-2-1.json", "curve-2.json", "operator-2.pem", "router-2.key"} <= files.keys()


async def test_a_service_without_its_pools_says_which_is_missing(here):
    await here.operator().start()
    await here.pool("PrefillPool")
    await here.service()
    ready = await here.until("DisaggregatedService", "Ready", status="False", reason="PoolNotFound")
    assert "DecodePool chat" in ready["message"]
    await here.pool("DecodePool")
    await here.until("DisaggregatedService", "Ready", status="False", reason="PoolsNotReady")
    assert await here.see(DECODE_POOLS, "chat")


async def test_no_key_shows_in_logs_events_or_status(here, routers):
    await start(here)
    await routers.start("router-a")
    await routers.until("router-a", P0, P1, D0)
    key = await routers.key()
    seed = (here.folder / "seed").read_text()
    told = [str(event) for event in await here.admin.all(EVENTS, here.namespace)]
    told += [str(body) for kind in (PREFILL_POOLS, SERVICES_PD) for body in await here.admin.all(kind, here.namespace)]
    told += [here.operators[0].logged(), await here.operators[0].get("/metrics")]
    assert not any(secret in text for text in told for secret in (key, seed))
