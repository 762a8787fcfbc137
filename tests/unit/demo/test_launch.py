"""Ports for processes that are told where to listen."""

import socket

import pytest
from pdpool_connector.demo import launch
from pdpool_connector.demo.launch import HOST, PORTS, LaunchError, free_port


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
