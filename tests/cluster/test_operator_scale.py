"""The operator against a real API server: which instances go, what belongs to a pool, and what an update restarts."""

import pytest
from pdpool_operator.runtime.resources import DECODE_POOLS, PODS, SERVICES, STATEFUL_SETS

from tests.cluster.hands import eventually
from tests.cluster.operator_harness import NOBODY, ON_CLUSTER, Bench

pytestmark = [*ON_CLUSTER, pytest.mark.timeout(180, func_only=True)]


async def scale(here: Bench, replicas: int) -> None:
    await here.admin.edit(DECODE_POOLS, here.namespace, "chat", {"spec": {"replicas": replicas}}, "scale")


async def until_sets(here: Bench, *indexes: int) -> None:
    async def check() -> bool:
        sets = await here.admin.all(STATEFUL_SETS, here.namespace)
        found = sorted(sts["metadata"]["name"] for sts in sets)
        assert found == [f"chat-decode-{index}" for index in sorted(indexes)], found
        return True

    await eventually(check)


async def uid(here: Bench, pod: str) -> str:
    found = await here.see(PODS, pod)
    assert found is not None, pod
    return str(found["metadata"]["uid"])


async def test_scale_in_keeps_serving_instances_and_leaves_gaps(here: Bench):
    await here.operator().start()
    await here.pool("DecodePool", replicas=4)
    for index in (1, 2, 3):  # the pod of instance 0 stays without a node
        await here.run_pod(f"chat-decode-{index}-0")
    await here.set_ready("chat-decode-1-0", False)
    await here.until("DecodePool", "Ready", status="False")
    serving = [await uid(here, f"chat-decode-{index}-0") for index in (2, 3)]
    await scale(here, 3)
    await until_sets(here, 1, 2, 3)
    await scale(here, 2)
    await until_sets(here, 2, 3)
    await here.until("DecodePool", "Ready", status="True")
    assert [await uid(here, f"chat-decode-{index}-0") for index in (2, 3)] == serving
    await scale(here, 3)
    await until_sets(here, 0, 2, 3)
    await here.run_pod("chat-decode-0-0")
    await here.until("DecodePool", "Ready", status="True")


async def test_labels_that_children_lost_are_restored(here: Bench):
    await here.operator().start()
    await here.pool("DecodePool", replicas=2)
    for index in (0, 1):
        await here.run_pod(f"chat-decode-{index}-0")
    await here.until("DecodePool", "Ready", status="True")
    children = (STATEFUL_SETS, "chat-decode-0"), (STATEFUL_SETS, "chat-decode-1"), (SERVICES, "chat-decode")
    labels = {name: (await here.see(resource, name))["metadata"]["labels"] for resource, name in children}
    pods = [await uid(here, f"chat-decode-{index}-0") for index in (0, 1)]
    for which in (["pdpool.dev/pool"], ["app.kubernetes.io/managed-by"], list(labels["chat-decode-0"])):
        for resource, name in children:
            stripped = {"metadata": {"labels": dict.fromkeys(key for key in which if key in labels[name])}}
            await here.admin.edit(resource, here.namespace, name, stripped)
        for resource, name in children:

            async def restored(resource=resource, name=name) -> bool:
                return (await here.see(resource, name))["metadata"]["labels"] == labels[name]

            await eventually(restored)
    assert [await uid(here, f"chat-decode-{index}-0") for index in (0, 1)] == pods


async def test_scale_in_removes_an_instance_without_labels(here: Bench):
    operator = await here.operator().start()
    await here.pool("DecodePool", replicas=2)
    for index in (0, 1):
        await here.run_pod(f"chat-decode-{index}-0")
    await here.until("DecodePool", "Ready", status="True")
    await operator.stop()
    labels = (await here.see(STATEFUL_SETS, "chat-decode-1"))["metadata"]["labels"]
    await here.admin.edit(
        STATEFUL_SETS, here.namespace, "chat-decode-1", {"metadata": {"labels": dict.fromkeys(labels)}}
    )
    await scale(here, 1)
    await here.operator().start()
    await until_sets(here, 0)


async def test_pod_that_lost_its_role_is_named(here: Bench):
    await here.operator().start()
    await here.pool("DecodePool")
    await here.run_pod("chat-decode-0-0")
    await here.until("DecodePool", "Ready", status="True")
    role = "pdpool.dev/role"
    await here.admin.edit(PODS, here.namespace, "chat-decode-0-0", {"metadata": {"labels": {role: None}}})
    ready = await here.until("DecodePool", "Ready", status="False", reason="PodRejected")
    assert "chat-decode-0-0" in ready["message"]
    assert role in ready["message"]
    await here.admin.edit(PODS, here.namespace, "chat-decode-0-0", {"metadata": {"labels": {role: "decode"}}})
    await here.until("DecodePool", "Ready", status="True")


async def test_template_that_means_the_same_restarts_nothing(here: Bench):
    def template(cpu: str, *env: str, **fields: object) -> dict:
        entries = [{"name": name, "value": "x"} for name in env]
        container = {"name": "engine", "resources": {"requests": {"cpu": cpu}}, "env": entries, **fields}
        return {"spec": {"schedulerName": NOBODY, "containers": [container]}}

    await here.operator().start()
    await here.pool("DecodePool", template=template("20m", "A", "B"))
    await here.run_pod("chat-decode-0-0")
    await here.until("DecodePool", "Ready", status="True")
    pod, sts = await uid(here, "chat-decode-0-0"), await here.see(STATEFUL_SETS, "chat-decode-0")
    for same in (template("0.02", "A", "B"), template("20m", "B", "A"), template("0.020", "B", "A", stdin=False)):
        body = await here.admin.edit(DECODE_POOLS, here.namespace, "chat", {"spec": {"template": same}})

        async def seen(generation=body["metadata"]["generation"]) -> bool:
            status = (await here.see(DECODE_POOLS, "chat"))["status"]
            return status["observedGeneration"] == generation and status["updatedReplicas"] == 1

        await eventually(seen)
        assert await uid(here, "chat-decode-0-0") == pod
        now = await here.see(STATEFUL_SETS, "chat-decode-0")
        assert now["metadata"]["generation"] == sts["metadata"]["generation"]


async def test_update_of_one_instance_starts_another_first(here: Bench):
    await here.operator().start()
    await here.pool("DecodePool", rollout={"surge": "Auto"})
    await here.run_pod("chat-decode-0-0")
    await here.until("DecodePool", "Ready", status="True")
    old = await uid(here, "chat-decode-0-0")
    await here.admin.edit(DECODE_POOLS, here.namespace, "chat", {"spec": {"model": {"servedName": "another"}}})
    await until_sets(here, 0, 1)
    await here.pod("chat-decode-1-0")
    assert await uid(here, "chat-decode-0-0") == old
    await here.run_pod("chat-decode-1-0")
    await until_sets(here, 1)
    await here.until("DecodePool", "Ready", status="True")
    new = await here.see(PODS, "chat-decode-1-0")
    assert "--served-model-name=another" in new["spec"]["containers"][0]["args"]


async def test_lack_of_room_is_announced_before_serving_stops(here: Bench):
    """The new pods name the real scheduler, so the causes are in its own words."""

    async def update(**spec: object) -> None:
        await here.admin.edit(DECODE_POOLS, here.namespace, "chat", {"spec": {"template": {"spec": spec}}})

    async def unschedulable(cause: str) -> None:
        async def check() -> bool:
            conditions = (await here.pod("chat-decode-1-0"))["status"].get("conditions", [])
            return any(cause in one.get("message", "") for one in conditions)

        await eventually(check)

    await here.operator().start()
    await here.pool("DecodePool", rollout={"surge": "Auto"})
    await here.run_pod("chat-decode-0-0")
    await here.until("DecodePool", "Ready", status="True")
    await update(schedulerName="default-scheduler", nodeSelector={"pdpool.dev/no-such-node": ""})
    await unschedulable("didn't match Pod's node affinity/selector")
    stays = await here.until("DecodePool", "Reconciling", status="True", reason="Unschedulable")
    assert "make room" not in stays["message"]
    huge = {"name": "engine", "resources": {"requests": {"cpu": "1000"}}}
    await update(nodeSelector=None, containers=[huge])
    await unschedulable("Insufficient cpu")

    async def announced() -> bool:
        message = (await here.condition("DecodePool", "Reconciling"))["message"]
        return "serves nothing until chat-decode-1 is Ready" in message

    await eventually(announced)
    await until_sets(here, 0, 1)
    await until_sets(here, 1)
