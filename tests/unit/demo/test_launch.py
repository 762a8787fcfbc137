"""Free ports for child processes, and what an ended deployment leaves behind."""

import socket

import pytest
from pdpool_reference.demo import launch
from pdpool_reference.demo.launch import HOST, PORTS, Children, LaunchError, free_port


def test_free_port_is_outside_ephemeral_range():
    port = free_port()
    assert port in PORTS
    with socket.create_server((HOST, port)):
        pass


def test_listening_port_is_not_free(monkeypatch):
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


def test_failure_keeps_and_names_flight_records(temporary):
    with pytest.raises(LaunchError) as failure, Children() as children:
        fail(children)
    assert failure.value.__notes__[0].endswith(str(children.flights))
    assert len(list(children.flights.iterdir())) == 1


def test_success_leaves_no_logs(temporary):
    with pytest.raises(LaunchError) as failure, Children() as children:
        raise LaunchError("decode ended")
    assert not hasattr(failure.value, "__notes__")
    assert children.logs.exists()
    with Children() as children:
        children.flights.mkdir()
    assert not children.logs.exists()
