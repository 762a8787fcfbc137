"""Which transport a probe took, by what the kernel counted meanwhile."""

import socket
from contextlib import ExitStack

import pytest
from msgspec import structs
from pdpool_connector.backends import transport_probe
from pdpool_connector.backends.transport_probe import PROBE_BYTES, SLACK_BYTES, Traffic, traffic, transport_of
from pdpool_connector.layout.process import this_process

US = this_process()
ELSEWHERE = structs.replace(US, boot_id="another", addresses=("10.1.2.3",))


@pytest.fixture
def link():
    """Both ends of a TCP connection over loopback."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(server.getsockname()))
        yield client, stack.enter_context(server.accept()[0])


def send(link, count):
    client, server = link
    client.sendall(bytes(count))
    left = count
    while left:
        left -= len(server.recv(left))


def test_bytes_sent_over_tcp_to_the_peer_mean_tcp(link):
    before = traffic()
    send(link, PROBE_BYTES + 100)
    assert transport_of(before, traffic(), US, device=False) == "tcp"


def test_no_bytes_over_tcp_to_a_process_of_this_host_mean_cma(link):
    before = traffic()
    send(link, 100)
    after = traffic()
    assert transport_of(before, after, US, device=False) == "cma"
    assert transport_of(before, after._replace(rdma=True), US, device=False) == ""


def test_memory_of_a_device_within_one_host_has_no_known_transport_but_tcp(link):
    before = traffic()
    assert transport_of(before, traffic(), US, device=True) == ""
    send(link, PROBE_BYTES + 100)
    assert transport_of(before, traffic(), US, device=True) == "tcp"


def test_no_bytes_over_tcp_to_another_host_mean_rdma_where_a_device_is_open(link):
    before = traffic()
    after = traffic()
    assert transport_of(before, after._replace(rdma=True), ELSEWHERE, device=False) == "rdma"
    assert transport_of(before, after, ELSEWHERE, device=False) == ""


def test_other_traffic_leaves_the_transport_open(link):
    before = traffic()
    send(link, PROBE_BYTES + 100)
    assert transport_of(before, traffic(), ELSEWHERE, device=False) is None
    send(link, PROBE_BYTES + SLACK_BYTES)
    assert transport_of(before, traffic(), US, device=False) is None


def test_a_peer_that_does_not_say_where_it_runs_has_no_known_transport():
    assert transport_of(traffic(), traffic(), None, device=False) is None


def test_another_copier_of_the_kernel_is_not_taken_for_cma(monkeypatch):
    monkeypatch.setattr(transport_probe, "_OTHER_COPIERS", ("/dev/null",))
    nothing = Traffic({}, rdma=False)
    assert transport_of(nothing, nothing, US, device=False) == ""


def test_a_mapped_address_is_that_of_the_peer():
    sent = {7: (transport_probe._plain("::ffff:10.1.2.3"), PROBE_BYTES)}
    assert transport_of(Traffic({}, rdma=False), Traffic(sent, rdma=False), ELSEWHERE, device=False) == "tcp"
