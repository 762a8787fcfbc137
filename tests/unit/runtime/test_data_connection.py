"""A connection of the data plane that has broken: made anew, and not tried again and again in vain."""

import logging

import pytest
from pdpool_connector.backends.base import BackendError, PeerUnreachableError
from pdpool_connector.layout.memory import RemoteMemory
from pdpool_connector.runtime.data_connection import RETRY_S, DataConnection

from tests.clock import Clock
from tests.unit.runtime.scripted import MEMORY, ScriptedBackend

PEER = "d" * 32


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(clock) -> DataConnection:
    remote = RemoteMemory(backend="scripted", memory=MEMORY, descriptor=b"")
    return DataConnection(ScriptedBackend(), PEER, remote, clock)


def test_one_that_has_broken_is_given_up_and_made_anew(path) -> None:
    assert path.connect() is None
    path.connect_anew("reset by peer")
    assert path._backend.disconnected.is_set()
    assert (path._backend.connects, path.failure, path.worth_a_try()) == (2, "", True)


def test_a_try_in_vain_tells_why_and_is_followed_by_none_for_a_while(path, clock) -> None:
    assert path.connect() is None
    path._backend.connect_error = PeerUnreachableError("nobody answers")
    path.connect_anew("reset by peer")
    assert path.failure == "nobody answers"
    clock.now += RETRY_S - 0.01
    assert not path.worth_a_try()
    clock.now += 0.01
    assert path.worth_a_try()
    path._backend.connect_error = None
    path.connect_anew("not connected")
    assert path.failure == ""


def test_the_log_tells_of_each_change_once(path, caplog) -> None:
    caplog.set_level(logging.INFO)
    path._backend.connect_error = BackendError("nobody answers")
    path.connect_anew("reset by peer")
    path.connect_anew("not connected")
    path._backend.connect_error = None
    path.connect_anew("not connected")
    said = [record.getMessage() for record in caplog.records]
    assert ["broken" in line for line in said] == [True, False, False]
    assert "nobody answers" in said[1]
    assert "is back" in said[2]


def test_a_fault_of_the_engine_is_a_failure_and_raises_nothing(path) -> None:
    path._backend.connect_error = RuntimeError("a bug")
    path.connect_anew("reset by peer")
    assert path.failure == "RuntimeError: a bug"
