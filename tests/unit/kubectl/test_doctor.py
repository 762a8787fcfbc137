"""`doctor` against a fake API server: each check fails alone, and names its command."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from pdpool_operator.api import names
from pdpool_operator.runtime.resources import CONFIG_MAPS, DECODE_POOLS, LEASES, NODES, PODS

from tests.fake_api import Call, FakeApi

from .conftest import Kubectl, put_well

SYSTEM = "pdpool-system"
LABELS = {"app.kubernetes.io/name": "pdpool", "app.kubernetes.io/component": "operator"}


def pod(labels: dict[str, str], **container: Any) -> dict[str, Any]:
    ready = "state" not in container
    status = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": str(ready)}],
        "containerStatuses": [{"name": "engine", "ready": ready, "restartCount": 0, **container}],
    }
    one = {"name": "engine", "image": "pdpool-operator:dev", "env": [{"name": "PDPOOL_LEASE", "value": "pdpool"}]}
    return {"metadata": {"labels": labels}, "spec": {"containers": [one]}, "status": status}


def put_lease(api: FakeApi, ago_s: float) -> None:
    renewed = (datetime.now(UTC) - timedelta(seconds=ago_s)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": "operator-1", "leaseDurationSeconds": 60, "renewTime": renewed}
    api.put(LEASES, SYSTEM, "pdpool", {"metadata": {}, "spec": spec})


def put_rdma(api: FakeApi, devices: str) -> None:
    rdma = {"mode": "Required", "resource": "rdma/ib", "count": 4}
    api.put(DECODE_POOLS, "llm", "fast", {"metadata": {}, "spec": {"rdma": rdma, "model": {"path": "tiny"}}})
    api.put(NODES, "", "node-1", {"metadata": {}, "status": {"allocatable": {"rdma/ib": devices}}})


async def metrics(_: web.Request, call: Call) -> web.StreamResponse | None:
    return web.Response(text="# TYPE pdpool_leader gauge\npdpool_leader 1.0\n") if "/proxy/" in call.path else None


@pytest.fixture
def installed(api: FakeApi) -> FakeApi:
    """A cluster in which every check succeeds."""
    put_well(api)
    api.put(PODS, SYSTEM, "operator-1", pod(LABELS))
    put_lease(api, 0)
    rules = {"metadata": {"labels": {"app.kubernetes.io/name": "pdpool"}}, "data": {"pdpool.rules.yaml": "groups: []"}}
    api.put(CONFIG_MAPS, SYSTEM, "pdpool-rules", rules)
    put_rdma(api, "4")
    api.fault = metrics
    return api


async def test_complete_installation_passes(installed: FakeApi, kubectl: Kubectl) -> None:
    result = await kubectl("doctor", "-o", "json")
    checks = json.loads(result.stdout)["checks"]
    assert [(c["name"], c["outcome"]) for c in checks] == [
        (name, "ok") for name in ("kinds", "rights", "operator", "lease", "metrics", "rules", "images", "rdma")
    ]
    assert result.exit_code == 0


def no_operator(api: FakeApi) -> None:
    api.remove(PODS, SYSTEM, "operator-1")


def no_image(api: FakeApi, reason: str = "ImagePullBackOff") -> None:
    waiting = {"waiting": {"reason": reason, "message": "not found"}}
    api.put(PODS, "llm", "chat-decode-0-0", pod({names.LABEL_MANAGED_BY: names.MANAGED_BY}, state=waiting))


def no_kinds(api: FakeApi) -> None:
    async def fault(request: web.Request, call: Call) -> web.StreamResponse | None:
        if call.path.startswith("/openapi"):
            return web.json_response({"reason": "NotFound"}, status=404)
        return await metrics(request, call)

    api.fault = fault


def no_metrics(api: FakeApi) -> None:
    async def fault(_: web.Request, call: Call) -> web.StreamResponse | None:
        return web.json_response({"message": "refused by policy"}, status=503) if "/proxy/" in call.path else None

    api.fault = fault


@pytest.mark.parametrize(
    ("spoil", "name", "detail", "mend"),
    [
        (no_kinds, "kinds", "does not serve pdpool.dev/v1alpha1", "helm upgrade --install pdpool"),
        (lambda api: api.denied.add(("list", "pods")), "rights", "may not list pods in llm", "--verb=list"),
        (no_operator, "operator", "no pod of the operator", "helm install pdpool"),
        (lambda api: put_lease(api, 90), "lease", "s ago: nobody leads", "kubectl logs"),
        (no_metrics, "metrics", "refused by policy", "kubectl port-forward"),
        (lambda api: api.remove(CONFIG_MAPS, SYSTEM, "pdpool-rules"), "rules", "no alert rules", "helm upgrade pdpool"),
        (no_image, "images", "chat-decode-0-0: ImagePullBackOff not found", "kubectl describe pod chat-decode-0-0"),
        (lambda api: no_image(api, "RegistryUnavailable"), "images", "RegistryUnavailable", "kubectl describe pod"),
        (lambda api: put_rdma(api, "3"), "rdma", "no node of 1 has 4 of rdma/ib", "kubectl get nodes"),
    ],
)
async def test_missing_precondition_fails_with_its_command(
    installed: FakeApi, kubectl: Kubectl, spoil: Callable[[FakeApi], None], name: str, detail: str, mend: str
) -> None:
    spoil(installed)
    result = await kubectl("doctor", "-o", "json")
    failed = {c["name"]: c for c in json.loads(result.stdout)["checks"] if c["outcome"] == "failed"}
    assert result.exit_code == 1
    assert detail in failed[name]["detail"]
    assert mend in failed[name]["mend"]


@pytest.mark.parametrize("devices", ["4", "1k", "2Ki"])
async def test_enough_devices_pass(installed: FakeApi, kubectl: Kubectl, devices: str) -> None:
    put_rdma(installed, devices)
    assert (await kubectl("doctor")).exit_code == 0


@pytest.mark.parametrize("devices", ["", "x", "500m"])
async def test_no_whole_number_of_devices_is_none(installed: FakeApi, kubectl: Kubectl, devices: str) -> None:
    put_rdma(installed, devices)
    assert "no node of 1 has 4 of rdma/ib" in (await kubectl("doctor")).stdout


async def test_text_lists_commands_below_the_table(installed: FakeApi, kubectl: Kubectl) -> None:
    put_rdma(installed, "3")
    *_, head, mend = (await kubectl("doctor")).stdout.splitlines()
    assert head == "mend:"
    assert mend.startswith("  kubectl get nodes -o custom-columns=")
