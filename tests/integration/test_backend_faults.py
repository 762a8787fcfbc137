"""Every backend when a peer is killed, stopped or restarted: no transfer is reported done that is not."""

import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress

import msgspec
import numpy as np
from pdpool_connector.layout.memory import encode_remote

from tests.integration.backend_cases import (
    CANARY,
    LARGE,
    OVER_TCP,
    PLANES,
    SMALL,
    cross,
    expected,
    fill,
    item,
    move,
    peers,
    until,
)

WHOLE = list(range(32))  # all pages of LARGE: 128 MiB


def pytest_generate_tests(metafunc):
    cross(metafunc, "plane", PLANES)
    cross(metafunc, "tcp", OVER_TCP)


def stream(initiator, target):
    """Let the initiator move all pages again and again, and wait for the first byte."""
    source, sink = initiator, target
    fill(source, sink)
    region = sink.remote.memory.kv[0]
    initiator.post("stream", peer=target.name, local=WHOLE, remote=WHOLE, wait_s=20.0)
    until(lambda: (item(sink, region, 0) != CANARY).any(), "the first byte")


def test_a_killed_target_is_a_failure_within_two_seconds_and_only_its_own(plane):
    with peers(plane, LARGE, "i", "A", "B") as (initiator, doomed, other):
        for target in (doomed, other):
            assert initiator.connect(target) == {}
        stream(initiator, doomed)
        doomed.process.kill()
        doomed.process.wait(10)
        killed_at = time.monotonic()
        answer = initiator.answer()
        assert answer["outcome"] == plane.lost.value, answer
        assert answer["failure"]
        assert answer["at"] - killed_at < 2.0
        assert move(initiator, other, [1], [2])["outcome"] == "done"
        assert initiator.call("disconnect", peer=doomed.name) == {}


def test_a_stopped_target_never_gives_a_false_done(plane):
    with peers(plane, LARGE, "i", "T") as (initiator, target):
        assert initiator.connect(target) == {}
        source, sink = initiator, target
        fill(source, sink)
        wanted = expected(source, sink, WHOLE, WHOLE)
        target.signal(signal.SIGSTOP)
        handle = initiator.call("submit", peer=target.name, local=WHOLE, remote=WHOLE)["handle"]
        outcome = initiator.call("poll", handle=handle, wait_s=1.5)["outcome"]
        if outcome == "done":  # where the target's CPU is not needed this is true, and must be
            assert np.array_equal(sink.arena.view, wanted)
        else:
            assert outcome == "pending"
        target.signal(signal.SIGCONT)
        assert initiator.call("poll", handle=handle, wait_s=40.0)["outcome"] == "done"
        assert np.array_equal(sink.arena.view, wanted)


def test_over_tcp_a_stopped_target_stays_pending_and_costs_no_cpu(tcp):
    with peers(tcp, LARGE, "i", "T") as (initiator, target):
        assert initiator.connect(target) == {}
        target.signal(signal.SIGSTOP)
        handle = initiator.call("submit", peer=target.name, local=[0], remote=[0])["handle"]
        before = initiator.call("usage")["cpu_s"]
        assert initiator.call("poll", handle=handle, wait_s=2.0)["outcome"] == "pending"
        assert initiator.call("usage")["cpu_s"] - before < 0.5, "waiting for a stopped peer must not spin"
        target.signal(signal.SIGCONT)
        assert initiator.call("poll", handle=handle, wait_s=60.0)["outcome"] == "done"


def test_over_tcp_a_stopped_peer_delays_no_other(tcp):
    with peers(tcp, SMALL, "i", "j", "A", "B") as (initiator, free, frozen, other):
        for target in (frozen, other):
            assert initiator.connect(target) == {}
        assert free.connect(other) == {}
        job = {"local": list(range(8)), "remote": list(range(8)), "times": 300}
        frozen.signal(signal.SIGSTOP)
        free.post("together", jobs=[{**job, "peer": other.name}])
        jobs = [{**job, "peer": frozen.name, "times": 1}, {**job, "peer": other.name}]
        beside = initiator.call("together", jobs=jobs, wait_s=20.0)
        alone = free.answer()
        assert [outcome for outcome, _ in beside] == ["pending", "done"]
        # One that knows no stopped peer does the same at the same time, so that a slow machine is no delay.
        assert beside[1][1] < 3 * alone[0][1] + 1.0


def test_over_tcp_connecting_a_stopped_peer_ends_by_its_deadline(tcp):
    # As long as the peers that do answer may need for it beside much other work.
    with peers(tcp, {**SMALL, "connect_timeout_s": 5.0}, "i", "A", "B") as (initiator, frozen, other):
        threads = initiator.call("usage")["threads"]
        frozen.signal(signal.SIGSTOP)
        started = time.monotonic()
        answer = initiator.connect(frozen)
        assert answer["error"] == "PeerUnreachableError"
        assert "did not answer within 5.0 s" in answer["message"]
        assert time.monotonic() - started < 30.0, "half of what Mooncake waits by itself"
        until(lambda: initiator.call("usage")["threads"] <= threads, "the end of a thread that may end the process")
        assert initiator.connect(other) == {}
        assert move(initiator, other, [1], [2])["outcome"] == "done"
        frozen.signal(signal.SIGCONT)
        assert initiator.connect(frozen) == {}
        assert move(initiator, frozen, [1], [2])["outcome"] == "done"


def test_over_tcp_connecting_a_stopped_peer_delays_no_other(tcp):
    with peers(tcp, {**SMALL, "connect_timeout_s": 6.0}, "i", "A", "B") as (initiator, frozen, other):
        assert initiator.connect(other) == {}
        frozen.signal(signal.SIGSTOP)
        answer = initiator.call("beside_connect", stranger=frozen.name, remote=frozen.encoded(), peer=other.name)
        assert answer["connect"] == "PeerUnreachableError"
        assert answer["moved"] > 10, f"transfers to another peer that ended during the connect: {answer}"
        assert answer["longest_s"] < 3.0, "half of what the connect takes"


@contextmanager
def freezing_after_its_greeting():
    """The port of a Mooncake process that answers a probe, and nothing that is asked after it."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        silent = []

        def greet():
            with suppress(OSError):  # closed at the end of the test
                probe, _ = door.accept()
                with probe:
                    probe.recv(4096)
                    probe.sendall((2).to_bytes(8, "little") + b"\x03{")
                while True:
                    silent.append(door.accept()[0])

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        yield door.getsockname()[1]
        door.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for connection in silent:
            connection.close()


def test_a_mooncake_peer_that_freezes_after_its_greeting_stops_the_others_for_two_seconds_at_most():
    with peers(PLANES["mooncake"], SMALL, "i", "A") as (initiator, other), freezing_after_its_greeting() as port:
        assert initiator.connect(other) == {}
        descriptor = msgspec.msgpack.encode({"session": f"127.0.0.1:{port}", "scratch": 4096})
        remote = encode_remote(msgspec.structs.replace(other.remote, descriptor=descriptor)).hex()
        answer = initiator.call("beside_connect", stranger="stranger", remote=remote, peer=other.name)
        assert answer["connect"] == "PeerUnreachableError"
        assert answer["moved"] > 0
        assert answer["longest_s"] < 8.0, "less than the time for a connect"


def test_connections_to_dead_peers_are_closed(tcp):
    with peers(tcp, SMALL, "i", "A", "B", "C") as (initiator, *targets):
        used = []
        for doomed in targets:
            assert initiator.connect(doomed) == {}
            assert move(initiator, doomed, range(1, 12, 2), range(1, 12, 2))["outcome"] == "done"
            doomed.process.kill()
            doomed.process.wait(10)
            assert initiator.call("disconnect", peer=doomed.name) == {}
            if used:  # the first brings what libraries open once
                until(lambda: initiator.call("usage")["fds"] <= used[-1], f"the end of all connections: {used}")
            used.append(initiator.call("usage")["fds"])


def test_a_killed_initiator_leaves_the_target_serving_others(plane):
    with peers(plane, LARGE, "i", "j", "T") as (doomed, other, target):
        assert doomed.connect(target) == {}
        stream(doomed, target)
        doomed.process.kill()
        doomed.process.wait(10)
        assert other.connect(target) == {}
        source, sink = other, target
        source.arena.view[:] = 7
        assert move(other, target, [3], [31])["outcome"] == "done"
        assert (item(sink, sink.remote.memory.kv[0], 31) == 7).all()
        assert target.call("usage")["threads"] >= 1


def test_a_restarted_peer_is_served_as_a_new_incarnation_and_the_former_is_lost(plane):
    with peers(plane, SMALL, "i", "T", "T") as (initiator, former, latter):
        assert initiator.connect(former) == {}
        assert move(initiator, former, [1], [1])["outcome"] == "done"
        former.process.kill()
        former.process.wait(10)
        assert move(initiator, former, [2], [2])["outcome"] == plane.lost.value
        assert initiator.call("disconnect", peer=former.name) == {}
        assert initiator.connect(latter) == {}
        for _ in range(2):
            assert initiator.connect(former)["error"] == "PeerUnreachableError"
        assert initiator.call("submit", peer=former.name, local=[0], remote=[0])["error"] == "UnknownPeerError"
        source, sink = initiator, latter
        fill(source, sink)
        wanted = expected(source, sink, [4], [5])
        assert move(initiator, latter, [4], [5])["outcome"] == "done"
        assert np.array_equal(sink.arena.view, wanted)


def test_over_tcp_a_process_outlives_those_that_leave_it_in_the_middle(tcp):
    with peers(tcp, LARGE, "i", "T", "j", "k") as (first, target, leaving, killed):
        for initiator in (first, leaving, killed):
            assert initiator.connect(target) == {}
        for fleeting, leave in ((leaving, leaving.process.stdin.close), (killed, killed.process.kill)):
            target.signal(signal.SIGSTOP)
            for _ in range(4):
                fleeting.call("submit", peer=target.name, local=WHOLE, remote=WHOLE)
            target.signal(signal.SIGCONT)
            leave()
            fleeting.process.wait(60)
            assert move(first, target, [1], [2])["outcome"] == "done"


def test_a_transfer_open_at_disconnect_is_unsettled(tcp):
    with peers(tcp, LARGE, "i", "T") as (initiator, target):
        assert initiator.connect(target) == {}
        target.signal(signal.SIGSTOP)
        handle = initiator.call("submit", peer=target.name, local=[0], remote=[0])["handle"]
        assert initiator.call("poll", handle=handle)["outcome"] == "pending"
        assert initiator.call("disconnect", peer=target.name) == {}
        assert initiator.call("poll", handle=handle)["outcome"] == "failed_unsettled"
        target.signal(signal.SIGCONT)
        assert initiator.connect(target) == {}
        assert move(initiator, target, [1], [1])["outcome"] == "done"
