"""Pods of `engine.type: SGLang`: whole objects against committed YAML, and each rule of its own."""

import itertools
import shlex

import pytest
from pdpool_connector.runtime.environment import VARIABLES
from pdpool_operator.api.base import SpecInvalid
from pdpool_operator.api.key_epochs import KeyEpochs
from pdpool_operator.api.names import ADMIN_SOCKET, Role
from pdpool_operator.build.engine import engine_template
from pdpool_operator.build.pool import headless_service, instance_stateful_set, pool_objects
from pdpool_operator.build.settings import BuildSettings
from pdpool_operator.build.template import TemplateInvalid
from pdpool_operator.engines.base import PROXIES_NOTICE_S

from tests.unit.operator.plan.makers import SETTINGS, make_pool

IMAGE = "registry.example/sglang-pdpool:0.5.23"


def template(**container):
    return {"spec": {"containers": [{"name": "engine", "image": IMAGE, **container}]}}


def sglang(role=Role.PREFILL, **spec):
    base = {"engine": {"type": "SGLang"}, "model": {"path": "Qwen/Qwen3-32B"}, "template": template()}
    return make_pool(role, "chat", **{**base, **spec})


def engine(pool, settings=SETTINGS):
    return engine_template(pool, 0, settings)["spec"]["containers"][0]


def environment(container):
    return {entry["name"]: entry.get("value") for entry in container["env"]}


def ports(pool):
    return {port["name"]: port["containerPort"] for port in engine(pool)["ports"]}


POOLS = {
    "sglang_prefill": sglang(template=template(resources={"limits": {"nvidia.com/gpu": 1}})),
    "sglang_decode": sglang(Role.DECODE, drainTimeoutSeconds=600),
    "sglang_prefill_tp2": sglang(parallelism={"tensor": 2}, model={"path": "/models/qwen3", "servedName": "qwen3"}),
    "sglang_decode_tp2": sglang(Role.DECODE, parallelism={"tensor": 2}, transfer={"backend": "Mooncake"}),
    "sglang_prefill_dp2": sglang(parallelism={"data": 2}),
    "sglang_decode_dp2": sglang(Role.DECODE, parallelism={"data": 2}),
    "sglang_native": sglang(transfer={"connector": "Native"}),
}


@pytest.mark.parametrize("case", sorted(POOLS))
def test_pods_are_as_committed(case, same_as_golden):
    same_as_golden(case, [instance_stateful_set(POOLS[case], 0, SETTINGS)])


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_connector_reads_every_variable_that_is_set(role):
    known = {*VARIABLES, "PDPOOL_POD_IP", "PDPOOL_OPERATOR_KEY", "PDPOOL_ROLE", "PDPOOL_POOL", "PDPOOL_INSTANCE"}
    ours = {name for name in environment(engine(sglang(role))) if name.startswith("PDPOOL_")}
    assert ours <= known
    assert known - ours <= {"PDPOOL_ADVERTISE_HOST", "PDPOOL_CURVE_REQUIRED", "PDPOOL_BOOTSTRAP_PORT"}


@pytest.mark.parametrize(
    ("keys", "files"),
    [(KeyEpochs(1), ("curve-1.json", "operator-1.pem")), (KeyEpochs(3, 2), ("curve-3-2.json", "operator-3.pem"))],
)
def test_keys_become_variables(keys, files):
    found = environment(engine_template(sglang(Role.DECODE), 0, BuildSettings("", ""), keys)["spec"]["containers"][0])
    curve, operator = (f"/etc/pdpool/keys/{file}" for file in files)
    assert (found["PDPOOL_CURVE_KEYS"], found["PDPOOL_OPERATOR_KEY"]) == (curve, operator)
    assert "PDPOOL_CURVE_REQUIRED" not in found


@pytest.mark.parametrize(
    ("parallelism", "args", "ranks", "bootstraps"),
    [
        ({}, [], 1, 1),
        ({"tensor": 4}, [], 4, 1),
        ({"data": 4}, [], 4, 4),
        ({"tensor": 2, "data": 2}, [], 4, 2),
        ({"tensor": 8, "data": 8}, ["--enable-dp-attention"], 8, 8),
    ],
)
def test_every_rank_has_ports_of_its_own(parallelism, args, ranks, bootstraps):
    pool = sglang(parallelism=parallelism, template=template(args=args))
    found = ports(pool)
    assert [found.get(f"admin-{n}" if n else "admin") for n in range(ranks + 1)] == [*range(9400, 9400 + ranks), None]
    assert sum(name.startswith("control") for name in found) == ranks
    assert sum(name.startswith("bootstrap") for name in found) == bootstraps
    assert len(set(found.values())) == len(found)
    service = headless_service(pool, pool_objects(pool, SETTINGS)[0])
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == found


def test_most_ranks_have_no_port_twice():
    found = ports(sglang(parallelism={"data": 64}))
    assert len(found) == 1 + 3 * 64 == len(set(found.values()))


def test_drain_goes_through_the_connectors_socket():
    container = engine(sglang(drainTimeoutSeconds=77))
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    drain = f"python3 -m pdpool_connector.agent drain --socket {ADMIN_SOCKET}"
    assert shlex.join(command) == f"{drain} --after {PROXIES_NOTICE_S} --deadline 77"
    assert environment(container)["PDPOOL_ADMIN_SOCKET"] == ADMIN_SOCKET


def test_drain_names_the_socket_of_every_rank():
    command = engine(sglang(parallelism={"tensor": 3}))["lifecycle"]["preStop"]["exec"]["command"]
    sockets = [after for word, after in itertools.pairwise(command) if word == "--socket"]
    assert sockets == [ADMIN_SOCKET, f"{ADMIN_SOCKET}.1", f"{ADMIN_SOCKET}.2"]


@pytest.mark.parametrize(
    ("role", "spec", "given"),
    [
        (Role.PREFILL, {"parallelism": {"data": 2}}, True),
        (Role.PREFILL, {}, False),
        (Role.DECODE, {"parallelism": {"data": 2}}, False),
        (Role.PREFILL, {"parallelism": {"data": 2}, "transfer": {"connector": "Native"}}, False),
    ],
)
def test_prefill_finds_data_parallel_ranks_by_room(role, spec, given):
    assert ("--load-balance-method=follow_bootstrap_room" in engine(sglang(role, **spec))["args"]) is given


@pytest.mark.parametrize("args", [["--load-balance-method=round_robin"], ["--load-balance-method", "round_robin"]])
def test_another_balance_of_data_parallel_prefill_is_refused(args):
    pool = sglang(parallelism={"data": 2}, template=template(args=args))
    with pytest.raises(TemplateInvalid, match="must be follow_bootstrap_room for prefill"):
        engine(pool)


def test_everything_that_is_written_lies_on_a_volume():
    pod = engine_template(sglang(), 0, SETTINGS)["spec"]
    container = pod["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert "emptyDir" in volumes[mounts[environment(container)["HOME"]]]
    assert "emptyDir" in volumes[mounts["/tmp"]]


def test_native_pod_has_nothing_of_pdpool():
    pod = engine_template(sglang(transfer={"connector": "Native", "backend": "Mooncake"}), 0, SETTINGS)
    container = pod["spec"]["containers"][0]
    identity = {"PDPOOL_ROLE", "PDPOOL_POOL", "PDPOOL_INSTANCE", "PDPOOL_POD_UID", "PDPOOL_POD_IP"}
    assert {name for name in environment(container) if name.startswith("PDPOOL_")} == identity
    assert "SGLANG_PLUGINS" not in environment(container)
    assert "--disaggregation-transfer-backend=mooncake" in container["args"]
    assert "preStop" not in container["lifecycle"]
    assert "pdpool-keys" not in {volume["name"] for volume in pod["spec"]["volumes"]}
    assert "pdpool.dev/key-epoch" not in pod["metadata"].get("annotations", {})


def test_native_pod_may_have_a_pre_stop_hook_of_its_own():
    hook = {"preStop": {"sleep": {"seconds": 5}}}
    native = sglang(transfer={"connector": "Native"}, template=template(lifecycle=hook))
    assert engine(native)["lifecycle"] == hook


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"args": ["--tp-size=4"]}, "args: '--tp-size=4': pdpool sets --tp-size"),
        ({"args": ["--tp", "4"]}, "args: '--tp': pdpool sets --tp"),
        ({"args": ["--data-par=2"]}, "args: '--data-par=2': this is short for --data-parallel-size"),
        ({"args": ["--disaggregation-mode", "null"]}, "pdpool sets --disaggregation-mode"),
        ({"args": ["--disaggregation-transfer-backend=nixl"]}, "pdpool sets --disaggregation-transfer-backend"),
        ({"args": ["--model", "/m"]}, "pdpool sets --model from"),
        ({"args": ["--config", "x.yaml"]}, "args: '--config': a file of flags could contradict"),
        ({"args": ["--nnodes=2"]}, "an instance is one pod"),
        ({"env": [{"name": "SGLANG_PLUGINS", "value": "other"}]}, "env[SGLANG_PLUGINS]: 'other': the list of plugins"),
        (
            {"env": [{"name": "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT", "value": "30"}]},
            "'30': must be 86400 with pdpool's connector",
        ),
        ({"env": [{"name": "PDPOOL_ADMIN_PORT", "value": "1"}]}, "names that begin with PDPOOL_"),
        ({"ports": [{"name": "control", "containerPort": 8999}]}, "ports[control]: 8999: this port is 9100"),
        ({"lifecycle": {"preStop": {"exec": {}}}}, "pdpool drains the engine there"),
        (
            {"resources": {"limits": {"nvidia.com/gpu": "1"}}},
            "resources.limits[nvidia.com/gpu]: '1': spec.parallelism makes 2 ranks",
        ),
        ({"image": None}, "image: None: name the image here, in the container named engine"),
    ],
)
def test_template_that_contradicts_a_typed_field_is_refused(container, message):
    with pytest.raises(TemplateInvalid) as refused:
        engine(sglang(parallelism={"tensor": 2}, template=template(**container)))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "container",
    [
        {"args": ["--page-size=64", "--mem-fraction-static=0.85", "--disaggregation-ib-device=mlx5_0"]},
        {"args": ["--tokenizer-worker-num", "4", "--load-balance-method=round_robin"]},
        {"env": [{"name": "PDPOOL_SGLANG_ANY_VERSION", "value": "1"}]},
        {"env": [{"name": "SGLANG_PLUGINS", "value": "another,pdpool"}, {"name": "HF_HOME", "value": "/cache"}]},
        {"resources": {"limits": {"nvidia.com/gpu": 2}}},
        {"resources": {"limits": {"nvidia.com/gpu": 8}}},
    ],
)
def test_template_that_adds_to_typed_fields_is_taken(container):
    assert engine(sglang(parallelism={"tensor": 2}, template=template(**container)))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"engine": {"type": "Reference"}, "model": {"path": "org/model"}}, "model.path must be an absolute path"),
        ({"engine": {"type": "SGLang"}, "model": {"path": "tiny"}}, "the random model tiny exists only in"),
        ({"transfer": {"connector": "Native"}}, "transfer.connector must be Pdpool unless"),
        (
            {"engine": {"type": "SGLang"}, "transfer": {"connector": "Native", "backend": "Local"}},
            "transfer.backend Local exists only with",
        ),
        ({"parallelism": {"data": 2}}, "parallelism.data must be 1 unless engine.type is SGLang"),
        (
            {"engine": {"type": "SGLang"}, "parallelism": {"pipeline": 2}},
            "parallelism.pipeline must be 1 for engine.type",
        ),
        (
            {"engine": {"type": "SGLang"}, "parallelism": {"tensor": 16, "data": 8}},
            "must be at most 64",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(spec, message):
    with pytest.raises(SpecInvalid) as refused:
        make_pool(**spec)
    assert message in str(refused.value)


def test_reference_engine_takes_parallelism_as_flags():
    args = engine(make_pool(parallelism={"tensor": 2, "pipeline": 3}))["args"]
    assert {"--tp-size=2", "--pp-size=3"} <= set(args)
