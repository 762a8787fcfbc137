"""The Mooncake backend's own decisions, shown on two real backends in this process."""

import os
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from pdpool_connector.backends import mooncake, mooncake_session
from pdpool_connector.backends.base import BackendError, BackendUnavailableError, Chunk, PeerUnreachableError, Poll
from pdpool_connector.backends.mooncake import MooncakeBackend
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.memory import KVMemory, RemoteMemory
from pdpool_connector.layout.regions import Block
from pdpool_connector.protocol.timeouts import Timeouts

PAGES = 2048
PAGE_BYTES = 64


@contextmanager
def opened(name):
    """A backend with two regions of small pages, its memory and its array of bytes."""
    region = PAGES * PAGE_BYTES
    with HostArena(3 * region) as arena:
        memory = KVMemory(
            kv=(arena.region(0, PAGE_BYTES, PAGES), arena.region(region, PAGE_BYTES, PAGES)),
            aux=(arena.region(2 * region, 64, 4),),
            page_tokens=1,
            layers=1,
            kv_heads=1,
            head_dim=16,
            dtype="float32",
            model="m",
        )
        backend = MooncakeBackend(name, host="127.0.0.1")
        remote = RemoteMemory(backend="mooncake", memory=memory, descriptor=backend.register(memory))
        try:
            yield backend, remote, arena.array(0, 3 * region, np.uint8)
        finally:
            backend.close()


@pytest.fixture
def pair():
    with opened("us") as (backend, _, source), opened("them") as (_, remote, sink):
        source[:] = 1
        backend.connect("them", remote)
        yield backend, sink, remote


def every_other(first, count):
    """A chunk of `2 * count` ranges: no page has a neighbour."""
    pages = np.arange(first, first + 2 * count, 2, dtype=np.int32)
    return Chunk(pages, pages)


def finish(backend, handle):
    deadline = time.monotonic() + 20
    while (outcome := backend.poll(handle)) is Poll.PENDING:
        assert time.monotonic() < deadline
    return outcome


class Watched:
    """The session, with a count of the ranges that Mooncake has been given and has not ended."""

    def __init__(self, session):
        self._session = session
        self.sizes = {}
        self.most = 0

    def start(self, peer, local, remote, nbytes, *, read=False):
        identity = self._session.start(peer, local, remote, nbytes, read=read)
        self.sizes[identity] = len(nbytes)
        self.most = max(self.most, sum(self.sizes.values()))
        return identity

    def over(self, single):
        over = self._session.over(single)
        if over is not None:
            del self.sizes[single]
        return over

    def finish(self, batch):
        del self.sizes[batch]
        return self._session.finish(batch)

    def __getattr__(self, name):
        return getattr(self._session, name)


class Patient(Watched):
    """Asks until the answer is an end: for transfers that have had their time."""

    def over(self, single):
        deadline = time.monotonic() + 20
        while (over := super().over(single)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return over


def test_no_more_ranges_are_under_way_than_mooncake_takes_and_all_land(pair):
    backend, sink, _ = pair
    watched = backend._session = Watched(backend._session)
    handles = [backend.submit("them", every_other(first, 500)) for first in (0, 1, 1024, 1025)]
    assert [finish(backend, handle) for handle in handles] == [Poll.DONE] * 4
    assert watched.most == 1000
    assert watched.sizes == {}
    assert sink.sum() == 4 * 2 * 500 * PAGE_BYTES


def test_the_last_submitted_can_be_waited_for_alone(pair):
    backend, _, _ = pair
    handles = [backend.submit("them", every_other(first, 500)) for first in (0, 1, 1024)]
    assert finish(backend, handles[-1]) is Poll.DONE
    assert [backend.poll(handle) for handle in handles] == [Poll.DONE] * 3


def test_what_had_not_begun_at_a_disconnect_is_settled_and_the_rest_is_not(pair):
    backend, sink, _ = pair
    begun, waiting = (backend.submit("them", every_other(first, 500)) for first in (0, 1))
    backend.disconnect("them")
    assert (backend.poll(begun), backend.poll(waiting)) == (Poll.FAILED_UNSETTLED, Poll.FAILED_SETTLED)
    assert waiting.failure == "not begun: disconnected while in flight"
    pages = sink[: 1000 * PAGE_BYTES].reshape(1000, PAGE_BYTES)
    deadline = time.monotonic() + 20
    while not pages[::2].all():  # unsettled means just this: the bytes still land
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not pages[1::2].any()


def test_what_mooncake_keeps_for_a_transfer_given_up_is_freed_by_a_later_connect(pair):
    backend, _, remote = pair
    begun = time.monotonic()
    backend.submit("them", every_other(0, 500))
    backend.disconnect("them")
    backend.connect("them", remote)
    (abandoned,) = backend._abandoned
    assert abandoned.ripe_at > begun + 30, "before that, asking for it would spin"
    watched = backend._session = Patient(backend._session)
    watched.sizes = dict.fromkeys([abandoned.batch, *abandoned.marks], 1)
    abandoned.ripe_at = 0.0
    backend.disconnect("them")
    backend.connect("them", remote)
    assert backend._abandoned == []
    assert watched.sizes == {}


def test_another_process_at_the_peers_address_is_found_out_before_anything_is_written_to_it(pair):
    backend, sink, remote = pair
    sink[:] = np.arange(len(sink)) // 64
    before = sink.copy()
    told = msgspec.msgpack.decode(remote.descriptor)
    told["scratch"] = remote.memory.kv[0].address
    former = msgspec.structs.replace(remote, descriptor=msgspec.msgpack.encode(told))
    with pytest.raises(PeerUnreachableError, match="another process than peer the former one answers at"):
        backend.connect("the former one", former)
    assert np.array_equal(sink, before)


class Begins:
    """A session that begins `begun` transfers (0: refuses each), and never reports an end."""

    def __init__(self, session, begun):
        self._session, self._begun = session, begun

    def start(self, *_, **__):
        return self._begun

    def over(self, _):
        return None

    def __getattr__(self, name):
        return getattr(self._session, name)


@pytest.mark.parametrize(("begun", "kept"), [(0, 0), (1, 1)])
def test_a_warm_up_that_fails_keeps_its_page_only_where_bytes_may_still_land_there(pair, monkeypatch, begun, kept):
    backend, _, remote = pair
    backend.disconnect("them")
    session, backend._session = backend._session, Begins(backend._session, begun)
    monkeypatch.setattr(mooncake, "answers", lambda *_: True)  # however long it takes
    backend._timeouts = Timeouts(backend_connect_s=0.1 if begun else 10.0)
    with pytest.raises(PeerUnreachableError):
        backend.connect("them", remote)
    backend._session = session
    assert len(backend._landings) == kept


def test_the_environment_is_completed_never_overruled(monkeypatch):
    for name in [*mooncake_session._ENVIRONMENT, "MC_USE_IPV6"]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    mooncake_session._prepare("10.0.0.1")
    assert os.environ["MC_LOG_LEVEL"] == "INFO"
    assert os.environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] == "65535"
    assert "MC_USE_IPV6" not in os.environ
    mooncake_session._prepare("fd00::1")
    assert os.environ["MC_USE_IPV6"] == "1"


def test_a_timeout_that_is_no_number_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "long")
    with pytest.raises(BackendUnavailableError, match="MC_TRANSFER_TIMEOUT is 'long'"):
        MooncakeBackend("me", host="127.0.0.1")


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(
        BackendUnavailableError,
        match=r"from PyPI with `pip install mooncake-.*-non-cuda==0\.3\.13\.post1` .* libibverbs1",
    ):
        MooncakeBackend("me", host="127.0.0.1")


@pytest.mark.parametrize("without_cuda", [False, True])
def test_memory_of_a_gpu_is_registered_by_its_number_or_refused(pair, monkeypatch, without_cuda):
    backend, _, _ = pair
    registered = []
    native = SimpleNamespace(batch_register_memory=lambda *given: registered.append(given) or 0)
    monkeypatch.setattr(mooncake_session, "_installed", lambda _: without_cuda)
    session = backend._session
    monkeypatch.setattr(session, "_native", native)
    blocks = [Block(0x1000, 64, 1), Block(0x2000, 32, None), Block(0x3000, 16, 1)]
    if without_cuda:
        with pytest.raises(BackendError, match="memory lies on device 1 and mooncake-transfer-engine-non-cuda is inst"):
            session.register(blocks)
        return
    session.register(blocks)
    assert registered == [([0x1000, 0x3000], [64, 16], "cuda:1"), ([0x2000], [32], "*")]


@pytest.mark.parametrize(
    ("topology", "forced", "transport"),
    [
        ('{"cpu:0": [[], []]}', None, "tcp"),
        ('{"cpu:0": [["mlx5_0"], []]}', None, "rdma"),
        ('{"cpu:0": [["mlx5_0"], []]}', "1", "tcp"),
        ("", None, ""),
    ],
)
def test_the_transport_follows_from_mooncakes_topology(monkeypatch, topology, forced, transport):
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    if forced:
        monkeypatch.setenv("MC_FORCE_TCP", forced)
    assert mooncake_session._transport(SimpleNamespace(get_local_topology=lambda: topology)) == transport


class Refusing:
    """The session; starts nothing, and notes whom it was asked to reach."""

    def __init__(self, session):
        self._session = session
        self.reached = []

    def start(self, peer, *_, **__):
        self.reached.append(peer)
        return 0

    def __getattr__(self, name):
        return getattr(self._session, name)


def test_a_process_at_an_address_that_another_had_is_reached_by_a_name_of_its_own(pair, monkeypatch):
    monkeypatch.setattr(mooncake, "answers", lambda *_: True)
    with opened("backend") as (backend, _, _):
        backend._session = session = Refusing(backend._session)
        _, _, remote = pair
        for peer in ("first", "second", "second", "third"):
            with pytest.raises(PeerUnreachableError):
                backend.connect(peer, remote)
    host, _, port = msgspec.msgpack.decode(remote.descriptor)["session"].rpartition(":")
    assert session.reached == [f"{host}:{zeros}{port}" for zeros in ("", "0", "0", "00")]


def test_a_name_of_its_own_leads_to_the_same_process(pair):
    with opened("backend") as (backend, _, source):
        _, sink, remote = pair
        session = msgspec.msgpack.decode(remote.descriptor)["session"]
        backend._named[session] = ("before", 1)
        backend.connect("them", remote)
        assert backend._peers["them"].session != session
        source[:] = 7
        assert finish(backend, backend.submit("them", every_other(0, 8))) is Poll.DONE
        assert sink[0] == 7
