"""The operator's half that queries and commands engines, against a real engine of two ranks."""

import os
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from pdpool_operator.api.names import ADMIN_PORT, ENGINE_HTTP_PORT, Role
from pdpool_operator.controller import engines
from pdpool_operator.controller.engines import Engines
from pdpool_operator.observe.http import session
from pdpool_operator.observe.pod_reader import PodReader
from pdpool_operator.observe.samples import RankSample
from pdpool_operator.observe.targets import Target
from pdpool_operator.plan.model import ContainerEnded, Fence, NodeOff, Purge
from pdpool_operator.runtime.keys import Keys
from pdpool_reference.demo.launch import Children

from tests.cluster.stack_fault import FAULT, HANGS

IP = "127.97.0.1"
HANGS_S = 5.0
"""An answer that has not come by then counts as one that never comes."""
KEYS = Keys({1: b"0123456789abcdef0123456789abcdef"})


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A decode engine of two ranks, at the ports of a pod. Its reports hang while the file exists."""
    fault = tmp_path_factory.mktemp("fault")
    (fault / "sitecustomize.py").write_text(FAULT.replace(HANGS, str(fault / "hanging")))
    key: Path = tmp_path_factory.mktemp("keys") / "operator.pem"
    key.write_text(KEYS.public(1))
    extra = ["--host", IP, "--advertise-host", IP, "--port", str(ENGINE_HTTP_PORT), "--admin-port", str(ADMIN_PORT)]
    extra += ["--tp-size", "2", "--kv-pages", "64", "--pod-uid", "pod-1", "--operator-key", str(key)]
    with Children() as children, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(fault), prepend=os.pathsep)
        children.engine("decode", model_path="tiny", extra=extra)
        yield fault / "hanging"


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with session(8) as client:
        yield client


async def look(http: aiohttp.ClientSession, timeout_s: float = 60.0) -> list[RankSample]:
    reader = PodReader(http, now=lambda: datetime.now(UTC), timeout_s=timeout_s)
    return await reader.sample(Target("llm", "chat", Role.DECODE, 0, "pod-1", IP))


@pytest.mark.usefixtures("engine")
async def test_every_rank_answers_for_its_own_memory_and_the_scheduler_for_all(http: aiohttp.ClientSession) -> None:
    samples = await look(http)
    assert [sample.connector_error for sample in samples] == ["", ""]
    connectors = [sample.connector for sample in samples if sample.connector is not None]
    assert len({connector.incarnation for connector in connectors}) == 2
    assert {connector.pod_uid for connector in connectors} == {"pod-1"}
    assert [sample.engine_error for sample in samples] == ["", ""]
    assert [sample.engine is None for sample in samples] == [False, True]


@pytest.fixture
def hanging(engine: Path) -> Iterator[None]:
    """The engine's `/v1/loads` and `/metrics` accept requests and never answer."""
    engine.touch()
    yield
    engine.unlink()


@pytest.mark.usefixtures("hanging")
async def test_connector_answers_while_reports_of_its_engine_hang(http: aiohttp.ClientSession) -> None:
    samples = await look(http, timeout_s=HANGS_S)
    assert {(sample.engine, sample.engine_error) for sample in samples} == {(None, "timeout")}
    assert [sample.connector_error for sample in samples] == ["", ""]


@pytest.mark.usefixtures("engine")
async def test_engine_is_read_without_its_connectors_endpoint(http: aiohttp.ClientSession) -> None:
    reader = PodReader(http, now=lambda: datetime.now(UTC), timeout_s=60.0)
    stock = Target("llm", "service/x", Role.DECODE, 0, "pod-1", IP, has_connector=False, asks_metrics=True)
    (sample,) = await reader.sample(stock)
    assert (sample.engine_error, sample.metrics_error) == ("", "")
    assert sample.queues is not None
    assert {name: queue.reqs for name, queue in sample.queues.items()}["decode_prealloc"] == 0


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("proof", [ContainerEnded("pod-2", "containerd://c1"), NodeOff("gpu-17", "PoolOperation x")])
async def test_each_rank_takes_the_signed_word_on_a_lost_peer(
    http: aiohttp.ClientSession, rank: int, proof: ContainerEnded | NodeOff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "TIMEOUT_S", 60.0)
    fence = Fence(
        pod="chat-decode-0-0",
        pod_uid="pod-1",
        ip=IP,
        rank=rank,
        incarnation="d" * 32,
        peer="chat-prefill-0-0",
        proof=proof,
        key_epoch=1,
    )
    told = await Engines(http, KEYS, "operator x").fence(fence)
    assert (told.outcome, told.words) == ("given", "")
    forged = await Engines(http, Keys({1: b"another seed of thirty-two bytes."}), "operator y").fence(fence)
    assert forged.outcome == "refused"


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("rank", [0, 1])
async def test_each_rank_takes_a_signed_purge(
    http: aiohttp.ClientSession, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "TIMEOUT_S", 60.0)
    purge = Purge("pod-1", IP, rank, older_than_s=0, reason="leaked", key_epoch=1)
    purged = await Engines(http, KEYS, "operator x").purge(purge)
    assert (purged.outcome, purged.count) == ("given", 0)
    forged = await Engines(http, Keys({1: b"another seed of thirty-two bytes."}), "operator y").purge(purge)
    assert forged.outcome == "refused"
