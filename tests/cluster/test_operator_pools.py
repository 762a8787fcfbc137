"""The operator against a real API server: what it creates for pools, and how it reports problems."""

import asyncio
import time

import pytest
from pdpool_operator.runtime.resources import (
    DECODE_POOLS,
    DISRUPTION_BUDGETS,
    EVENTS,
    PODS,
    PREFILL_POOLS,
    SERVICES,
    STATEFUL_SETS,
    Resource,
)

from tests.cluster.hands import QUOTAS, eventually
from tests.cluster.operator_harness import NOBODY, ON_CLUSTER, Bench

pytestmark = [*ON_CLUSTER, pytest.mark.timeout(180, func_only=True)]


async def test_pools_become_workloads_and_ready_only_when_their_engines_are(here: Bench):
    await here.operator().start()
    await here.pool("PrefillPool", replicas=2)
    await here.pool("DecodePool")
    for name in ("chat-prefill-0", "chat-prefill-1", "chat-decode-0"):
        sts = await eventually(lambda name=name: here.see(STATEFUL_SETS, name))
        assert sts["spec"]["updateStrategy"]["type"] == "OnDelete"
        assert sts["metadata"]["ownerReferences"][0]["controller"] is True
    for name in ("chat-prefill", "chat-decode"):
        assert (await eventually(lambda name=name: here.see(SERVICES, name)))["spec"]["clusterIP"] == "None"
        assert await eventually(lambda name=name: here.see(DISRUPTION_BUDGETS, name))
    await here.until("PrefillPool", "Ready", status="False")
    await here.run_pod("chat-prefill-0-0")
    await here.run_pod("chat-decode-0-0")
    await here.until("DecodePool", "Ready", status="True", reason="Ready")

    async def names_the_one_that_is_missing() -> bool:
        return "chat-prefill-1" in (await here.condition("PrefillPool", "Ready"))["message"]

    assert await eventually(names_the_one_that_is_missing)
    await here.run_pod("chat-prefill-1-0")
    await here.until("PrefillPool", "Ready", status="True")
    await here.until("PrefillPool", "Available", status="True")
    assert await here.condition("PrefillPool", "Reconciling") == {}
    await here.until("PrefillPool", "QueuesHealthy", status="True")
    status = (await here.see(PREFILL_POOLS, "chat"))["status"]
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (2, 2, 2)
    await here.set_ready("chat-prefill-1-0", False)
    await here.until("PrefillPool", "Ready", status="False")
    await here.until("PrefillPool", "Available", status="True")


async def test_queue_lengths_are_exported_while_known_and_vanish_when_unknown(here: Bench):
    operator = await here.operator().start()
    await here.pool("PrefillPool")
    await here.run_pod("chat-prefill-0-0")
    here.engines["chat-prefill-0-0"].queues = {"prefill_bootstrap": 7}

    def series(name: str):
        async def find() -> list[str]:
            lines = (await operator.get("/metrics")).splitlines()
            return [line for line in lines if line.startswith(name + "{") and here.namespace in line]

        return find

    (line,) = await eventually(series("pdpool_queue_reqs"))
    assert 'queue="prefill_bootstrap"' in line
    assert line.endswith(" 7.0")
    await here.engines["chat-prefill-0-0"].stop()

    async def unknown() -> bool:
        return not await series("pdpool_queue_reqs")() and bool(await series("pdpool_instance_verdict")())

    await eventually(unknown)
    await here.admin.drop(PREFILL_POOLS, here.namespace, "chat")

    async def gone() -> bool:
        return not await series("pdpool_instance_verdict")()

    await eventually(gone)


async def test_a_foreign_object_under_our_name_is_left_alone_and_named(here: Bench):
    labels = {"app": "somebody-elses"}
    foreign = {
        "metadata": {"name": "chat-prefill-0", "namespace": here.namespace},
        "spec": {
            "replicas": 0,
            "serviceName": "x",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
        },
    }
    before = await here.admin.make(STATEFUL_SETS, foreign)
    await here.operator().start()
    await here.pool("PrefillPool")
    ready = await here.until("PrefillPool", "Ready", status="False", reason="NoController")
    assert f"kubectl label --overwrite -n {here.namespace} statefulset chat-prefill-0" in ready["message"]
    await here.until("PrefillPool", "Stalled", status="True", reason="NoController")
    after = await here.see(STATEFUL_SETS, "chat-prefill-0")
    assert after["spec"] == before["spec"]
    assert "ownerReferences" not in after["metadata"]
    await here.admin.drop(STATEFUL_SETS, here.namespace, "chat-prefill-0")
    await here.run_pod("chat-prefill-0-0")
    await here.until("PrefillPool", "Ready", status="True")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("resources", {"limits": {"cpu": "-1"}}, "must be greater than or equal to 0"),
        ("resources", {"limits": {"cpu": "much"}}, "quantities must match the regular expression"),
        ("env", [{"name": "A", "value": 5}], "value: expected string"),
        ("imagePullPolice", "Always", "field not declared in schema"),
    ],
)
async def test_a_fault_in_the_template_is_told_in_the_api_servers_words_and_mended_by_an_edit(
    here: Bench, field, value, words
):
    operator = await here.operator().start()
    bad = {"spec": {"schedulerName": NOBODY, "containers": [{"name": "engine", field: value}]}}
    await here.pool("PrefillPool", template=bad)
    ready = await here.until("PrefillPool", "Ready", status="False", reason="TemplateInvalid")
    assert words in ready["message"]
    assert await here.see(STATEFUL_SETS, "chat-prefill-0") is None
    calls = await operator.calls()
    good = {"spec": {"template": {"spec": {"containers": None}}}}
    await here.admin.edit(PREFILL_POOLS, here.namespace, "chat", good)
    await here.run_pod("chat-prefill-0-0")
    await here.until("PrefillPool", "Ready", status="True")
    assert calls["patch", "statefulsets"] < 25, "refused again and again without back-off"


async def test_a_bad_edit_disturbs_no_running_pod(here: Bench):
    await here.operator().start()
    await here.pool("PrefillPool")
    await here.run_pod("chat-prefill-0-0")
    await here.until("PrefillPool", "Ready", status="True")
    pod = await here.see(PODS, "chat-prefill-0-0")
    bad = {"spec": {"template": {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"cpu": "-1"}}}]}}}}
    await here.admin.edit(PREFILL_POOLS, here.namespace, "chat", bad)
    await here.until("PrefillPool", "Ready", status="False", reason="TemplateInvalid")
    same = await here.see(PODS, "chat-prefill-0-0")
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    sts = await here.see(STATEFUL_SETS, "chat-prefill-0")
    assert "pdpool.dev/drain-started" not in sts["metadata"].get("annotations", {})


async def test_an_update_drains_first_and_then_replaces_one_pod_at_a_time(here: Bench):
    operator = await here.operator().start()
    await here.pool("PrefillPool", replicas=2)
    await here.service()  # without a router of ours, the pod drains in its own grace period
    for name in ("chat-prefill-0-0", "chat-prefill-1-0"):
        await here.run_pod(name)
    await here.until("PrefillPool", "Ready", status="True")
    uids = {name: (await here.see(PODS, name))["metadata"]["uid"] for name in ("chat-prefill-0-0", "chat-prefill-1-0")}
    busy, other = here.engines["chat-prefill-1-0"], here.engines["chat-prefill-0-0"]
    busy.running = other.running = 1  # of two that have work, the one with the higher number is first
    await here.admin.edit(PREFILL_POOLS, here.namespace, "chat", {"spec": {"model": {"servedName": "another"}}})

    async def draining() -> bool:
        sts = await here.see(STATEFUL_SETS, "chat-prefill-1")
        return "pdpool.dev/drain-started" in sts["metadata"]["annotations"]

    await eventually(draining)
    await here.until("PrefillPool", "Reconciling", status="True", reason="Draining")
    await here.until("PrefillPool", "Available", status="True")
    looked = await operator.reconciles()

    async def looked_again() -> bool:
        return await operator.reconciles() >= looked + 4

    await eventually(looked_again)
    assert (await here.see(PODS, "chat-prefill-1-0"))["metadata"]["uid"] == uids["chat-prefill-1-0"]
    busy.running = 0
    await here.run_pod("chat-prefill-1-0", but_not=uids["chat-prefill-1-0"])
    other.running = 0
    await here.run_pod("chat-prefill-0-0", but_not=uids["chat-prefill-0-0"])
    await here.until("PrefillPool", "Ready", status="True")
    for name in uids:
        args = (await here.see(PODS, name))["spec"]["containers"][0]["args"]
        assert "--served-model-name=another" in args


async def test_deleting_a_pool_removes_what_it_made_also_with_the_operator_away(here: Bench):
    operator = await here.operator().start()
    await here.pool("PrefillPool", replicas=2)
    await here.run_pod("chat-prefill-0-0")
    await eventually(lambda: here.see(STATEFUL_SETS, "chat-prefill-1"))
    await operator.stop()
    await here.admin.drop(PREFILL_POOLS, here.namespace, "chat", propagationPolicy="Background")

    async def gone() -> bool:
        kinds = (STATEFUL_SETS, PODS, DISRUPTION_BUDGETS, SERVICES)
        return not any([await here.admin.all(kind, here.namespace) for kind in kinds])

    await eventually(gone)


@pytest.mark.parametrize("how", ["Background", "Foreground"])
async def test_a_pool_that_is_deleted_and_made_anew_at_once_waits_for_what_was_the_former_one_s(here: Bench, how: str):
    await here.operator().start()
    async with here.kubelet():
        await here.pool("PrefillPool", replicas=2)
        await here.until("PrefillPool", "Ready", status="True")
        # As a draining pod keeps it: foreground deletion waits for the pod.
        await here.admin.edit(
            PODS, here.namespace, "chat-prefill-0-0", {"metadata": {"finalizers": ["pdpool.dev/test"]}}
        )
        await here.admin.drop(PREFILL_POOLS, here.namespace, "chat", propagationPolicy=how)
        again = await eventually(lambda: here.pool("PrefillPool", replicas=2), every_s=0.02)
        await here.until("PrefillPool", "Ready", status="False")
        await here.admin.edit(PODS, here.namespace, "chat-prefill-0-0", {"metadata": {"finalizers": None}})
        await here.until("PrefillPool", "Ready", status="True")
    for sts in await here.admin.all(STATEFUL_SETS, here.namespace):
        assert [owner["uid"] for owner in sts["metadata"]["ownerReferences"]] == [again["metadata"]["uid"]]
    told = [event["reason"] for event in await here.admin.all(EVENTS, here.namespace) if event["type"] == "Warning"]
    assert not {"NameConflict", "NoController"} & set(told)


async def test_scaling_down_removes_the_highest_instance_only(here: Bench):
    await here.operator().start()
    await here.pool("DecodePool", replicas=3)
    for i in range(3):
        await here.run_pod(f"chat-decode-{i}-0")
    await here.until("DecodePool", "Ready", status="True")
    await here.admin.edit(DECODE_POOLS, here.namespace, "chat", {"spec": {"replicas": 2}}, "scale")

    async def two() -> bool:
        sets = await here.admin.all(STATEFUL_SETS, here.namespace)
        return sorted(s["metadata"]["name"] for s in sets) == ["chat-decode-0", "chat-decode-1"]

    await eventually(two)
    await here.until("DecodePool", "Ready", status="True")


@pytest.mark.parametrize(
    ("state", "reason", "named"),
    [
        pytest.param(
            {"reason": "CreateContainerConfigError", "message": 'secret "hf-token" not found'},
            "MissingSecret",
            "hf-token",
            id="secret",
        ),
        pytest.param(
            {"reason": "CreateContainerConfigError", "message": 'configmap "prompts" not found'},
            "MissingReference",
            "prompts",
            id="configmap",
        ),
        pytest.param(
            {"reason": "ImagePullBackOff", "message": "Back-off pulling image no.such/engine:1"},
            "ImagePullFailed",
            "no.such/engine:1",
            id="image",
        ),
    ],
)
async def test_what_a_pod_misses_is_named_and_not_asked_for_again_and_again(here: Bench, state, reason, named):
    operator = await here.operator().start()
    await here.pool("PrefillPool")
    await here.pod("chat-prefill-0-0")
    container = {"name": "engine", "state": {"waiting": state}, "ready": False, "restartCount": 0, "image": "x"}
    status = {"phase": "Pending", "containerStatuses": [container | {"imageID": ""}]}
    await here.admin.edit(PODS, here.namespace, "chat-prefill-0-0", {"status": status}, "status")
    ready = await here.until("PrefillPool", "Ready", status="False", reason=reason)
    assert named in ready["message"]
    if reason == "MissingSecret":
        before, began, calls = await operator.quiet_reconciles(), time.monotonic(), await operator.calls()
        await asyncio.sleep(10)  # the time over which calls are counted
        looked, called = await operator.reconciles() - before, await operator.calls()
        tens = (time.monotonic() - began) / 10
        assert looked <= 2 * tens
        assert sum(called.values()) - sum(calls.values()) <= 40 * tens, "the lease takes 10 of them"


async def test_a_mount_that_fails_is_told_in_the_kubelets_words(here: Bench):
    await here.operator().start()
    await here.pool("PrefillPool")
    pod = await here.pod("chat-prefill-0-0")
    meta = pod["metadata"]
    event = {
        "metadata": {"name": f"{meta['name']}.mount", "namespace": here.namespace},
        "involvedObject": {"kind": "Pod", "name": meta["name"], "namespace": here.namespace, "uid": meta["uid"]},
        "type": "Warning",
        "reason": "FailedMount",
        "message": 'MountVolume.SetUp failed for volume "m" : persistentvolumeclaims "models" not found',
        "lastTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "count": 1,
        "source": {"component": "kubelet"},
    }
    await here.admin.make(Resource("", "v1", "events", "Event"), event)
    ready = await here.until("PrefillPool", "Ready", status="False", reason="MissingReference")
    assert "PersistentVolumeClaim models" in ready["message"]


async def test_a_pod_that_quota_or_policy_refuses_is_told_in_the_servers_words(here: Bench):
    meta = {"name": "none", "namespace": here.namespace}
    await here.admin.make(QUOTAS, {"metadata": meta, "spec": {"hard": {"pods": "0"}}})
    await here.operator().start()
    await here.pool("PrefillPool")
    ready = await here.until("PrefillPool", "Ready", status="False", reason="PodRejected")
    assert "exceeded quota: none" in ready["message"]
