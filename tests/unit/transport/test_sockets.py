"""Which connections of ours lead to a peer, by the kernel's table."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pdpool_connector.layout.process import started_at
from pdpool_connector.transport.sockets import Holder, connections, leading_to, other_ends

HERE, PEER, ITSELF = (f"127.{number}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}" for number in (77, 78, 79))
"""Addresses that no other test uses: the kernel's table is the whole machine's."""

CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), source_address=(sys.argv[3], 0)) as peer:
    peer.sendall(b"x" * 4096)
    sys.stdin.read()
"""


def leading_there(address: str = PEER) -> int:
    return len(leading_to([address], connections(os.getpid())))


@contextmanager
def client(port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", CLIENT, HERE, str(port), PEER], stdin=subprocess.PIPE)
    with process:
        yield process
        process.kill()


def test_connection_stays_until_our_end_closes():
    with socket.create_server((HERE, 0)) as server, client(server.getsockname()[1]) as peer:
        ours, _ = server.accept()
        assert leading_there() == 1
        peer.kill()
        peer.wait(60)
        assert leading_there() == 1, "what it had sent has not been read"
        ours.close()
        assert leading_there() == 0


def test_unaccepted_connection_counts():
    with socket.create_server((HERE, 0)) as server, client(server.getsockname()[1]) as peer:
        server.settimeout(60)
        while not leading_there():
            assert peer.poll() is None
        server.accept()[0].close()


def test_own_and_listening_sockets_do_not_count():
    with socket.create_server((HERE, 0)) as server, client(server.getsockname()[1]):
        ours, _ = server.accept()
        assert leading_there(ITSELF) == leading_there(HERE) == 0
        with socket.create_connection(server.getsockname(), source_address=(ITSELF, 0)):
            itself, _ = server.accept()
            assert leading_there(ITSELF) == 0
            itself.close()
        ours.close()


def test_ipv4_in_ipv6_form_is_the_same_address():
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server,
        client(server.getsockname()[1]),
    ):
        ours, _ = server.accept()
        assert leading_there() == 1
        ours.close()


FORKING = """
import os, socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), source_address=(sys.argv[3], 0))
if os.fork():
    print("forked", flush=True)
    os._exit(0)
sys.stdin.read()
"""


def test_forked_child_holds_the_connection():
    arguments = [sys.executable, "-c", FORKING, HERE]
    before = other_ends(os.getpid())  # of connections that this process has kept from elsewhere
    with socket.create_server((HERE, 0)) as server:
        port = str(server.getsockname()[1])
        with subprocess.Popen(
            [*arguments, port, PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as parent:
            ours, _ = server.accept()
            assert parent.stdout is not None
            assert parent.stdout.readline() == "forked\n"
            parent.wait(60)
            (ends,) = [ends for ends in other_ends(os.getpid()) if ends and ends not in before]
            (helper,) = ends
            assert isinstance(helper, Holder)
            assert helper.pid != parent.pid
            ours.close()


@pytest.mark.parametrize("listening", [HERE, "0.0.0.0", "::"], ids=["one address", "any", "any IPv6"])
def test_other_end_of_unaccepted_connection_counts(listening):
    family = socket.AF_INET6 if ":" in listening else socket.AF_INET
    with (
        socket.create_server((listening, 0), family=family, dualstack_ipv6=family is socket.AF_INET6) as server,
        client(server.getsockname()[1]) as peer,
    ):
        while not leading_there():
            assert peer.poll() is None
        assert frozenset({Holder(peer.pid, started_at(peer.pid))}) in other_ends(os.getpid())
        peer.kill()
        peer.wait(10)
        assert frozenset() in other_ends(os.getpid()), "what it had sent has not been read"


def test_connections_at_other_ports_do_not_count():
    listener = "import socket, sys; s = socket.create_server((sys.argv[1], 0)); print(s.getsockname()[1], flush=True); "
    with subprocess.Popen(
        [sys.executable, "-c", listener + "sys.stdin.read()", HERE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        with client(int(other.stdout.readline())) as peer:
            while not leading_there():
                assert peer.poll() is None
            assert not any(peer.pid == end.pid for ends in other_ends(os.getpid()) for end in ends)
        other.kill()
