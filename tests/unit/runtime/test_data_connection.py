"""A data connection that has broken: made again, with a pause after a failed try."""

import logging

import pytest
from pdpool_connector.backends.base import BackendError, PeerUnreachableError
from pdpool_connector.layout.memory import RemoteMemory
from pdpool_connector.runtime.data_connection import DataConnection

from tests.clock import Clock
from tests.unit.runtime.scripted import MEMORY, ScriptedBackend

PEER = "d" * 32
RETRY_S = 2.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def path(backend, clock) -> DataConnection:
    remote = RemoteMemory(backend="scripted", memory=MEMORY, descriptor=b"")
    return DataConnection(backend, PEER, remote, RETRY_S, clock)


def test_broken_connection_is_made_again(path, backend) -> None:
    assert path.connect() is None
    path.connect_again("reset by peer")
    assert backend.disconnected.is_set()
    assert (backend.connects, path.failure, path.worth_a_try()) == (2, "", True)


def test_failed_try_is_followed_by_a_pause(path, backend, clock) -> None:
    assert path.connect() is None
    backend.connect_error = PeerUnreachableError("nobody answers")
    path.connect_again("reset by peer")
    assert path.failure == "nobody answers"
    clock.now += RETRY_S - 0.01
    assert not path.worth_a_try()
    clock.now += 0.01
    assert path.worth_a_try()
    backend.connect_error = None
    path.connect_again("not connected")
    assert path.failure == ""


def test_each_change_is_logged_once(path, backend, caplog) -> None:
    caplog.set_level(logging.INFO)
    backend.connect_error = BackendError("nobody answers")
    path.connect_again("reset by peer")
    path.connect_again("not connected")
    backend.connect_error = None
    path.connect_again("not connected")
    said = [record.getMessage() for record in caplog.records]
    assert ["broken" in line for line in said] == [True, False, False]
    assert "nobody answers" in said[1]
    assert "is back" in said[2]


def test_fault_of_the_backend_is_a_failure(path, backend) -> None:
    backend.connect_error = RuntimeError("a bug")
    path.connect_again("reset by peer")
    assert path.failure == "RuntimeError: a bug"
