"""From vLLM's configuration to the connector's."""

import dataclasses

import pytest
from pdpool_connector import shard_model
from pdpool_vllm.settings import Engine, registry_of

BASE = Engine(kv_role="kv_producer", version="0.32.0", host="10.0.0.7", tp_size=2, total_heads=4)


def engine(**changes):
    return dataclasses.replace(BASE, **changes)


def test_each_worker_has_its_ports():
    variables = {"PDPOOL_ADMIN_PORT": "9400", "PDPOOL_CONTROL_PORT": "9300"}
    config = engine().config(1, shard_model((2,), 4, tp=2), variables)
    assert (config.admin_port, config.control_port, config.pod_rank, config.pod_ranks) == (9401, 9301, 1, 2)


def test_workers_register_at_the_first():
    ranks = [engine().config(rank, shard_model((2,), 4, tp=2), {}) for rank in (0, 1)]
    assert [one.registry for one in ranks] == [None, "10.0.0.7:8998"]
    assert registry_of(ranks[0]) == "10.0.0.7:8998"


@pytest.mark.parametrize(("variables", "port"), [({}, 8998), ({"PDPOOL_BOOTSTRAP_PORT": "7000"}, 7000)])
def test_prefill_has_a_registry(variables, port):
    config = engine().config(0, (), variables)
    assert (config.bootstrap_port, config.facts) == (port, {"engine": "vllm", "engine_version": "0.32.0"})


def test_address_of_ipv6_has_brackets():
    assert registry_of(engine(host="fd00::7").config(0, (), {})) == "[fd00::7]:8998"


def test_decode_has_no_registry():
    config = engine(kv_role="kv_consumer").config(1, shard_model((2,), 4, tp=2), {})
    assert (config.bootstrap_port, config.registry, config.engine) == (0, None, "vllm 0.32.0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_role": "kv_both"}, "kv_role 'kv_both' cannot be used: set kv_producer for prefill"),
        ({"refusals": {"--nnodes 2": "set it to 1"}}, "PdpoolConnector: --nnodes 2 cannot be used: set it to 1"),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        engine(**changes).refuse()


def test_the_rest_is_accepted():
    engine().refuse()
