"""The operator's status against a real API server: what kubectl, Flux and Helm read from it."""

import time
from typing import Any

import pytest
from pdpool_operator.api.names import KEYS_SECRET
from pdpool_operator.runtime.resources import (
    DISRUPTION_BUDGETS,
    EVENTS,
    PODS,
    PREFILL_POOLS,
    SERVICES,
    STATEFUL_SETS,
    Resource,
)

from tests.cluster.hands import Object, eventually
from tests.cluster.operator_harness import ON_CLUSTER, Bench

pytestmark = [*ON_CLUSTER, pytest.mark.timeout(180, func_only=True)]

WEBHOOKS = Resource(
    "admissionregistration.k8s.io", "v1", "validatingwebhookconfigurations", "ValidatingWebhookConfiguration"
)
SECRETS = Resource("", "v1", "secrets", "Secret")


async def serving(here: Bench, **spec: Any) -> None:
    """Start an operator and a prefill pool of one instance that serves."""
    await here.operator().start()
    await here.pool("PrefillPool", **spec)
    await here.run_pod("chat-prefill-0-0")
    await here.until("PrefillPool", "Ready", status="True")


def owners(body: Object) -> list[str]:
    return [owner["uid"] for owner in body["metadata"].get("ownerReferences", [])]


async def events(here: Bench) -> list[str]:
    return [event["reason"] for event in await here.admin.all(EVENTS, here.namespace)]


async def test_orphans_are_adopted_and_their_pods_go_on(here: Bench):
    await serving(here)
    pod = await here.pod("chat-prefill-0-0")
    await here.admin.drop(PREFILL_POOLS, here.namespace, "chat", propagationPolicy="Orphan")
    children = ((STATEFUL_SETS, "chat-prefill-0"), (SERVICES, "chat-prefill"), (DISRUPTION_BUDGETS, "chat-prefill"))

    async def orphaned() -> bool:
        gone = await here.see(PREFILL_POOLS, "chat") is None
        return gone and not any([owners(await here.see(*child)) for child in children])

    await eventually(orphaned)
    again = await here.pool("PrefillPool")
    await here.until("PrefillPool", "Ready", status="True")
    uid = again["metadata"]["uid"]
    for resource, name in children:
        body = await here.see(resource, name)
        assert body is not None, name
        assert owners(body) == [uid]
    keys = await here.see(SECRETS, KEYS_SECRET)
    assert keys is not None
    assert owners(keys) == [], "all pools and services of the namespace share it"
    assert (await here.pod("chat-prefill-0-0"))["metadata"]["uid"] == pod["metadata"]["uid"]
    reasons = await events(here)
    assert "ObjectAdopted" in reasons
    assert not {"NameConflict", "NoController"} & set(reasons)


async def test_a_silent_node_is_named_and_its_pool_stays_available(here: Bench):
    await serving(here)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    conditions = [  # as the node controller leaves them (controller/util/node, MarkPodsNotReady)
        {"type": "Ready", "status": "False", "lastTransitionTime": stamp},
        {"type": "ContainersReady", "status": "True", "lastTransitionTime": stamp},
    ]
    await here.admin.edit(PODS, here.namespace, "chat-prefill-0-0", {"status": {"conditions": conditions}}, "status")
    ready = await here.until("PrefillPool", "Ready", status="False", reason="NodeNotReady")
    assert "counts chat-prefill-0-0 as not Ready" in ready["message"]
    await here.until("PrefillPool", "Available", status="True")
    await here.engines["chat-prefill-0-0"].stop()
    await here.until("PrefillPool", "Available", status="False", reason="NodeNotReady")


async def test_a_restart_shows_in_the_status_when_it_has_ended(here: Bench):
    await serving(here)
    before = (await here.pod("chat-prefill-0-0"))["metadata"]["uid"]
    annotations = {"pdpool.dev/restarted-at": "monday"}
    await here.admin.edit(PREFILL_POOLS, here.namespace, "chat", {"metadata": {"annotations": annotations}})
    await here.pod("chat-prefill-0-0", but_not=before)
    assert "restartedAt" not in (await here.see(PREFILL_POOLS, "chat"))["status"]
    await here.run_pod("chat-prefill-0-0", but_not=before)

    async def restarted() -> bool:
        return (await here.see(PREFILL_POOLS, "chat"))["status"].get("restartedAt") == "monday"

    await eventually(restarted)
    await here.until("PrefillPool", "Ready", status="True")


async def test_conditions_of_other_writers_stay(here: Bench):
    await serving(here)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    foreign = {"type": "Audited", "status": "True", "reason": "Checked", "message": "", "lastTransitionTime": stamp}
    body = {
        "apiVersion": PREFILL_POOLS.api_version,
        "kind": PREFILL_POOLS.kind,
        "metadata": {"name": "chat", "namespace": here.namespace},
        "status": {"conditions": [foreign]},
    }
    path = PREFILL_POOLS.path(here.namespace, "chat", "status")
    apply = "application/apply-patch+yaml"
    await here.admin.call("patch", PREFILL_POOLS, path, body, apply, fieldManager="auditor")
    bad = {"spec": {"template": {"spec": {"containers": "x"}}}}
    await here.admin.edit(PREFILL_POOLS, here.namespace, "chat", bad)
    await here.until("PrefillPool", "Stalled", status="True", reason="TemplateInvalid")
    conditions = (await here.see(PREFILL_POOLS, "chat"))["status"]["conditions"]
    assert [c["reason"] for c in conditions if c["type"] == "Audited"] == ["Checked"]


async def test_a_webhook_that_is_down_is_shown_until_it_answers(here: Bench):
    name = f"pdpool-test-{here.namespace}"
    webhook = {
        "name": "down.pdpool.test",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [{"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["*"], "resources": ["statefulsets"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": here.namespace}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 2,
    }
    await here.admin.make(WEBHOOKS, {"metadata": {"name": name}, "webhooks": [webhook]})
    try:
        await here.operator().start()
        await here.pool("PrefillPool")
        ready = await here.until("PrefillPool", "Ready", status="False", reason="ApiFailing")
        assert "down.pdpool.test" in ready["message"]
        await here.until("PrefillPool", "Reconciling", status="True", reason="ApiFailing")
    finally:
        await here.admin.drop(WEBHOOKS, None, name)
    await here.run_pod("chat-prefill-0-0")
    await here.until("PrefillPool", "Ready", status="True")


@pytest.mark.parametrize("what", ["edited", "deleted"])
async def test_a_restored_child_has_an_event(here: Bench, what: str):
    await serving(here)
    if what == "edited":
        selector = {"spec": {"selector": {"pdpool.dev/pool": "another"}}}
        await here.admin.edit(SERVICES, here.namespace, "chat-prefill", selector)
    else:
        await here.admin.drop(SERVICES, here.namespace, "chat-prefill")

    async def told() -> bool:
        return "ObjectRestored" in await events(here)

    await eventually(told)


async def test_a_deleted_pool_is_deleting_and_not_ready(here: Bench):
    await serving(here)
    await here.admin.edit(PREFILL_POOLS, here.namespace, "chat", {"metadata": {"finalizers": ["pdpool.dev/test"]}})
    await here.admin.drop(PREFILL_POOLS, here.namespace, "chat")
    try:
        await here.until("PrefillPool", "Ready", status="False", reason="Deleting")
        await here.until("PrefillPool", "Reconciling", status="True", reason="Deleting")
    finally:
        await here.admin.edit(PREFILL_POOLS, here.namespace, "chat", {"metadata": {"finalizers": None}})
