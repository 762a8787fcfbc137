"""Engines of several ranks: processes that share out layers and heads compute what one rank computes, bit for bit."""

import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from pdpool_connector import ConnectorConfig
from pdpool_reference import weights
from pdpool_reference.kv import PagedKV
from pdpool_reference.model import Model, Step
from pdpool_reference.rank_orders import Compute, Connect, RankSpec
from pdpool_reference.ranks import RankLostError, Ranks
from pdpool_reference.shard import shards_of

PAGES = 8


@contextmanager
def engine_of(
    tensor: int,
    pipeline: int,
    lost: Callable[[RankLostError], None] = lambda _error: None,
    mode: str = "unified",
    model_path: str = "tiny",
) -> Iterator[Ranks]:
    config, loaded = weights.open_model(model_path)
    shards = shards_of(config, tensor, pipeline)
    model = Model(config, loaded, PagedKV(config, PAGES, shard=shards[0]))
    specs = [
        RankSpec(rank, rank // tensor, shard, mode, model_path, PAGES) for rank, shard in enumerate(shards) if rank
    ]
    ranks = Ranks(model, specs, lambda: False, lost)
    try:
        ranks.wait_up()
        yield ranks
    finally:
        ranks.stop()


def prompt_and_two_tokens(forward) -> list[bytes]:
    """Logits of two prompts in one batch, one of them in two chunks, then of a token of each."""
    pages = [np.array([5, 2, 7], np.int32), np.array([1, 0, 3], np.int32)]
    tokens = [np.arange(37, dtype=np.int32), np.arange(100, 121, dtype=np.int32)]
    first = forward([Step(tokens[0][:32], 0, pages[0]), Step(tokens[1], 0, pages[1])])
    second = forward([Step(tokens[0][32:], 32, pages[0]), Step(np.array([7], np.int32), 21, pages[1])])
    third = forward([Step(np.array([9], np.int32), 37, pages[0]), Step(np.array([8], np.int32), 22, pages[1])])
    return [rows.tobytes() for rows in (first, second, third)]


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    config, loaded = weights.tiny()
    return prompt_and_two_tokens(Model(config, loaded, PagedKV(config, PAGES)).forward)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_logits_of_many_ranks_equal_one_rank(tensor: int, pipeline: int, expected: list[bytes]) -> None:
    with engine_of(tensor, pipeline) as ranks:
        assert prompt_and_two_tokens(ranks.forward) == expected


def test_killed_rank_ends_the_step_by_name() -> None:
    with engine_of(2, 1) as ranks:
        ranks._ranks[0].process.kill()
        ranks._ranks[0].process.join(10)
        with pytest.raises(RankLostError, match="rank 1 has ended"):
            prompt_and_two_tokens(ranks.forward)


def test_killed_rank_of_idle_engine_is_reported() -> None:
    lost: queue.SimpleQueue[RankLostError] = queue.SimpleQueue()
    with engine_of(2, 1, lost.put) as ranks:
        ranks._ranks[0].process.kill()
        assert str(lost.get(timeout=20)) == "rank 1 has ended"


def test_rank_in_mid_batch_stops_in_order() -> None:
    with engine_of(2, 1) as ranks:
        ranks.order_all(Compute((Step(np.arange(5, dtype=np.int32), 0, np.array([0], np.int32)),)))
    assert ranks._ranks[0].process.exitcode == 0


def test_rank_with_taken_port_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, engine_of(2, 1, mode="decode") as ranks:
        instance = shards_of(weights.tiny()[0], 2, 1)
        port = taken.getsockname()[1]
        config = ConnectorConfig("127.0.0.1", control_port=port, rank=1, instance=instance, backend="local")
        with pytest.raises(RankLostError, match="rank 1 ended with code 1 before it was up"):
            ranks.connect({1: Connect(config)})
    assert "Address already in use" in capfd.readouterr().err
