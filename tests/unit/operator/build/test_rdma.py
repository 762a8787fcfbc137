"""`spec.rdma` in pods: each fabric against committed YAML, and what a template may not say beside it."""

import json

import pytest
from pdpool_operator.api.base import SpecInvalid
from pdpool_operator.api.names import Role
from pdpool_operator.build.engine import engine_template
from pdpool_operator.build.pool import instance_stateful_set, pool_spec_hash
from pdpool_operator.build.rdma import ENVIRONMENT, Fabric, fabric_of
from pdpool_operator.build.template import TemplateInvalid

from tests.unit.operator.plan.makers import SETTINGS, make_pool

ENGINE = {"name": "engine", "image": "registry.example/sglang-pdpool:0.5.23"}


def pool(role=Role.PREFILL, rdma=None, metadata=None, pod=None, **container):
    template = {"metadata": metadata or {}, "spec": {"containers": [{**ENGINE, **container}], **(pod or {})}}
    sglang = {"engine": {"type": "SGLang"}, "model": {"path": "/models/qwen3"}, "template": template}
    return make_pool(role, **sglang, rdma={"mode": "Required", "resource": "rdma/ib", **(rdma or {})})


def rendered(**options):
    return engine_template(pool(**options), 0, SETTINGS)


def engine(**options):
    return rendered(**options)["spec"]["containers"][0]


POOLS = {
    "rdma_infiniband": pool(rdma={"count": 4, "nodeSelector": {"feature.node.kubernetes.io/rdma.available": "true"}}),
    "rdma_roce": pool(Role.DECODE, {"resource": "vke.volcengine.com/rdma", "networks": ["rdma-0", "net/rdma-1"]}),
    "rdma_efa": pool(rdma={"resource": "vpc.amazonaws.com/efa", "count": 4}),
    "rdma_shared": pool(rdma={"mode": "Preferred", "resource": "rdma/hca_shared_devices_a", "memlock": "Capability"}),
    "rdma_off": make_pool(rdma={"mode": "Off"}),
}


@pytest.mark.parametrize("case", sorted(POOLS))
def test_pods_of_each_fabric_are_as_committed(case, same_as_golden):
    same_as_golden(case, [instance_stateful_set(POOLS[case], 0, SETTINGS)])


@pytest.mark.parametrize(
    ("resource", "fabric"),
    [
        ("rdma/ib", Fabric.INFINIBAND),
        ("vpc.amazonaws.com/efa", Fabric.EFA),
        ("networking.gke.io.networks/rdma-0", Fabric.ROCE),
        ("vke.volcengine.com/rdma", Fabric.ROCE),
        ("rdma/hca_shared_devices_a", Fabric.SHARED),
        ("rdma/rdma_shared_device_a", Fabric.SHARED),
        ("nvidia.com/rdma-vf", Fabric.SHARED),
    ],
)
def test_resource_names_the_fabric(resource, fabric):
    assert fabric_of(resource) is fabric


def test_no_fabric_forbids_tcp_or_infiniband():
    for fabric in Fabric:
        assert not {"UCX_TLS", "UCX_MODULES", "MC_FORCE_TCP"} & ENVIRONMENT[fabric].keys()


def test_pool_without_rdma_gets_no_device_and_no_variables():
    assert engine_template(make_pool(), 0, SETTINGS) == engine_template(make_pool(rdma=None), 0, SETTINGS)
    names = {entry["name"] for entry in engine_template(make_pool(), 0, SETTINGS)["spec"]["containers"][0]["env"]}
    assert not any(name.startswith(("UCX_", "MC_", "FI_")) for name in names)


def test_mode_that_builds_the_same_pods_restarts_none():
    hashes = {mode: pool_spec_hash(pool(rdma={"mode": mode})) for mode in ("Required", "Preferred")}
    assert hashes["Required"] == hashes["Preferred"]
    off = make_pool(rdma={"mode": "Off"})
    assert pool_spec_hash(off) != pool_spec_hash(make_pool())


def test_device_joins_other_resources():
    resources = engine(resources={"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": "8"}})["resources"]
    assert resources == {"limits": {"nvidia.com/gpu": 1, "rdma/ib": 1}, "requests": {"cpu": "8"}}


def test_variables_of_a_template_win():
    env = engine(rdma={"resource": "vke.volcengine.com/rdma"}, env=[{"name": "UCX_IB_GID_INDEX", "value": "5"}])["env"]
    assert [entry["value"] for entry in env if entry["name"] == "UCX_IB_GID_INDEX"] == ["5"]


def test_capability_means_root_with_ipc_lock_only():
    security = engine(rdma={"memlock": "Capability"})["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert (security["runAsUser"], security["runAsNonRoot"]) == (0, False)
    assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False)


def test_node_limit_keeps_the_restricted_profile():
    template = rendered()
    assert template["spec"]["securityContext"]["runAsNonRoot"]
    assert template["spec"]["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_networks_become_the_annotation_of_multus():
    annotations = rendered(rdma={"networks": ["a", "ns/b"]})["metadata"]["annotations"]
    assert json.loads(annotations["k8s.v1.cni.cncf.io/networks"]) == [{"name": "a"}, {"name": "b", "namespace": "ns"}]


def test_node_labels_join_those_of_the_template():
    selector = rendered(rdma={"nodeSelector": {"a": "1"}}, pod={"nodeSelector": {"b": "2"}})["spec"]["nodeSelector"]
    assert selector == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resources": {"limits": {"rdma/ib": 2}}}, "resources.limits[rdma/ib]: 2: spec.rdma.count is 1"),
        ({"resources": {"requests": {"rdma/ib": "8"}}}, "resources.requests[rdma/ib]: '8': spec.rdma.count is 1"),
        ({"resources": []}, "resources: <list of 0>: must be an object"),
        ({"resources": {"limits": "all"}}, "resources.limits: 'all': must be an object"),
        (
            {"rdma": {"nodeSelector": {"rdma": "yes"}}, "pod": {"nodeSelector": {"rdma": "no"}}},
            "nodeSelector[rdma]: 'no': spec.rdma.nodeSelector says 'yes'",
        ),
        ({"rdma": {"nodeSelector": {"a": "1"}}, "pod": {"nodeSelector": "x"}}, "nodeSelector: 'x': must be an object"),
        (
            {"rdma": {"networks": ["a"]}, "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "b"}}},
            "spec.rdma.networks sets this; name all networks there",
        ),
        (
            {"rdma": {"memlock": "Capability"}, "securityContext": {"runAsUser": 1000}},
            "securityContext.runAsUser: 1000: spec.rdma.memlock Capability sets this",
        ),
        (
            {"rdma": {"memlock": "Capability"}, "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}},
            "securityContext.capabilities: <object of 1>",
        ),
    ],
)
def test_template_that_contradicts_rdma_is_refused(options, message):
    with pytest.raises(TemplateInvalid) as refused:
        rendered(**options)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"rdma": {"mode": "Required"}}, "rdma.resource must name the device resource"),
        ({"rdma": {"mode": "Off", "resource": "rdma/ib"}}, "rdma.resource must be absent if rdma.mode is Off"),
        ({"rdma": {"resource": "rdma/ib"}}, "spec.rdma.mode"),
        ({"rdma": {"mode": "Required", "resource": "rdma/ib", "count": 0}}, "spec.rdma.count"),
        ({"rdma": {"mode": "Preferred", "resource": "rdma/ib"}, "transfer": {"backend": "Local"}}, "backend Local"),
        (
            {
                "engine": {"type": "SGLang"},
                "rdma": {"mode": "Required", "resource": "rdma/ib"},
                "transfer": {"connector": "Native"},
            },
            "rdma.mode Required needs transfer.connector Pdpool",
        ),
    ],
)
def test_rdma_that_contradicts_itself_or_the_transfer_is_refused(spec, message):
    with pytest.raises(SpecInvalid) as refused:
        make_pool(**spec)
    assert message in str(refused.value)
