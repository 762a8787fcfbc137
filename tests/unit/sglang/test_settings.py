"""From SGLang's arguments to the connector's configuration."""

import dataclasses

import pytest
from pdpool_connector import shard_model
from pdpool_sglang.memory import Placement
from pdpool_sglang.settings import Engine, data_parallel_rank, registry_of

BASE = Engine(
    role="prefill",
    version="0.5.23",
    host="10.0.0.7",
    leader_host="10.0.0.5",
    http_port=30000,
    bootstrap_port=8998,
    place=Placement(),
)


def engine(**changes):
    return dataclasses.replace(BASE, **changes)


class TestConfig:
    def test_environment_is_read(self):
        config = engine().config((), {"PDPOOL_ADMIN_PORT": "9400", "PDPOOL_POD_IP": "10.0.0.9"})
        assert (config.admin_port, config.advertise_host, config.backend) == (9400, "10.0.0.9", "nixl")

    def test_sglang_address_is_the_default(self):
        assert engine().config((), {}).advertise_host == "10.0.0.7"

    def test_named_backend_wins(self):
        assert engine().config((), {"PDPOOL_TRANSFER_BACKEND": "mooncake"}).backend == "mooncake"

    def test_ports_follow_the_pod_rank(self):
        place = Placement(tp_rank=1, tp_size=2)
        variables = {"PDPOOL_CONTROL_PORT": "9300", "PDPOOL_ADMIN_PORT": "9400", "PDPOOL_ADMIN_SOCKET": "/run/a.sock"}
        config = engine(place=place, world_rank=1, world_size=2).config(shard_model([2], 4, tp=2), variables)
        assert (config.control_port, config.admin_port) == (9301, 9401)
        assert str(config.admin_socket) == "/run/a.sock.1"
        assert (config.pod_rank, config.pod_ranks) == (1, 2)

    def test_other_ranks_register_at_the_leader(self):
        place = Placement(tp_rank=1, tp_size=2)
        config = engine(place=place).config(shard_model([2], 4, tp=2), {})
        assert (config.rank, config.registry) == (1, "10.0.0.5:8998")

    def test_data_parallel_rank_has_own_registry(self):
        config = engine(dp_rank=1, dp_size=2, replicas=2).config((), {})
        assert (config.bootstrap_port, config.registry) == (8999, None)
        assert (config.pod_rank, config.pod_ranks) == (1, 2)

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_state_names_the_engine(self, role):
        assert engine(role=role).config((), {}).engine == "sglang 0.5.23"

    def test_facts_name_the_engine(self):
        assert engine(dp_size=2).config((), {}).facts == {
            "engine": "sglang",
            "engine_version": "0.5.23",
            "dp_size": "2",
            "http_port": "30000",
        }

    def test_decode_has_no_registry(self):
        config = engine(role="decode").config((), {})
        assert (config.bootstrap_port, config.registry, dict(config.facts)) == (0, None, {})


class TestPodRank:
    def test_attention_ranks_count_by_world_rank(self):
        assert [engine(world_rank=rank, world_size=4, dp_rank=rank // 2).pod_rank for rank in range(4)] == [0, 1, 2, 3]

    def test_nodes_count_their_own_ranks(self):
        ranks = [engine(world_rank=rank, world_size=4, nodes=2) for rank in range(4)]
        assert [one.pod_rank for one in ranks] == [0, 1, 0, 1]
        assert {one.pod_ranks for one in ranks} == {2}


class TestAddresses:
    def test_registry_of_a_rank(self):
        assert registry_of("10.0.0.5:8998", 2) == "10.0.0.5:9000"
        assert registry_of("[fd00::1]:8998", 0) == "[fd00::1]:8998"

    @pytest.mark.parametrize("text", ["", "host", "host:", ":8998", "host:x"])
    def test_other_text_is_refused(self, text):
        with pytest.raises(ValueError, match="host:port"):
            registry_of(text, 0)


@pytest.mark.parametrize(
    ("replica", "replicas", "attention", "rank"),
    [(None, 1, 0, 0), (None, 1, 3, 3), (2, 4, 0, 2), (0, 4, 0, 0), (5, 1, 0, 0), (5, 1, 3, 3)],
)
def test_sglang_dp_rank_of_a_server_with_one_replica_moves_no_registry(replica, replicas, attention, rank):
    assert data_parallel_rank(replica, replicas, attention) == rank


class TestRefusals:
    def test_setting_and_remedy_are_named(self):
        with pytest.raises(ValueError, match="--x cannot be used: do y"):
            engine(refusals={"--x": "do y"}).refuse()

    def test_without_any_nothing_is_raised(self):
        engine().refuse()
