"""Ports for processes that are told where to listen, and what is left of a deployment that has ended."""

import socket

import pytest
from pdpool_reference.demo import launch
from pdpool_reference.demo.launch import HOST, PORTS, Children, LaunchError, free_port


def test_a_free_port_is_none_that_somebody_may_be_given_before_it_is_used():
    port = free_port()
    assert port in PORTS
    with socket.create_server((HOST, port)):
        pass


def test_a_port_at_which_somebody_listens_is_not_taken_for_free(monkeypatch):
    with socket.create_server((HOST, free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(launch, "PORTS", range(port, port + 1))
        monkeypatch.setattr(launch, "TRIED_PORTS", 1)
        with pytest.raises(LaunchError, match="none of 1 ports"):
            free_port()


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def fail(children):
    children.flights.mkdir()
    (children.flights / "prefill-3f9c01d2-1-room7.flight.jsonl").touch()
    raise LaunchError("decode ended")


def test_a_failure_says_where_records_of_failed_hand_offs_are_and_leaves_them(temporary):
    with pytest.raises(LaunchError) as failure, Children() as children:
        fail(children)
    assert failure.value.__notes__[0].endswith(str(children.flights))
    assert len(list(children.flights.iterdir())) == 1


def test_a_failure_without_records_speaks_of_none_and_success_leaves_nothing(temporary):
    with pytest.raises(LaunchError) as failure, Children() as children:
        raise LaunchError("decode ended")
    assert not hasattr(failure.value, "__notes__")
    assert children.logs.exists()
    with Children() as children:
        children.flights.mkdir()
    assert not children.logs.exists()
