"""Pods of `engine.type: VLLM`: whole objects against committed YAML, and each rule of its own."""

import json

import pytest
from pdpool_connector.runtime.environment import VARIABLES
from pdpool_operator.api.base import SpecInvalid
from pdpool_operator.api.names import ADMIN_SOCKET, Role
from pdpool_operator.build.engine import engine_template
from pdpool_operator.build.pool import headless_service, instance_stateful_set, pool_objects
from pdpool_operator.build.template import TemplateInvalid
from pdpool_operator.engines import engine_of

from tests.unit.operator.plan.makers import SETTINGS, make_pool

IMAGE = "registry.example/vllm-pdpool:0.32.0"


def template(**container):
    return {"spec": {"containers": [{"name": "engine", "image": IMAGE, **container}]}}


def vllm(role=Role.PREFILL, **spec):
    base = {"engine": {"type": "VLLM"}, "model": {"path": "Qwen/Qwen3-32B"}, "template": template()}
    return make_pool(role, "chat", **{**base, **spec})


def engine(pool):
    return engine_template(pool, 0, SETTINGS)["spec"]["containers"][0]


POOLS = {
    "vllm_prefill": vllm(template=template(resources={"limits": {"nvidia.com/gpu": 1}})),
    "vllm_decode_tp2": vllm(Role.DECODE, parallelism={"tensor": 2}, model={"path": "/models/qwen3"}),
}


@pytest.mark.parametrize("case", sorted(POOLS))
def test_pods_are_as_committed(case, same_as_golden):
    same_as_golden(case, [instance_stateful_set(POOLS[case], 0, SETTINGS)])


@pytest.mark.parametrize(("role", "kv_role"), [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")])
def test_vllm_loads_the_connector_of_its_side(role, kv_role):
    (flag,) = (arg for arg in engine(vllm(role))["args"] if arg.startswith("--kv-transfer-config="))
    assert json.loads(flag.partition("=")[2]) == {
        "kv_connector": "PdpoolConnector",
        "kv_connector_module_path": "pdpool_vllm.connector",
        "kv_role": kv_role,
    }


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_connector_reads_every_variable_that_is_set(role):
    known = {*VARIABLES, "PDPOOL_POD_IP", "PDPOOL_OPERATOR_KEY", "PDPOOL_ROLE", "PDPOOL_POOL", "PDPOOL_INSTANCE"}
    assert {one["name"] for one in engine(vllm(role))["env"] if one["name"].startswith("PDPOOL_")} <= known


def test_every_rank_has_ports_of_its_own():
    pool = vllm(parallelism={"tensor": 3})
    found = {port["name"]: port["containerPort"] for port in engine(pool)["ports"]}
    assert [found["admin"], found["admin-1"], found["admin-2"]] == [9400, 9401, 9402]
    assert len(set(found.values())) == len(found) == 1 + 1 + 3 + 3
    service = headless_service(pool, pool_objects(pool, SETTINGS)[0])
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == found


def test_drain_names_the_socket_of_every_rank():
    command = engine(vllm(parallelism={"tensor": 2}))["lifecycle"]["preStop"]["exec"]["command"]
    assert [word for word in command if word.startswith("/")] == [ADMIN_SOCKET, f"{ADMIN_SOCKET}.1"]


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"args": ["--tensor-parallel-size=4"]}, "pdpool sets --tensor-parallel-size"),
        ({"args": ["-tp", "4"]}, "pdpool sets -tp"),
        ({"args": ["--kv_transfer_config", "{}"]}, "pdpool sets --kv-transfer-config"),
        ({"args": ["--kv-transfer-config.kv_role=kv_both"]}, "pdpool sets --kv-transfer-config"),
        ({"args": ["--config", "x.yaml"]}, "a file of flags could contradict"),
        ({"args": ["--nnodes=2"]}, "an instance is one pod"),
        ({"args": ["--disable_log_stats"]}, "/v1/loads are made of these statistics"),
        ({"env": [{"name": "PDPOOL_ADMIN_PORT", "value": "1"}]}, "names that begin with PDPOOL_"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "spec.parallelism makes 2 ranks"),
        ({"image": None}, "name the image here"),
    ],
)
def test_template_that_contradicts_a_typed_field_is_refused(container, message):
    with pytest.raises(TemplateInvalid) as refused:
        engine(vllm(parallelism={"tensor": 2}, template=template(**container)))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "container",
    [
        {"args": ["--block-size=64", "--gpu-memory-utilization", "0.9", "--compilation-config.level=3"]},
        {"env": [{"name": "PDPOOL_VLLM_ANY_VERSION", "value": "1"}]},
    ],
)
def test_template_that_adds_to_typed_fields_is_taken(container):
    assert engine(vllm(template=template(**container)))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"transfer": {"connector": "Native"}}, "transfer.connector must be Pdpool unless"),
        ({"parallelism": {"data": 2}}, "parallelism.data must be 1 unless"),
        ({"parallelism": {"pipeline": 2}}, "parallelism.pipeline must be 1 for"),
        ({"model": {"path": "tiny"}}, "the random model tiny exists only in"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(spec, message):
    with pytest.raises(SpecInvalid, match=message):
        vllm(**spec)


def test_block_size_is_shared_by_both_pools():
    pool = vllm(template=template(args=["--block-size", "64", "--kv-cache-dtype=auto", "--enforce-eager"]))
    assert engine_of(pool.spec.engine.type).shared_flags(pool) == {"--block-size": "64"}
