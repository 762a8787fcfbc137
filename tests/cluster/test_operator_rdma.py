"""Placement of pools with `spec.rdma` by the real scheduler, on simulated nodes with the resource `rdma/ib`."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdpool_operator.runtime.api_errors import InvalidError
from pdpool_operator.runtime.resources import PODS

from dev.cluster import bringup
from dev.cluster.layout import state_at
from tests.cluster.hands import POOLS, eventually
from tests.cluster.operator_harness import ON_CLUSTER, Bench

pytestmark = [*ON_CLUSTER, pytest.mark.timeout(300, func_only=True)]

ROOT = Path(__file__).parents[2]
SGLANG = {"engine": {"type": "SGLang"}, "model": {"path": "/models/m"}}
RDMA = {"mode": "Required", "resource": "rdma/ib", "count": 4, "nodeSelector": {"type": "kwok"}}
TEMPLATE = {
    "spec": {
        "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
        "containers": [{"name": "engine", "image": "registry.example/sglang-pdpool:0.5.23"}],
    }
}


@pytest.fixture
def two_simulated_nodes() -> Iterator[None]:
    """Each has eight devices of `rdma/ib`."""
    found = bringup.status(state_at(None))
    if found is None:
        pytest.skip("not the local cluster: nodes cannot be simulated")
    before = found["simulated_nodes"]
    _simulate(2)
    yield
    _simulate(before)


def _simulate(count: int) -> None:
    command = [sys.executable, "-m", "dev.cluster", "up", "--kwok-nodes", str(count)]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=180, check=True)


async def test_pods_go_where_devices_are_left(two_simulated_nodes: None, here: Bench):
    await here.operator().start()
    await here.pool("PrefillPool", replicas=5, rdma=RDMA, template=TEMPLATE, **SGLANG)

    async def placed() -> dict[str, int] | None:
        pods = await here.admin.all(PODS, here.namespace, "pdpool.dev/instance")
        nodes = [pod["spec"].get("nodeName", "") for pod in pods]
        counts = {node: nodes.count(node) for node in set(nodes)}
        return counts if counts == {"sim-0": 2, "sim-1": 2, "": 1} else None

    await eventually(placed)
    ready = await here.until("PrefillPool", "Ready", status="False", reason="Unschedulable")
    assert "rdma/ib" in ready["message"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"rdma": {"mode": "Required"}}, "rdma.resource must name the device resource"),
        ({"rdma": {"mode": "Off", "resource": "rdma/ib"}}, "rdma.resource must be absent"),
        ({"rdma": {"mode": "Required", "resource": "ib"}}, "must be the full name of a resource"),
        ({"rdma": {**RDMA, "networks": ["A b"]}}, "must be names of NetworkAttachmentDefinitions"),
        ({"rdma": RDMA, "transfer": {"backend": "Local"}}, "transfer.backend Local"),
        ({"rdma": RDMA, "transfer": {"connector": "Native"}}, "rdma.mode Required needs transfer.connector Pdpool"),
        ({"transfer": {"connector": "Native", "backend": "Local"}}, "exists only with transfer.connector Pdpool"),
        ({"parallelism": {"tensor": 8, "data": 9}}, "must be at most 64"),
        ({"model": {"path": "tiny"}}, "the random model tiny exists only in engine.type Reference"),
        ({"engine": {"type": "Reference"}, "model": {"path": "org/model"}}, "must be an absolute path"),
        ({"engine": {"type": "Reference"}, "parallelism": {"data": 2}}, "parallelism.data must be 1"),
        ({"engine": {"type": "Reference"}, "transfer": {"connector": "Native"}}, "must be Pdpool unless"),
    ],
)
async def test_the_api_server_refuses_fields_that_contradict(here: Bench, spec: dict, message: str):
    body = {"metadata": {"name": "chat", "namespace": here.namespace}, "spec": {**SGLANG, **spec}}
    with pytest.raises(InvalidError, match=message):
        await here.admin.make(POOLS["PrefillPool"], body)


async def test_the_api_server_takes_every_field_of_rdma(here: Bench):
    networks = ["rdma-0", "kube-system/rdma-1"]
    rdma = {**RDMA, "networks": networks, "memlock": "Capability"}
    body = {"metadata": {"name": "chat", "namespace": here.namespace}, "spec": {**SGLANG, "rdma": rdma}}
    made = await here.admin.make(POOLS["DecodePool"], body)
    assert made["spec"]["rdma"] == rdma
