"""A registration that fails for RLIMIT_MEMLOCK says so."""

import resource
from types import SimpleNamespace

import numpy as np
import pytest
from pdpool_connector.backends import memlock, mooncake_session
from pdpool_connector.backends.base import BackendError
from pdpool_connector.backends.memlock import memlock_bytes, memlock_hint, memlock_problem
from pdpool_connector.layout.regions import Block

HOST = Block(1 << 20, 1 << 20, None)


@pytest.fixture
def low_limit(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))


def test_low_limit_names_the_remedy():
    assert "IPC_LOCK" in memlock_problem(65536, 1 << 20)
    assert memlock_problem(1 << 20, 1 << 20) == memlock_problem(None, 1 << 40) == ""


def test_no_limit_is_none(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memlock_bytes() is None


def test_hint_counts_host_memory_and_needs_an_rdma_device(low_limit, tmp_path):
    assert "RLIMIT_MEMLOCK is 65536 bytes and registering takes 1048576" in memlock_hint([HOST], tmp_path)
    assert memlock_hint([Block(0, 1 << 20, 0)], tmp_path) == ""
    assert memlock_hint([HOST], tmp_path / "absent") == ""


def test_mooncake_that_cannot_register_names_the_limit(low_limit, monkeypatch, tmp_path):
    monkeypatch.setattr(mooncake_session, "memlock_hint", lambda blocks: memlock.memlock_hint(blocks, tmp_path))
    session = object.__new__(mooncake_session.MooncakeSession)
    session._native = SimpleNamespace(batch_register_memory=lambda *_: 1)
    with pytest.raises(BackendError, match="reason is on stderr; RLIMIT_MEMLOCK is 65536 bytes"):
        session.register([HOST])


def test_nixl_that_cannot_register_names_the_limit(low_limit, monkeypatch, tmp_path):
    nixl = pytest.importorskip("pdpool_connector.backends.nixl")
    monkeypatch.setattr(nixl, "memlock_hint", lambda blocks: memlock.memlock_hint(blocks, tmp_path))

    def refuse(_):
        raise nixl.NixlError("NIXL_ERR_BACKEND")

    backend = object.__new__(nixl.NixlBackend)
    backend._closed, backend._registered = False, []
    backend._scratch = np.zeros(16, np.uint8)
    backend._agent = SimpleNamespace(register=refuse)
    monkeypatch.setattr(nixl, "refuse_absent", lambda _: None)
    with pytest.raises(BackendError, match="NIXL_ERR_BACKEND; RLIMIT_MEMLOCK is 65536 bytes"):
        backend.register(SimpleNamespace(blocks=(HOST,)))
