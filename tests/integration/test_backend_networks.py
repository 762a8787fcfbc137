"""Backends over IPv6 and between network namespaces, where only a network connects the two processes."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dev.shell import wait_for
from tests.integration.backend_cases import (
    LARGE,
    SMALL,
    Plane,
    carried,
    cross,
    expected,
    fill,
    move,
    peers,
)
from tests.integration.namespaces import DEVICE, HOSTS, wire

SOURCE, SINK, AUX = [3, 4, 5, 17, 44, 0], [40, 41, 42, 2, 47, 0], (1, 6)

UCX_TCP = {"UCX_TLS": "tcp"}
BACKENDS = {"nixl": Plane("nixl", UCX_TCP), "mooncake": Plane("mooncake")}


def pytest_generate_tests(metafunc):
    cross(metafunc, "plane", BACKENDS)


@pytest.fixture(scope="module")
def link():
    with wire() as made:
        yield made


def across(link, plane, geometry, version=4, *more):
    """An initiator in one namespace and a target in the other, with `more` of them."""
    family = {"UCX_TCP_AF_PRIO": "inet6" if version == 6 else "inet"} if plane.backend == "nixl" else {}
    env = {**plane.env, **family}
    opened = replace(plane, env=env)
    prefixes = [link.inside(0), *[link.inside(1)] * (1 + len(more))]
    hosts = [HOSTS[version][0], *[HOSTS[version][1]] * (1 + len(more))]
    return peers(opened, geometry, "i", "T", *more, prefixes=prefixes, hosts=hosts)


def check_bytes(initiator, target):
    source, sink = initiator, target
    fill(source, sink)
    wanted = expected(source, sink, SOURCE, SINK, AUX)
    assert move(initiator, target, SOURCE, SINK, AUX)["outcome"] == "done"
    assert np.array_equal(sink.arena.view, wanted)


def test_bytes_move_over_the_loopback_of_ipv6(plane):
    env = {**plane.env, "UCX_TCP_AF_PRIO": "inet6", "UCX_NET_DEVICES": "lo"} if plane.backend == "nixl" else plane.env
    with peers(replace(plane, env=env, host="::1"), SMALL, "i", "T") as (initiator, target):
        assert initiator.connect(target) == {}
        check_bytes(initiator, target)
        counts = carried(initiator.pid)
        assert counts[6] > 0
        assert counts[4] == 0


@pytest.mark.parametrize("version", [4, 6])
def test_bytes_move_between_network_namespaces(link, plane, version):
    with across(link, plane, SMALL, version) as (initiator, target):
        assert initiator.connect(target) == {}
        check_bytes(initiator, target)
        counts = carried(initiator.pid)
        assert counts[version] > 0
        assert counts[10 - version] == 0


def test_a_cut_wire_is_never_called_done_and_what_waits_goes_on_when_it_is_mended(link, plane):
    pages = list(range(32))
    with across(link, plane, LARGE) as (initiator, target):
        assert initiator.connect(target) == {}
        source, sink = initiator, target
        fill(source, sink)
        wanted = expected(source, sink, pages, pages)
        link.cut()
        try:
            handle = initiator.call("submit", peer=target.name, local=pages, remote=pages)["handle"]
            assert initiator.call("poll", handle=handle, wait_s=1.5)["outcome"] == "pending"
        finally:
            link.mend()
        assert initiator.call("poll", handle=handle, wait_s=80.0)["outcome"] == "done"
        assert np.array_equal(sink.arena.view, wanted)


def test_without_the_wire_nobody_can_be_connected(link, plane):
    geometry = {**SMALL, "connect_timeout_s": 5.0}
    with across(link, plane, geometry, 4, "U") as (initiator, target, other):
        # UCX that makes its first connection while the wire is cut does not always find the way later.
        assert initiator.connect(other) == {}
        link.cut()
        try:
            started = time.monotonic()
            assert initiator.connect(target)["error"] == "PeerUnreachableError"
            assert time.monotonic() - started < 30.0
        finally:
            link.mend()
        # The kernel has given the neighbour up, and asks for its address again within seconds.
        wait_for("the wire to be of use again", lambda: initiator.connect(target).get("message"), deadline_s=60)
        check_bytes(initiator, target)


def test_the_wire_is_where_the_bytes_go(link, plane):
    def received():
        text = Path(f"/proc/{target.pid}/net/dev").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.strip().startswith(f"{DEVICE}:"))

    with across(link, plane, LARGE) as (initiator, target):
        assert initiator.connect(target) == {}
        before = received()
        assert move(initiator, target, range(32), range(32))["outcome"] == "done"
        assert received() - before > 128 << 20
